-- present(hashes): answers with '1' or '0' for each 32-byte prefix hash: whether a block is indexed under it. Reads
-- only.
local hashes, marks = {}, {}
for at = 1, #ARGV[2], 32 do hashes[#hashes + 1] = string.sub(ARGV[2], at, at + 31) end
local blocks = hmget(INDEX, hashes)
for i = 1, #hashes do marks[i] = blocks[i] and '1' or '0' end
return '+' .. table.concat(marks)
