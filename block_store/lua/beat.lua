-- beat(epoch, lease ms): the lease never gets shorter. Answers with the blocks that the holder could still take.
local epoch = ARGV[2]
local deadline = live(epoch)
if not deadline then return '-FENCED' end
call('ZADD', LEASES, math.max(tonumber(deadline), now_ms() + tonumber(ARGV[3])), epoch)
return '+' .. text(math.max(0, room_for(epoch)))
