-- inspect(with blocks): counts and live holders; with blocks also everything else, for the map of blocks and the
-- invariants.
local function count(name) return tonumber(call('HGET', META, name)) end
local holders, leases = {}, call('ZRANGE', LEASES, 0, -1, 'WITHSCORES')
for i = 1, #leases, 2 do
  local epoch = leases[i]
  local about = call('HMGET', holder_key(epoch), 'kind', 'name', 'floor', 'slot')
  holders[#holders + 1] = { epoch, about[1], about[2], about[3] or '0', about[4] or '0', leases[i + 1],
    call('HLEN', own_key(epoch)), ARGV[2] == '1' and call('HGETALL', own_key(epoch)) or {} }
end
local counts = { call('LLEN', FREE_LIST), count('reserved'), count('sealed'), call('ZCARD', CACHED_SET),
  call('ZCARD', QUARANTINE_SET), count('num_blocks') }
if ARGV[2] ~= '1' then return { text(now_ms()), counts, holders } end
local dying = {}
for i, epoch in ipairs(call('ZRANGE', DYING, 0, -1)) do dying[i] = { epoch, call('LRANGE', dying_key(epoch), 0, -1) } end
return { text(now_ms()), counts, holders, call('GET', BLOCKS), call('HGETALL', REFS), call('HGETALL', INDEX),
  call('LRANGE', FREE_LIST, 0, -1), call('ZRANGE', CACHED_SET, 0, -1),
  call('ZRANGE', QUARANTINE_SET, 0, -1, 'WITHSCORES'),
  call('HGETALL', FLOORS), dying }
