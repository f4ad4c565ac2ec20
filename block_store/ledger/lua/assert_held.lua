-- assert_held(epoch, number, refs): after a rebuild, gives the holder references to some of the blocks that it claims
-- to hold. Answers with one letter for each reference: S sealed and held, R unsealed and held (only by its writer), L
-- lost.
local epoch, number = ARGV[2], ARGV[3]
local early = lane(epoch, number)
if early then return early end
local blocks, generations = unpack_refs(ARGV[4])
local slot, epoch8, order = call('HGET', holder_key(epoch), 'slot'), u64(epoch), ticks(2 * #blocks)
local records, sides, letters = read_all(blocks), hmget(REFS, blocks), { '+' }
local sealed, sealed_records, taken, taken_records, new_sides = {}, {}, {}, {}, {}
local num_reserved, num_sealed, seen = 0, 0, {}

-- The holder that asserts a quarantined block becomes its writer. No other holder can assert the block while it is
-- unsealed.
local function take(i, state)
  taken[#taken + 1] = blocks[i]
  taken_records[#taken] = string.sub(in_state(records[i], state, 0), 1, 16) .. epoch8 .. string.sub(records[i], 25)
  new_sides[#new_sides + 1] = blocks[i]
  new_sides[#new_sides + 1] = epoch8
end

for i, block in ipairs(blocks) do
  local record, letter = records[i], 'L'
  local state, waits_for = state_of(record), text((struct.unpack('<I4', record, 5)))
  if generation_of(record) == generations[i] and not seen[block] then
    seen[block] = true
    if state == SEALED or state == CACHED then
      sealed[#sealed + 1] = block
      sealed_records[#sealed] = record
      letter = 'S'
    elseif state == QUARANTINE and waits_for == slot then
      take(i, RESERVED)
      letter, num_reserved = 'R', num_reserved + 1
    elseif state == QUARANTINE and waits_for == '0' then
      take(i, SEALED)
      letter, num_sealed = 'S', num_sealed + 1
    elseif state == RESERVED and sides[i] == epoch8 then
      letter = 'R' -- asserted by an earlier call
    end
  end
  letters[i + 1] = letter
end
send('ZREM', QUARANTINE_SET, taken)
write_all(taken, taken_records)
send('HSET', REFS, new_sides)
add_own(epoch, taken, order)
pin(epoch, epoch8, sealed, sealed_records, order + #blocks)
call('HINCRBY', META, 'reserved', num_reserved)
call('HINCRBY', META, 'sealed', num_sealed)
return answer(epoch, number, table.concat(letters))
