-- assert_held(epoch, number, refs, is last): what the holder says it holds, after a rebuild. Answers with one letter
-- each: S sealed and held, R unsealed and held (its writer's only), L lost. After the last call its writer slot has
-- asserted everything: what else waited for the slot is free.
local epoch, number = ARGV[2], ARGV[3]
local early = lane(epoch, number)
if early then return early end
local blocks, generations = unpack_refs(ARGV[4])
local slot, epoch8, order = call('HGET', holder_key(epoch), 'slot'), u64(epoch), ticks(#blocks)
local letters, num_reserved, num_sealed = { '+' }, 0, 0

local function take(block, generation, state)
  call('ZREM', QUARANTINE_SET, block)
  set_state(block, state, 0)
  call('SETRANGE', BLOCKS, tonumber(block) * RECORD + 16, epoch8)
  call('HSET', REFS, block, epoch8)
  call('HSET', own_key(epoch), block, generation .. u64(order))
end

for i, block in ipairs(blocks) do
  local record, letter = read(block), 'L'
  local state, waits_for = state_of(record), text((struct.unpack('<I4', record, 5)))
  order = order + 1
  if generation_of(record) == generations[i] then
    if state == SEALED or state == CACHED then
      pin(epoch, epoch8, { block }, { record }, order - 1)
      letter = 'S'
    elseif state == QUARANTINE and waits_for == slot then
      take(block, generations[i], RESERVED)
      letter, num_reserved = 'R', num_reserved + 1
    elseif state == QUARANTINE and waits_for == '0' then
      take(block, generations[i], SEALED)
      letter, num_sealed = 'S', num_sealed + 1
    elseif state == RESERVED and call('HGET', REFS, block) == epoch8 then
      letter = 'R' -- asserted by an earlier call
    end
  end
  letters[i + 1] = letter
end
call('HINCRBY', META, 'reserved', num_reserved)
call('HINCRBY', META, 'sealed', num_sealed)
if ARGV[5] == '1' then
  unquarantine(slot)
  call('SREM', AWAITED, slot)
end
return answer(epoch, number, table.concat(letters))
