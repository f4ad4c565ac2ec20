-- seal(epoch, number, items): items are block u32, generation u64, full u8, hash[32]. All or nothing.
-- Answers with the reference to use for each: its own, or that of the block which has the hash already.
local epoch, number, packed = ARGV[2], ARGV[3], ARGV[4]
local early = lane(epoch, number)
if early then return early end
local ITEM, epoch8, seen, n = 45, u64(epoch), {}, 0
for at = 1, #packed, ITEM do
  local block = text((struct.unpack('<I4', packed, at)))
  local record = read(block)
  local mine = string.sub(record, 9, 24) == string.sub(packed, at + 4, at + 11) .. epoch8 -- generation, writer
  if seen[block] or state_of(record) ~= RESERVED or not mine then
    return answer(epoch, number, '-STALE ' .. block)
  end
  seen[block], n = true, n + 1
end
call('HINCRBY', META, 'reserved', 0 - n)
call('HINCRBY', META, 'sealed', n)
local reply, order = { '+' }, ticks(n)
for at = 1, #packed, ITEM do
  local block, generation = text((struct.unpack('<I4', packed, at))), string.sub(packed, at + 4, at + 11)
  local hash = string.byte(packed, at + 12) == 1 and string.sub(packed, at + 13, at + 44)
  local known = hash and call('HGET', INDEX, hash)
  order = order + 1
  if known then
    set_state(block, SEALED, 0)
    reply[#reply + 1] = pack_ref(known, pin(epoch, epoch8, known, order))
  else
    set_state(block, SEALED, hash and 1 or 0)
    if hash then
      call('SETRANGE', BLOCKS, tonumber(block) * RECORD + 24, hash)
      call('HSET', INDEX, hash, block)
    end
    reply[#reply + 1] = pack_ref(block, generation)
  end
end
return answer(epoch, number, table.concat(reply))
