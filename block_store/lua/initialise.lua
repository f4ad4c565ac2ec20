-- initialise(dataset, run_id, num_blocks, rebuild count, dataset of the arena's header): all blocks FREE, in a new
-- ledger. A ledger of the header's dataset is kept; any other is refused. No prelude: there is no dataset to compare
-- yet.
local META = KEYS[1]
local TAG = string.sub(META, 1, -5)
local found = redis.call('HMGET', META, 'dataset', 'num_blocks')
if found[1] then
  if found[1] == ARGV[5] and found[2] == ARGV[3] then return '+KEPT' end
  return '-EXISTS ' .. found[1]
end
local num_blocks = tonumber(ARGV[3])
for _, name in ipairs({ 'blocks', 'refs', 'index', 'free', 'cached', 'quarantine', 'leases', 'floors', 'tokens' }) do
  redis.call('DEL', TAG .. name)
end
local record = string.char(1) .. string.rep('\0', 55)
for first = 0, num_blocks - 1, 1000 do
  local n, numbers = math.min(1000, num_blocks - first), {}
  for i = 1, n do numbers[i] = string.format('%.0f', first + i - 1) end
  redis.call('APPEND', TAG .. 'blocks', string.rep(record, n))
  redis.call('RPUSH', TAG .. 'free', unpack(numbers))
end
local time = redis.call('TIME')
redis.call('HSET', META, 'dataset', ARGV[1], 'run_id', ARGV[2], 'num_blocks', ARGV[3], 'rebuild', ARGV[4],
  'epoch', 0, 'tick', 0, 'reserved', 0, 'sealed', 0, 'last_reap', tonumber(time[1]) * 1000)
return '+MADE'
