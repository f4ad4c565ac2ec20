-- reap(lease ms, longest lease ms, gap ms, free writer slots u32[], tick seen): first frees blocks that waited for these slots, and then
-- reaps holders whose leases have ended. The order matters: the caller checked the locks before the call, so it has not
-- checked the locks for blocks that are only now put into quarantine. Answers with the reaped epochs, the number of
-- freed blocks, whether the reaping was postponed, whether work remains for a further call, the tick, and the slots to
-- wait for.
local MOST_LEASE_MS = 3600000

-- Checks that the numbers of listed and counted blocks add up to the arena, that the floors fit, and that no lease
-- lasts longer than MOST_LEASE_MS. A ledger that fails these checks was changed by a different program, which might not
-- be noticed otherwise until `fsck` is run.
local function check_sums()
  local meta = call('HMGET', META, 'num_blocks', 'reserved', 'sealed')
  local listed = call('LLEN', FREE_LIST) + call('ZCARD', CACHED_SET) + call('ZCARD', QUARANTINE_SET)
  if listed + meta[2] + meta[3] ~= tonumber(meta[1]) or call('STRLEN', BLOCKS) ~= meta[1] * RECORD then
    error('the blocks do not add up')
  end
  local sum = 0
  for _, floor in ipairs(call('HVALS', FLOORS)) do sum = sum + math.max(0, tonumber(floor)) end
  if sum > tonumber(meta[1]) then error('the floors exceed the arena') end
  local last = call('ZREVRANGE', LEASES, 0, 0, 'WITHSCORES')
  if last[2] and tonumber(last[2]) > now_ms() + MOST_LEASE_MS then error('a lease does not end') end
end

local lease_ms, longest_ms, gap_ms = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local slots, seen = ARGV[5], tonumber(ARGV[6])
-- The ledger's clock has gone back, so an older snapshot has been restored.
if tonumber(call('HGET', META, 'tick')) < seen then return '-STALE_DATASET' end
check_sums()
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

-- After a freeze or a clock step, every holder can look dead, so all leases are renewed.
local now, last = now_ms(), tonumber(call('HGET', META, 'last_reap'))
call('HSET', META, 'last_reap', text(now))
local postponed, reaped = last > now or now - last > gap_ms, {}
if postponed then
  local leases = {}
  local function renew(first, last_deadline, deadline)
    for _, epoch in ipairs(call('ZRANGEBYSCORE', LEASES, first, last_deadline)) do
      leases[#leases + 1] = deadline
      leases[#leases + 1] = epoch
    end
  end
  renew('-inf', now + lease_ms, now + lease_ms)
  -- The clock was set back. Leases whose deadlines are as far in the future would not end until the clock got there.
  if last > now then renew(now + longest_ms, '+inf', now + longest_ms) end
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
