-- How many blocks a holder may take: floors, what awaits its writer, quarantine.

-- What others may still claim of their floors (docs/design.md, Ledger: floors).
local function floors_of_others(epoch)
  local sum, floors = 0, call('HGETALL', FLOORS)
  for i = 1, #floors, 2 do
    if floors[i] ~= epoch then sum = sum + math.max(0, tonumber(floors[i + 1]) - call('ZCARD', own_key(floors[i]))) end
  end
  return sum
end

-- Blocks that `epoch` may take from free and cached ones.
local function room_for(epoch)
  return call('LLEN', FREE_LIST) + call('ZCARD', CACHED_SET) - floors_of_others(epoch)
end

-- After a rebuild: whether somebody who may hold blocks that look cached has yet to assert them. Bounded by a lease.
local function awaiting()
  return call('SCARD', AWAITED) > 0 and now_ms() < tonumber(call('HGET', META, 'grace_until'))
end

-- Up to `room` quarantined blocks of a writer slot become FREE. Returns how many.
local function unquarantine(slot, room)
  local blocks = call('ZRANGEBYSCORE', QUARANTINE_SET, slot, slot, 'LIMIT', 0, room)
  expect(read_all(blocks), QUARANTINE)
  for _, block in ipairs(blocks) do set_state(block, FREE, 0) end
  send('ZREM', QUARANTINE_SET, blocks)
  send('LPUSH', FREE_LIST, blocks)
  return #blocks
end
