-- beat(epoch, lease ms, number): the lease never gets shorter. Answers with the blocks that
-- the holder could still take and, if one is under way, the census that it should report to.
local epoch = ARGV[2]
local deadline = live(epoch)
if not deadline then return '-FENCED' end
-- The holder has had an answer to a call that is not in here: an older snapshot was restored.
if tonumber(call('HGET', holder_key(epoch), 'number')) < tonumber(ARGV[4]) then
  call('HSET', META, 'dataset', '')
  return '-STALE_DATASET'
end
call('ZADD', LEASES, math.max(tonumber(deadline), now_ms() + tonumber(ARGV[3])), epoch)
return '+' .. text(math.max(0, room_for(epoch))) .. ' ' .. (call('GET', TAG .. 'census') or '')
