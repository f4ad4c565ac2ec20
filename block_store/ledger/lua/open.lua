-- open(dataset, run_id, num_blocks, rebuild count, grace ms): opens a ledger whose blocks `rebuild` has written.
-- This script runs without the library, since there is no dataset to compare yet.
local META = KEYS[1]
local TAG = string.sub(META, 1, -5)
local function count(command, name) return redis.call(command, TAG .. name) end
-- Redis may have been flushed while the blocks were written.
local cached = count('ZCARD', 'cached')
local whole = count('STRLEN', 'blocks') == tonumber(ARGV[3]) * 56 and cached == count('HLEN', 'index')
  and count('LLEN', 'free') + cached + count('ZCARD', 'quarantine') == tonumber(ARGV[3])
if not whole then return '-STALE_DATASET' end
local time, rebuild = redis.call('TIME'), tonumber(ARGV[4])
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
-- Epochs of earlier ledgers are never used again, because an old ticket's number must not name a new ticket. They stay
-- below 2^53.
redis.call('HSET', META, 'dataset', ARGV[1], 'run_id', ARGV[2], 'num_blocks', ARGV[3], 'rebuild', ARGV[4],
  'epoch', string.format('%.0f', rebuild * 1000000000), 'tick', cached, 'reserved', 0, 'sealed', 0,
  'last_reap', string.format('%.0f', now_ms), 'grace_until', string.format('%.0f', now_ms + tonumber(ARGV[5])))
return '+'
