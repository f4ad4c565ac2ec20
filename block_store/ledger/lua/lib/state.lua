-- First file of the library (`lua_library.FILES`), whose used statements precede the script of each of
-- `scripts._OPERATIONS`: keys, records, the lane.
-- KEYS[1] is '{looseleaf:<arena>}:meta'; the other keys share its hash tag.
-- ARGV[1] is the dataset generation under which the caller believes the ledger was built.
--
-- Keys: meta (hash: dataset, run_id, num_blocks, rebuild, epoch, tick, reserved, sealed, last_reap, grace_until)
--   blocks (string, RECORD bytes each: state u8, hashed u8, owner u16 (0: nobody), writer slot u32, generation u64,
--           writer epoch u64, hash[32])
--   refs   (hash: block -> its holders' epochs, u64 each)          the block side
--   own:<epoch>    (zset: block, by order of arrival)              the holder side; the generation is the block's
--   holder:<epoch> (hash: kind, name, slot, floor, token, secret, claimer, number, reply)
--   index  (hash: prefix hash -> block)
--   free (list)     cached (zset: eviction order)     quarantine (zset: writer slot; 0: see `awaiting`)
--   owners (hash: id of a tenant with a quota -> owner)     quotas (hash: owner -> blocks that may be cached)
--   cached:<owner> (zset: the owner's blocks among `cached`)
--   dying (zset: epoch -> whether it was reaped)     dying:<epoch> (zset: what it still holds, formerly its `own`)
--   awaited (set: writer slots that were locked when the ledger was built, and whose holders have yet to assert blocks)
--   leases (zset: deadline, ms)     floors (hash: epoch -> blocks)     tokens (hash: register's token -> epoch)
--   census (string: name of the census under way)     census:<name> (hash: epoch -> report)
-- Generations are handled as 8 opaque bytes: a Lua number holds only 53 bits.
--
-- A script blocks the server while it runs, so each script handles a limited number of blocks beyond those that its
-- call names. Callers make further calls for the remaining blocks.
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
local MOST = 256 -- quarantined blocks that one call frees
local MOST_LET_GO = 96 -- blocks of ended holders that one call releases; blocks of one owner that a release evicts
local MOST_HOLDERS = 64 -- holders that one call ends
local MOST_OWNERS = 65535 -- numbers for owners; blocks of later owners count against no quota

if call('HGET', META, 'dataset') ~= ARGV[1] then return '-STALE_DATASET' end

local function own_key(epoch) return TAG .. 'own:' .. epoch end
local function holder_key(epoch) return TAG .. 'holder:' .. epoch end
local function dying_key(epoch) return TAG .. 'dying:' .. epoch end
local function cached_key(owner) return TAG .. 'cached:' .. owner end
local function u64(number) return struct.pack('<I8', tonumber(number)) end
local function live(epoch) return call('ZSCORE', LEASES, epoch) end

-- Returns whether `epoch` is a live ticket with that secret. Lua compares strings by address, so the time that a
-- comparison takes reveals nothing about a guess.
local function is_ticket(epoch, secret)
  local found = live(epoch) and call('HMGET', holder_key(epoch), 'kind', 'secret')
  return found and found[1] == 'ticket' and found[2] == secret
end

local function now_ms()
  local time = call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Returns a number's digits; Lua itself would write a large one as 1e+14.
local function text(number) return string.format('%.0f', number) end

-- Sends a command with a long list of arguments in parts. CHUNK is even, so pairs stay together.
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

-- Ordered lane (I8). Returns the reply if it can be given at once: the stored one for a repeated call, or a refusal.
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

-- Unpacks references: block u32, generation u64. Block numbers are returned as text, as Redis returns them.
local function unpack_refs(packed)
  local blocks, generations = {}, {}
  for at = 1, #packed, 12 do
    blocks[#blocks + 1] = text((struct.unpack('<I4', packed, at)))
    generations[#generations + 1] = string.sub(packed, at + 4, at + 11)
  end
  return blocks, generations
end

local function pack_ref(block, generation) return struct.pack('<I4', tonumber(block)) .. generation end

-- Calls `visit(first, last, lowest block)` for each ascending or descending run of neighbours in the list: blocks that
-- were allocated together are mostly neighbours, and a call costs more than its work on one block.
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

-- Checks that blocks from a list are in `state`. If one is not, a different program has changed the ledger; without
-- this check, the same block could be given to two writers.
local function expect(records, state)
  for _, record in ipairs(records) do
    if state_of(record) ~= state then error('a block is listed in a state that it is not in') end
  end
end

-- Both functions set the state and the hashed flag, and keep the rest of the record.
local function in_state(record, state, hashed) return string.char(state, hashed) .. string.sub(record, 3) end
local function set_state(block, state, hashed)
  call('SETRANGE', BLOCKS, tonumber(block) * RECORD, string.char(state, hashed))
end

-- `side` is a packed set of epochs.
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

-- Takes `n` numbers of the clock that orders evictions and references; returns the number before the first.
local function ticks(n) return call('HINCRBY', META, 'tick', n) - n end
