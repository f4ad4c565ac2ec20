-- acquire(epoch, number, hashes by group): takes references to the longest prefix indexed for every group. Other
-- holders cannot allocate a cached block once it is held, so the prefix ends before the first block that would use up
-- another holder's floor. Answers with the length in blocks and the references, group by group.
local epoch, number = ARGV[2], ARGV[3]
local early = lane(epoch, number)
if early then return early end
local longest, groups = indexed_prefix(ARGV[4])
local room, length, records = room_for(epoch), 0, {}
for group, blocks in ipairs(groups) do
  for i = longest + 1, #blocks do blocks[i] = nil end
  records[group] = read_all(blocks)
end
while length < longest do
  for group in ipairs(groups) do
    if state_of(records[group][length + 1]) == CACHED then room = room - 1 end
  end
  if room < 0 then break end
  length = length + 1
end
local all, all_records, reply = {}, {}, { '+', struct.pack('<I4', length) }
for group, blocks in ipairs(groups) do
  for i = 1, length do
    all[#all + 1] = blocks[i]
    all_records[#all] = records[group][i]
    reply[#reply + 1] = pack_ref(blocks[i], generation_of(records[group][i]))
  end
end
pin(epoch, u64(epoch), all, all_records, ticks(#all))
return answer(epoch, number, table.concat(reply))
