-- deliver(epoch, number, items, quotas, ticket lease ms, ticket, secret): seals all items or none (`seal_items`), and
-- moves them from the holder to a ticket, as `seal`, `hand_over` and `release` would do one after another. Ticket 0
-- means a new ticket. Answers with the ticket, its secret, and the reference that the ticket holds for each item.
local epoch, number, lease_ms, ticket, secret = ARGV[2], ARGV[3], tonumber(ARGV[6]), ARGV[7], ARGV[8]
local early = lane(epoch, number)
if early then return early end
if ticket ~= '0' and not is_ticket(ticket, secret) then return answer(epoch, number, '-GONE') end
local refusal, blocks, refs, known, known_records = seal_items(epoch, ARGV[4], ARGV[5])
if refusal then return answer(epoch, number, refusal) end
ticket = open_ticket(ticket, secret, lease_ms)
local ticket8, order, sides, moved, doubles = u64(ticket), ticks(2 * #blocks), {}, {}, {}
for i, block in ipairs(blocks) do
  if text((struct.unpack('<I4', refs[i]))) == block then
    moved[#moved + 1] = block
    sides[#sides + 1], sides[#sides + 2] = block, ticket8
  else
    doubles[#doubles + 1] = block
  end
end
send('HSET', REFS, sides)
add_own(ticket, moved, order)
pin(ticket, ticket8, known, known_records, order + #blocks)
let_go(epoch, doubles, false)
send('ZREM', own_key(epoch), blocks)
return answer(epoch, number, '+' .. ticket .. ' ' .. secret .. table.concat(refs))
