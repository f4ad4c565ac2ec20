-- claim(epoch, number, ticket, secret, most): moves up to `most` of the ticket's references to the worker. Answers with
-- 1 if some remain for a further call, else 0 (the ticket has then ended), and with the references.
local epoch, number, ticket, secret = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local early = lane(epoch, number)
if early then return early end
local claimer = is_ticket(ticket, secret) and (call('HGET', holder_key(ticket), 'claimer') or epoch)
if claimer ~= epoch then return answer(epoch, number, '-GONE') end
local blocks = call('ZRANGE', own_key(ticket), 0, ARGV[6] - 1)
local sides, records, epoch8, ticket8 = hmget(REFS, blocks), read_all(blocks), u64(epoch), u64(ticket)
local new_sides, own, reply = {}, {}, {}
for i, block in ipairs(blocks) do
  local side = without(sides[i], ticket8)
  if not holds(side, epoch8) then
    side = side .. epoch8
    own[#own + 1] = block
  end
  new_sides[2 * i - 1], new_sides[2 * i] = block, side
  reply[i] = pack_ref(block, generation_of(records[i]))
end
send('HSET', REFS, new_sides)
add_own(epoch, own, ticks(#own))
send('ZREM', own_key(ticket), blocks)
local more = call('EXISTS', own_key(ticket)) == 1
if more then
  call('HSET', holder_key(ticket), 'claimer', epoch)
else
  call('ZREM', LEASES, ticket)
  call('DEL', holder_key(ticket))
end
return answer(epoch, number, (more and '+1' or '+0') .. table.concat(reply))
