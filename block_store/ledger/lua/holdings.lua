-- holdings(epoch, after, most): reads up to `most` references of the holder, oldest first, after the place `after` (0:
-- before the first one). Answers with the place of the last one, 0 if there is none, and the references. Reads only.
if not live(ARGV[2]) then return '-FENCED' end
local found = call('ZRANGEBYSCORE', own_key(ARGV[2]), '(' .. ARGV[3], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[4])
local blocks = {}
for i = 1, #found, 2 do blocks[(i + 1) / 2] = found[i] end
local reply = { '+', u64(found[#found] or 0) }
for i, record in ipairs(read_all(blocks)) do reply[i + 2] = pack_ref(blocks[i], generation_of(record)) end
return table.concat(reply)
