-- Room for allocations: how many blocks a holder may take, whether blocks wait for holders after a rebuild, and the end
-- of a quarantine.

-- Returns how many blocks the unused floors of other holders reserve (docs/design.md, Ledger: floors).
local function floors_of_others(epoch)
  local sum, floors = 0, call('HGETALL', FLOORS)
  for i = 1, #floors, 2 do
    if floors[i] ~= epoch then sum = sum + math.max(0, tonumber(floors[i + 1]) - call('ZCARD', own_key(floors[i]))) end
  end
  return sum
end

-- Returns how many free and cached blocks `epoch` may take.
local function room_for(epoch)
  return call('LLEN', FREE_LIST) + call('ZCARD', CACHED_SET) - floors_of_others(epoch)
end

-- Returns whether, after a rebuild, a worker has yet to assert its blocks, some of which may look cached. Returns false
-- after the grace period.
local function awaiting()
  return call('SCARD', AWAITED) > 0 and now_ms() < tonumber(call('HGET', META, 'grace_until'))
end

-- Frees up to `room` quarantined blocks of a writer slot. Returns how many it has freed.
local function unquarantine(slot, room)
  local blocks = call('ZRANGEBYSCORE', QUARANTINE_SET, slot, slot, 'LIMIT', 0, room)
  expect(read_all(blocks), QUARANTINE)
  for _, block in ipairs(blocks) do set_state(block, FREE, 0) end
  send('ZREM', QUARANTINE_SET, blocks)
  send('LPUSH', FREE_LIST, blocks)
  return #blocks
end
