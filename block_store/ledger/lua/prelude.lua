-- Put before every operation's script. KEYS[1] is '{looseleaf:<arena>}:meta'; the other keys share its hash tag.
-- ARGV[1] is the dataset generation under which the caller believes the ledger was built.
--
-- Keys: meta (hash: dataset, run_id, num_blocks, rebuild, epoch, tick, reserved, sealed, last_reap, grace_until)
--   blocks (string, RECORD bytes each: state u8, hashed u8, owner u16 (0: nobody), writer slot u32, generation u64,
--           writer epoch u64, hash[32])
--   refs   (hash: block -> its holders' epochs, u64 each)          the block side
--   own:<epoch>    (zset: block, by the order in which it came)    the holder side; the generation is the block's
--   holder:<epoch> (hash: kind, name, slot, floor, token, secret, claimer, number, reply)
--   index  (hash: prefix hash -> block)
--   free (list)     cached (zset: eviction order)     quarantine (zset: writer slot; 0: see `awaiting`)
--   owners (hash: id of a tenant with a quota -> owner)     quotas (hash: owner -> blocks that may be cached)
--   cached:<owner> (zset: those of `cached` that are the owner's)
--   dying (zset: epoch -> was it reaped)     dying:<epoch> (zset: what it still holds, as `own` was)
--   awaited (set: writer slots that were locked when the ledger was built and have not asserted what they hold)
--   leases (zset: deadline, ms)     floors (hash: epoch -> blocks)     tokens (hash: register's token -> epoch)
-- Generations are passed on as 8 opaque bytes: a Lua number holds only 53 bits.
--
-- A script blocks the server while it runs, so none does more than MOST blocks' worth of work, whatever is held: callers
-- come again with the rest.
local call = redis.call
local META = KEYS[1]
local TAG = string.sub(META, 1, -5)
local BLOCKS, REFS, INDEX = TAG .. 'blocks', TAG .. 'refs', TAG .. 'index'
local FREE_LIST, CACHED_SET, QUARANTINE_SET = TAG .. 'free', TAG .. 'cached', TAG .. 'quarantine'
local LEASES, FLOORS, TOKENS = TAG .. 'leases', TAG .. 'floors', TAG .. 'tokens'
local DYING, AWAITED = TAG .. 'dying', TAG .. 'awaited'
local OWNERS, QUOTAS = TAG .. 'owners', TAG .. 'quotas'
local FREE, RESERVED, SEALED, CACHED, QUARANTINE = 1, 2, 3, 4, 5
local RECORD = 56
local CHUNK = 4000 -- arguments of one command; Lua's unpack fails near 8000
local MOST = 256 -- blocks that one call frees beside those that it names; scripts.CHUNK of those
local MOST_LET_GO = 96 -- blocks that one call lets go of; each may evict another. scripts.RELEASE_CHUNK
local MOST_HOLDERS = 64 -- holders that one call ends
local MOST_OWNERS = 65535 -- numbers for owners; blocks of later ones count for nobody

if call('HGET', META, 'dataset') ~= ARGV[1] then return '-STALE_DATASET' end

local function own_key(epoch) return TAG .. 'own:' .. epoch end
local function holder_key(epoch) return TAG .. 'holder:' .. epoch end
local function dying_key(epoch) return TAG .. 'dying:' .. epoch end
local function cached_key(owner) return TAG .. 'cached:' .. owner end
local function u64(number) return struct.pack('<I8', tonumber(number)) end
local function live(epoch) return call('ZSCORE', LEASES, epoch) end

-- Whether `epoch` is a live ticket with that secret. Lua compares texts by address: its time says nothing of a guess.
local function is_ticket(epoch, secret)
  local found = live(epoch) and call('HMGET', holder_key(epoch), 'kind', 'secret')
  return found and found[1] == 'ticket' and found[2] == secret
end

local function now_ms()
  local time = call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Lua's own text of a large number is 1e+14.
local function text(number) return string.format('%.0f', number) end

-- A command with a long list of arguments, in pieces; CHUNK is even, so pairs stay together.
local function send(command, key, list)
  for first = 1, #list, CHUNK do
    call(command, key, unpack(list, first, math.min(first + CHUNK - 1, #list)))
  end
end

local function hmget(key, fields)
  local values = {}
  for first = 1, #fields, CHUNK do
    local part = call('HMGET', key, unpack(fields, first, math.min(first + CHUNK - 1, #fields)))
    for i = 1, #part do values[first + i - 1] = part[i] end
  end
  return values
end

-- Ordered lane (I8). Returns the reply to give at once: the stored one to a repeated call, or a refusal.
local function lane(epoch, number)
  if not live(epoch) then return '-FENCED' end
  local last = call('HMGET', holder_key(epoch), 'number', 'reply')
  if last[1] == number then return last[2] end
  if tonumber(number) < tonumber(last[1]) then return '-OUT_OF_ORDER' end
end

local function answer(epoch, number, reply)
  call('HSET', holder_key(epoch), 'number', number, 'reply', reply)
  return reply
end

-- References as passed: block u32, generation u64. Block numbers come back as text, like Redis gives them.
local function unpack_refs(packed)
  local blocks, generations = {}, {}
  for at = 1, #packed, 12 do
    blocks[#blocks + 1] = text((struct.unpack('<I4', packed, at)))
    generations[#generations + 1] = string.sub(packed, at + 4, at + 11)
  end
  return blocks, generations
end

local function pack_ref(block, generation) return struct.pack('<I4', tonumber(block)) .. generation end

local function read(block)
  local at = tonumber(block) * RECORD
  return call('GETRANGE', BLOCKS, at, at + RECORD - 1)
end

-- Calls `visit(first, last, lowest block)` for each run of neighbours in the list, up or down: blocks that were handed
-- out together mostly are neighbours, and a call costs more than what it does to one block.
local function each_run(blocks, visit)
  local n, first = #blocks, 1
  while first <= n do
    local start, last = tonumber(blocks[first]), first
    local step = first < n and tonumber(blocks[first + 1]) - start
    if step == 1 or step == -1 then
      last = first + 1
      while last < n and tonumber(blocks[last + 1]) == start + step * (last + 1 - first) do last = last + 1 end
    end
    visit(first, last, math.min(start, tonumber(blocks[last])))
    first = last + 1
  end
end

local function read_all(blocks)
  local records = {}
  each_run(blocks, function(first, last, lowest)
    local packed = call('GETRANGE', BLOCKS, lowest * RECORD, (lowest + last - first + 1) * RECORD - 1)
    for i = first, last do
      local at = (tonumber(blocks[i]) - lowest) * RECORD
      records[i] = string.sub(packed, at + 1, at + RECORD)
    end
  end)
  return records
end

local function write_all(blocks, records)
  each_run(blocks, function(first, last, lowest)
    local parts = {}
    for i = first, last do parts[tonumber(blocks[i]) - lowest + 1] = records[i] end
    call('SETRANGE', BLOCKS, lowest * RECORD, table.concat(parts))
  end)
end

local function state_of(record) return string.byte(record, 1) end
local function generation_of(record) return string.sub(record, 9, 16) end
local function owner_of(record) return (struct.unpack('<I2', record, 3)) end

-- For blocks that a list says are in `state`. If one is not, somebody else has written here: without this a block could
-- be given to two who write into it.
local function expect(records, state)
  for _, record in ipairs(records) do
    if state_of(record) ~= state then error('a block is listed as what it is not') end
  end
end

-- State and hashed flag; what else the record holds stays.
local function in_state(record, state, hashed) return string.char(state, hashed) .. string.sub(record, 3) end
local function set_state(block, state, hashed)
  call('SETRANGE', BLOCKS, tonumber(block) * RECORD, string.char(state, hashed))
end

-- Sets of epochs, packed.
local function holds(side, epoch8)
  for at = 1, #side, 8 do
    if string.sub(side, at, at + 7) == epoch8 then return true end
  end
  return false
end

local function without(side, epoch8)
  if side == epoch8 then return '' end
  for at = 1, #side, 8 do
    if string.sub(side, at, at + 7) == epoch8 then return string.sub(side, 1, at - 1) .. string.sub(side, at + 8) end
  end
  return side
end

-- `n` numbers of the one clock that orders evictions and references; returns the one before the first.
local function ticks(n) return call('HINCRBY', META, 'tick', n) - n end

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

-- The holder side: `epoch` holds `blocks` from now on, in this order, from the clock's `order` on.
local function add_own(epoch, blocks, order)
  local pairs_of = {}
  for i, block in ipairs(blocks) do pairs_of[2 * i - 1], pairs_of[2 * i] = order + i, block end
  send('ZADD', own_key(epoch), pairs_of)
end

-- Whether `epoch` holds each of `blocks`; false if not.
local function owns(epoch, blocks)
  if #blocks == 0 then return {} end
  return call('ZMSCORE', own_key(epoch), unpack(blocks))
end

-- Blocks that were CACHED leave the eviction order, and that of their owners.
local function leave_cache(blocks, records)
  send('ZREM', CACHED_SET, blocks)
  local by_owner = {}
  for i, block in ipairs(blocks) do
    local owner = owner_of(records[i])
    if owner > 0 then
      by_owner[owner] = by_owner[owner] or {}
      table.insert(by_owner[owner], block)
    end
  end
  for owner, owned in pairs(by_owner) do send('ZREM', cached_key(owner), owned) end
end

-- The index forgets blocks that were CACHED.
local function unindex(blocks, records)
  local hashes, evicted = {}, {}
  for i = 1, #blocks do hashes[i] = string.sub(records[i], 25, 56) end
  for i, block in ipairs(hmget(INDEX, hashes)) do
    if block == blocks[i] then evicted[#evicted + 1] = hashes[i] end
  end
  send('HDEL', INDEX, evicted)
end

-- Blocks have become CACHED: `order` has a tick and a block for each. An owner that has more than its quota now loses
-- its coldest.
local function enter_cache(order, records)
  send('ZADD', CACHED_SET, order)
  local by_owner = {}
  for i = 1, #order, 2 do
    local owner = owner_of(records[(i + 1) / 2])
    if owner > 0 then
      local owned = by_owner[owner] or {}
      by_owner[owner] = owned
      owned[#owned + 1] = order[i]
      owned[#owned + 1] = order[i + 1]
    end
  end
  for owner, owned in pairs(by_owner) do
    local key, surplus = cached_key(owner), {}
    send('ZADD', key, owned)
    local n = call('ZCARD', key) - tonumber(call('HGET', QUOTAS, owner))
    local coldest = n > 0 and call('ZPOPMIN', key, math.min(n, MOST_LET_GO)) or {}
    for i = 1, #coldest, 2 do surplus[#surplus + 1] = coldest[i] end
    local surplus_records = read_all(surplus)
    expect(surplus_records, CACHED)
    unindex(surplus, surplus_records)
    for i, record in ipairs(surplus_records) do surplus_records[i] = in_state(record, FREE, 0) end
    write_all(surplus, surplus_records)
    send('ZREM', CACHED_SET, surplus)
    send('LPUSH', FREE_LIST, surplus)
  end
end

-- References of `epoch` on sealed blocks, one on each, however often it is named. `records` as they are now.
local function pin(epoch, epoch8, blocks, records, order)
  local sides, seen, new_sides, own, warm, warm_records = hmget(REFS, blocks), {}, {}, {}, {}, {}
  for i, block in ipairs(blocks) do
    local side, record = sides[i] or '', records[i]
    if not seen[block] then
      seen[block] = true
      if not holds(side, epoch8) then
        new_sides[#new_sides + 1] = block
        new_sides[#new_sides + 1] = side .. epoch8
        own[#own + 1] = block
      end
      if state_of(record) == CACHED then
        warm[#warm + 1] = block
        warm_records[#warm] = in_state(record, SEALED, 1)
      end
    end
  end
  send('HSET', REFS, new_sides)
  add_own(epoch, own, order)
  leave_cache(warm, warm_records)
  write_all(warm, warm_records)
  call('HINCRBY', META, 'sealed', #warm)
end

-- Takes `epoch` from the block side of `blocks` (a chain, head first). A block that nobody holds any more becomes CACHED
-- if it is indexed, else FREE; `reaped`: unsealed ones go to quarantine. The chain enters the eviction order tail first.
local function let_go(epoch, blocks, reaped)
  local epoch8, sides = u64(epoch), hmget(REFS, blocks)
  local kept, gone, freed, cached, cached_records, waiting = {}, {}, {}, {}, {}, {}
  local num_reserved, num_sealed, tick = 0, 0, ticks(#blocks)
  for i = #blocks, 1, -1 do
    local block, rest = blocks[i], without(sides[i] or '', epoch8)
    if rest ~= '' then
      kept[#kept + 1] = block
      kept[#kept + 1] = rest
    else
      gone[#gone + 1] = block
    end
  end
  local records = read_all(gone)
  for i, block in ipairs(gone) do
    local state, hashed = string.byte(records[i], 1, 2)
    if state == RESERVED then num_reserved = num_reserved + 1 else num_sealed = num_sealed + 1 end
    if state == RESERVED and reaped then
      waiting[#waiting + 1] = (struct.unpack('<I4', records[i], 5))
      waiting[#waiting + 1] = block
      records[i] = in_state(records[i], QUARANTINE, 0)
    elseif hashed == 1 then
      tick = tick + 1
      cached[#cached + 1] = tick
      cached[#cached + 1] = block
      records[i] = in_state(records[i], CACHED, 1)
      cached_records[#cached_records + 1] = records[i]
    else
      freed[#freed + 1] = block
      records[i] = in_state(records[i], FREE, 0)
    end
  end
  write_all(gone, records)
  send('HSET', REFS, kept)
  send('HDEL', REFS, gone)
  send('LPUSH', FREE_LIST, freed)
  enter_cache(cached, cached_records)
  send('ZADD', QUARANTINE_SET, waiting)
  call('HINCRBY', META, 'reserved', 0 - num_reserved)
  call('HINCRBY', META, 'sealed', 0 - num_sealed)
end

-- The number of a new holder.
local function new_epoch()
  local epoch = text(call('HINCRBY', META, 'epoch', 1))
  if call('EXISTS', holder_key(epoch)) == 1 then error('the next epoch is in use') end
  return epoch
end

-- Ends a holder, fence first; `bury` lets go of what it holds.
local function end_holder(epoch, reaped)
  call('ZREM', LEASES, epoch)
  local token = call('HGET', holder_key(epoch), 'token')
  if token then call('HDEL', TOKENS, token) end
  call('HDEL', FLOORS, epoch)
  if call('EXISTS', own_key(epoch)) == 1 then
    call('RENAME', own_key(epoch), dying_key(epoch))
    call('ZADD', DYING, reaped and 1 or 0, epoch)
  end
  call('DEL', holder_key(epoch))
end

-- Lets go of up to MOST_LET_GO blocks of holders that have ended, tails first. Returns whether some are left.
local function bury()
  local room, dying = MOST_LET_GO, call('ZRANGE', DYING, 0, MOST_HOLDERS, 'WITHSCORES')
  for i = 1, #dying, 2 do
    local epoch, key = dying[i], dying_key(dying[i])
    local blocks = call('ZRANGE', key, 0 - room, -1)
    let_go(epoch, blocks, dying[i + 1] == '1')
    call('ZREMRANGEBYRANK', key, 0 - #blocks, -1)
    if call('EXISTS', key) == 1 then return true end
    call('ZREM', DYING, epoch)
    room = room - #blocks
    if room == 0 then break end
  end
  return call('ZCARD', DYING) > 0
end

-- Hashes as passed: number of groups u32, then per group a count u32 and the hashes. Returns the length of the longest
-- prefix indexed for every group, and the blocks per group.
local function indexed_prefix(packed)
  local num_groups, at = struct.unpack('<I4', packed)
  local longest, groups = nil, {}
  for group = 1, num_groups do
    local n, hashes = struct.unpack('<I4', packed, at), {}
    at = at + 4
    for i = 1, n do hashes[i] = string.sub(packed, at + (i - 1) * 32, at + i * 32 - 1) end
    at = at + n * 32
    groups[group] = hmget(INDEX, hashes)
    local found = 0
    while found < n and groups[group][found + 1] do found = found + 1 end
    longest = math.min(longest or found, found)
  end
  return longest or 0, groups
end
