-- The eviction order of CACHED blocks, and the quotas of tenants.

-- Removes blocks that were CACHED from the eviction order and from those of their owners.
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

-- Adds blocks that have become CACHED to the eviction order. `order` lists a tick and a block for each of `records`. If
-- an owner now exceeds its quota, up to MOST_LET_GO of its coldest blocks are evicted.
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
