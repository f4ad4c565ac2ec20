-- inspect(): answers with the time, the counts and the live holders. The map of blocks is read in parts (`inspection`).
local function count(name) return tonumber(call('HGET', META, name)) end
local holders, leases = {}, call('ZRANGE', LEASES, 0, -1, 'WITHSCORES')
for i = 1, #leases, 2 do
  local epoch = leases[i]
  local about = call('HMGET', holder_key(epoch), 'kind', 'name', 'floor', 'slot')
  holders[#holders + 1] = { epoch, about[1], about[2], about[3] or '0', about[4] or '0', leases[i + 1],
    call('ZCARD', own_key(epoch)) }
end
local counts = { call('LLEN', FREE_LIST), count('reserved'), count('sealed'), call('ZCARD', CACHED_SET),
  call('ZCARD', QUARANTINE_SET), count('num_blocks') }
return { text(now_ms()), counts, holders }
