-- release(epoch, number, refs): ends the holder's references to `refs`. Blocks that the holder does not hold, or that
-- have a different generation, are not changed. Answers with the number of references released, or with 0 if the holder
-- is fenced.
local epoch, number = ARGV[2], ARGV[3]
local early = lane(epoch, number)
if early == '-FENCED' then return '+0' end
if early then return early end
local blocks, generations = unpack_refs(ARGV[4])
local own, records, given_up, seen = owns(epoch, blocks), read_all(blocks), {}, {}
for i, block in ipairs(blocks) do
  if own[i] and not seen[block] and generation_of(records[i]) == generations[i] then
    seen[block] = true
    given_up[#given_up + 1] = block
  end
end
let_go(epoch, given_up, false)
send('ZREM', own_key(epoch), given_up)
return answer(epoch, number, '+' .. text(#given_up))
