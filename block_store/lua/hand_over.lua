-- hand_over(epoch, number, moved, kept, ticket lease ms, secret): a ticket with references on all of them; the holder
-- gives up `moved`. Who claims it must know the secret: epochs can be guessed.
local epoch, number, lease_ms, secret = ARGV[2], ARGV[3], tonumber(ARGV[6]), ARGV[7]
local early = lane(epoch, number)
if early then return early end
local blocks, generations = unpack_refs(ARGV[4] .. ARGV[5])
local num_moved, seen = #ARGV[4] / 12, {}
local own, sides, records = hmget(own_key(epoch), blocks), hmget(REFS, blocks), read_all(blocks)
for i, block in ipairs(blocks) do
  local record = records[i]
  if generation_of(record) ~= generations[i] then return answer(epoch, number, '-STALE ' .. block) end
  if seen[block] or not own[i] then return answer(epoch, number, '-NOT_HOLDER ' .. block) end
  if state_of(record) ~= SEALED then return answer(epoch, number, '-STALE ' .. block) end
  seen[block] = true
end
local ticket = text(call('HINCRBY', META, 'epoch', 1))
call('HSET', holder_key(ticket), 'kind', 'ticket', 'name', 'ticket', 'number', 0, 'reply', '', 'secret', secret)
call('ZADD', LEASES, now_ms() + lease_ms, ticket)
local epoch8, ticket8, order = u64(epoch), u64(ticket), ticks(#blocks)
local new_sides, ticket_own, given_up = {}, {}, {}
for i, block in ipairs(blocks) do
  local side = sides[i]
  if i <= num_moved then
    side = without(side, epoch8)
    given_up[i] = block
  end
  new_sides[2 * i - 1], new_sides[2 * i] = block, side .. ticket8
  ticket_own[2 * i - 1], ticket_own[2 * i] = block, generations[i] .. u64(order + i)
end
send('HSET', REFS, new_sides)
send('HSET', own_key(ticket), ticket_own)
send('HDEL', own_key(epoch), given_up)
return answer(epoch, number, '+' .. ticket .. ' ' .. secret)
