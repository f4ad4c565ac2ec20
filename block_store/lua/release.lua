-- release(epoch, number, refs): never refuses; what is not held, or is of another generation, is left alone.
local epoch, number = ARGV[2], ARGV[3]
local early = lane(epoch, number)
if early == '-FENCED' then return '+0' end
if early then return early end
local blocks, generations = unpack_refs(ARGV[4])
local own, given_up, seen = hmget(own_key(epoch), blocks), {}, {}
for i, block in ipairs(blocks) do
  if own[i] and not seen[block] and string.sub(own[i], 1, 8) == generations[i] then
    seen[block] = true
    given_up[#given_up + 1] = block
  end
end
let_go(epoch, given_up, false)
send('HDEL', own_key(epoch), given_up)
return answer(epoch, number, '+' .. text(#given_up))
