-- readable(ticket, secret, refs): refuses unless the ticket is live and holds all `refs`. Reads only.
local ticket, secret = ARGV[2], ARGV[3]
if not is_ticket(ticket, secret) then return '-GONE' end
local blocks, generations = unpack_refs(ARGV[4])
local own, records = owns(ticket, blocks), read_all(blocks)
for i, block in ipairs(blocks) do
  if not own[i] or generation_of(records[i]) ~= generations[i] then return '-NOT_HOLDER ' .. block end
end
return '+'
