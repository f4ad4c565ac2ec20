-- keep(ticket, secret, lease ms): extends the lease of a ticket whose blocks another host is reading. The lease never
-- gets shorter.
local ticket, secret = ARGV[2], ARGV[3]
if not is_ticket(ticket, secret) then return '-GONE' end
call('ZADD', LEASES, math.max(tonumber(live(ticket)), now_ms() + tonumber(ARGV[4])), ticket)
return '+'
