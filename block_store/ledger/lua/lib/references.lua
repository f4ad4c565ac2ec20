-- References, which are recorded twice: the block side lists the holders of a block, and the holder side lists the
-- blocks of a holder.

-- Adds `blocks` to the holder side of `epoch`, in this order, with the ticks after `order`.
local function add_own(epoch, blocks, order)
  local pairs_of = {}
  for i, block in ipairs(blocks) do pairs_of[2 * i - 1], pairs_of[2 * i] = order + i, block end
  send('ZADD', own_key(epoch), pairs_of)
end

-- Returns, for each of `blocks`, its place among the blocks that `epoch` holds, or false if it is not held.
local function owns(epoch, blocks)
  if #blocks == 0 then return {} end
  return call('ZMSCORE', own_key(epoch), unpack(blocks))
end

-- Gives `epoch` one reference to each of these sealed or cached blocks, even if `blocks` lists a block more than once.
-- `records` are the blocks' current records.
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

-- Removes `epoch` from the block side of `blocks` (a chain, head first). A block that is no longer held becomes CACHED
-- if it is indexed, else FREE; if the holder was `reaped`, an unsealed block goes to quarantine. The chain is added to
-- the eviction order tail first.
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
