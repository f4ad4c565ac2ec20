-- reap(lease ms, gap ms, free writer slots u32[], tick seen): first frees what waited for these slots, then ends holders
-- whose lease is past. In this order, since the caller looked at the locks before the call: what enters quarantine now
-- was not yet looked at.
local lease_ms, gap_ms, slots, seen = tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
-- The clock of the ledger went back: an older snapshot was restored.
if tonumber(call('HGET', META, 'tick')) < seen then return '-STALE_DATASET' end
local freed, more = 0, false
local function free_slot(slot)
  freed = freed + unquarantine(slot, math.max(0, MOST - freed))
  return call('ZCOUNT', QUARANTINE_SET, slot, slot) == 0
end
for at = 1, #slots, 4 do
  local slot = text((struct.unpack('<I4', slots, at)))
  if free_slot(slot) then call('SREM', AWAITED, slot) else more = true end
end
if not awaiting() and not free_slot('0') then more = true end

-- After a freeze or a step of the clock everybody looks dead: a new lease for all.
local now, last = now_ms(), tonumber(call('HGET', META, 'last_reap'))
call('HSET', META, 'last_reap', text(now))
local postponed, reaped = last > now or now - last > gap_ms, {}
if postponed then
  local leases = {}
  for _, epoch in ipairs(call('ZRANGEBYSCORE', LEASES, '-inf', now + lease_ms)) do -- none gets shorter
    leases[#leases + 1] = now + lease_ms
    leases[#leases + 1] = epoch
  end
  send('ZADD', LEASES, leases)
else
  reaped = call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, MOST_HOLDERS)
  for _, epoch in ipairs(reaped) do end_holder(epoch, true) end
  more = more or #reaped == MOST_HOLDERS
end
more = bury() or more

local slot_list, known = {}, { ['0'] = true }
local function look_at(slot)
  if not known[slot] then
    known[slot] = true
    slot_list[#slot_list + 1] = slot
  end
end
local waiting = call('ZRANGEBYSCORE', QUARANTINE_SET, '(0', '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
while waiting[2] do -- from slot to slot
  look_at(waiting[2])
  waiting = call('ZRANGEBYSCORE', QUARANTINE_SET, '(' .. waiting[2], '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
end
for _, slot in ipairs(call('SMEMBERS', AWAITED)) do look_at(slot) end
return '+' .. table.concat({ table.concat(reaped, ','), text(freed), postponed and '1' or '0', more and '1' or '0',
  call('HGET', META, 'tick'), table.concat(slot_list, ',') }, ' ')
