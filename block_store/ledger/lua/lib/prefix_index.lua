-- The prefix index: prefix hash -> block.

-- `packed`: number of groups u32, then per group a count u32 and the hashes. Returns the length of the longest prefix
-- indexed for every group, and the blocks per group.
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

-- Removes blocks that were CACHED from the index.
local function unindex(blocks, records)
  local hashes, evicted = {}, {}
  for i = 1, #blocks do hashes[i] = string.sub(records[i], 25, 56) end
  for i, block in ipairs(hmget(INDEX, hashes)) do
    if block == blocks[i] then evicted[#evicted + 1] = hashes[i] end
  end
  send('HDEL', INDEX, evicted)
end
