-- hand_over(epoch, number, refs, ticket lease ms, ticket, secret): gives a ticket references to some of the holder's
-- blocks. The holder keeps its own references. Ticket 0 means a new ticket. A claimer must present the ticket's secret,
-- because epochs can be guessed. Answers with the ticket and its secret.
local epoch, number, lease_ms, ticket, secret = ARGV[2], ARGV[3], tonumber(ARGV[5]), ARGV[6], ARGV[7]
local early = lane(epoch, number)
if early then return early end
if ticket ~= '0' and not is_ticket(ticket, secret) then return answer(epoch, number, '-GONE') end
local blocks, generations = unpack_refs(ARGV[4])
local own, sides, records, seen = owns(epoch, blocks), hmget(REFS, blocks), read_all(blocks), {}
for i, block in ipairs(blocks) do
  local record = records[i]
  if generation_of(record) ~= generations[i] then return answer(epoch, number, '-STALE ' .. block) end
  if seen[block] or not own[i] then return answer(epoch, number, '-NOT_HOLDER ' .. block) end
  if state_of(record) ~= SEALED then return answer(epoch, number, '-STALE ' .. block) end
  seen[block] = true
end
ticket = open_ticket(ticket, secret, lease_ms)
local ticket8, new_sides = u64(ticket), {}
for i, block in ipairs(blocks) do new_sides[2 * i - 1], new_sides[2 * i] = block, sides[i] .. ticket8 end
send('HSET', REFS, new_sides)
add_own(ticket, blocks, ticks(#blocks))
return answer(epoch, number, '+' .. ticket .. ' ' .. secret)
