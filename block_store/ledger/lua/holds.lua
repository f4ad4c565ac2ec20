-- holds(epoch, refs): answers with one digit for each reference: 1 if the holder has it, else 0. Reads only.
local epoch = ARGV[2]
if not live(epoch) then return '-FENCED' end
local blocks, generations = unpack_refs(ARGV[3])
local own, records, letters = owns(epoch, blocks), read_all(blocks), { '+' }
for i = 1, #blocks do letters[i + 1] = own[i] and generation_of(records[i]) == generations[i] and '1' or '0' end
return table.concat(letters)
