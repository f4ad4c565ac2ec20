-- holdings(epoch): every reference of the holder, in the order in which it got them. Reads only.
if not live(ARGV[2]) then return '-FENCED' end
local blocks, generations = owned(ARGV[2])
local reply = { '+' }
for i, block in ipairs(blocks) do reply[i + 1] = pack_ref(block, generations[i]) end
return table.concat(reply)
