-- keep(ticket, secret, lease ms, refs): refuses unless the ticket is live and holds all `refs`. Extends the lease of
-- the ticket, whose blocks another host is reading. The lease never gets shorter.
local ticket, secret = ARGV[2], ARGV[3]
if not is_ticket(ticket, secret) then return '-GONE' end
local blocks, generations = unpack_refs(ARGV[5])
local own, records = owns(ticket, blocks), read_all(blocks)
for i, block in ipairs(blocks) do
  if not own[i] or generation_of(records[i]) ~= generations[i] then return '-NOT_HOLDER ' .. block end
end
call('ZADD', LEASES, math.max(tonumber(live(ticket)), now_ms() + tonumber(ARGV[4])), ticket)
return '+'
