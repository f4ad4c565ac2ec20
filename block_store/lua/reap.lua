-- reap(lease ms, gap ms, free writer slots u32[]): first frees what waited for these slots, then ends holders whose
-- lease is past. In this order, since the caller looked at the locks before the call: what enters quarantine now was
-- not yet looked at.
local lease_ms, gap_ms, slots = tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local freed = 0
for at = 1, #slots, 4 do
  local slot = struct.unpack('<I4', slots, at)
  local blocks = call('ZRANGEBYSCORE', QUARANTINE_SET, slot, slot)
  for _, block in ipairs(blocks) do set_state(block, FREE, 0) end
  send('ZREM', QUARANTINE_SET, blocks)
  send('LPUSH', FREE_LIST, blocks)
  freed = freed + #blocks
end

-- After a freeze or a step of the clock everybody looks dead: a new lease for all.
local now, last = now_ms(), tonumber(call('HGET', META, 'last_reap'))
call('HSET', META, 'last_reap', text(now))
local postponed, reaped = last > now or now - last > gap_ms, {}
if postponed then
  local leases = {}
  for _, epoch in ipairs(call('ZRANGE', LEASES, 0, -1)) do
    leases[#leases + 1] = now + lease_ms
    leases[#leases + 1] = epoch
  end
  send('ZADD', LEASES, leases)
else
  reaped = call('ZRANGEBYSCORE', LEASES, '-inf', now)
  for _, epoch in ipairs(reaped) do end_holder(epoch, true) end
end

local waiting, slot_list, known = call('ZRANGE', QUARANTINE_SET, 0, -1, 'WITHSCORES'), {}, {}
for i = 2, #waiting, 2 do
  if not known[waiting[i]] then
    known[waiting[i]] = true
    slot_list[#slot_list + 1] = waiting[i]
  end
end
local flag = postponed and '1' or '0'
return '+' .. table.concat({ table.concat(reaped, ','), text(freed), flag, table.concat(slot_list, ',') }, ' ')
