-- prefix_lengths(hashes, dataset of each arena): answers, for the arena of each key, with the number of leading hashes
-- that its index has, or -1 if its ledger has a different dataset or cannot be read. The library does not precede this
-- script, because it reads several ledgers. Reads only, takes no references.
-- KEYS[i] is an arena's '{looseleaf:<arena>}:meta'; ARGV[1] has the hashes of 32 bytes, ARGV[1 + i] a dataset.
local num_hashes, lengths = #ARGV[1] / 32, {}

-- Binary search. The result is exact if the later blocks of the prefix were evicted before the earlier ones, as usual.
local function length(index)
  local least, most = 0, num_hashes
  while least < most do
    local middle = math.ceil((least + most) / 2)
    if redis.call('HEXISTS', index, string.sub(ARGV[1], middle * 32 - 31, middle * 32)) == 1 then least = middle
    else most = middle - 1 end
  end
  return least
end

for i, meta in ipairs(KEYS) do
  local ok, dataset = pcall(redis.call, 'HGET', meta, 'dataset')
  lengths[i] = -1
  if ok and dataset == ARGV[1 + i] then
    local read, found = pcall(length, string.sub(meta, 1, -5) .. 'index')
    if read then lengths[i] = found end
  end
end
return lengths
