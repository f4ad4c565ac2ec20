-- report(epoch, census, refs): for `fsck`: compares what the holder believes to hold with what is written here of it, and
-- keeps the differences. The holder has no call under way.
local epoch, census = ARGV[2], ARGV[3]
if not live(epoch) then return '-FENCED' end
local blocks, generations = unpack_refs(ARGV[4])
local own, known, missing, surplus = hmget(own_key(epoch), blocks), {}, {}, {}
for i, block in ipairs(blocks) do
  known[block] = true
  if not own[i] or string.sub(own[i], 1, 8) ~= generations[i] then
    missing[#missing + 1] = pack_ref(block, generations[i])
  end
end
local held, held_generations = owned(epoch)
for i, block in ipairs(held) do
  if not known[block] then surplus[#surplus + 1] = pack_ref(block, held_generations[i]) end
end
call('HSET', TAG .. 'census:' .. census, epoch, struct.pack('<I4', #missing) .. table.concat(missing) .. table.concat(surplus))
call('EXPIRE', TAG .. 'census:' .. census, 60)
return '+'
