-- beat(epoch, lease ms, number): extends the lease, which never gets shorter. Answers with the number of blocks that
-- the holder could still take and, if a census is under way, its name.
local epoch = ARGV[2]
local deadline = live(epoch)
if not deadline then return '-FENCED' end
-- The holder got an answer to a call of which this ledger has no record, so an older snapshot has been restored.
if tonumber(call('HGET', holder_key(epoch), 'number')) < tonumber(ARGV[4]) then
  call('HSET', META, 'dataset', '')
  return '-STALE_DATASET'
end
call('ZADD', LEASES, math.max(tonumber(deadline), now_ms() + tonumber(ARGV[3])), epoch)
return '+' .. text(math.max(0, room_for(epoch))) .. ' ' .. (call('GET', TAG .. 'census') or '')
