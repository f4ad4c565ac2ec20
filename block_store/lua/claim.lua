-- claim(epoch, number, ticket, secret): the ticket's references become the worker's, once.
local epoch, number, ticket, secret = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local early = lane(epoch, number)
if early then return early end
if not is_ticket(ticket, secret) then
  return answer(epoch, number, '-GONE')
end
local blocks, generations = owned(ticket)
local sides, epoch8, ticket8 = hmget(REFS, blocks), u64(epoch), u64(ticket)
local new_sides, own, reply, order = {}, {}, { '+' }, ticks(#blocks)
for i, block in ipairs(blocks) do
  local side = without(sides[i], ticket8)
  if not holds(side, epoch8) then
    side = side .. epoch8
    own[#own + 1] = block
    own[#own + 1] = generations[i] .. u64(order + i)
  end
  new_sides[2 * i - 1], new_sides[2 * i] = block, side
  reply[#reply + 1] = pack_ref(block, generations[i])
end
send('HSET', REFS, new_sides)
send('HSET', own_key(epoch), own)
call('ZREM', LEASES, ticket)
call('DEL', own_key(ticket), holder_key(ticket))
return answer(epoch, number, table.concat(reply))
