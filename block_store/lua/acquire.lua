-- acquire(epoch, number, hashes by group): references on the longest prefix that is there for every group.
-- Cached blocks that become held are room lost to others, so the prefix ends where it would eat into their floors.
local epoch, number = ARGV[2], ARGV[3]
local early = lane(epoch, number)
if early then return early end
local longest, groups = indexed_prefix(ARGV[4])
local room, length = room_for(epoch), 0
while length < longest do
  for _, blocks in ipairs(groups) do
    if state_of(read(blocks[length + 1])) == CACHED then room = room - 1 end
  end
  if room < 0 then break end
  length = length + 1
end
local epoch8, order = u64(epoch), ticks(length * #groups)
local reply = { '+', struct.pack('<I4', length) }
for _, blocks in ipairs(groups) do
  for i = 1, length do
    order = order + 1
    reply[#reply + 1] = pack_ref(blocks[i], pin(epoch, epoch8, blocks[i], order))
  end
end
return answer(epoch, number, table.concat(reply))
