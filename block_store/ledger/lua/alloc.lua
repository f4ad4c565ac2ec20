-- alloc(epoch, number, n, wanted): allocates n RESERVED blocks for the holder, free ones first, then the coldest cached
-- ones. The call is refused if there is no room for all `wanted` blocks, including those of later calls.
local epoch, number, n, wanted = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local early = lane(epoch, number)
if early then return early end
local room = room_for(epoch)
if awaiting() then room = math.min(room, call('LLEN', FREE_LIST)) end
if wanted > room then
  return answer(epoch, number, '-EXHAUSTED ' .. text(wanted) .. ' ' .. text(math.max(0, room)))
end

local blocks, num_free = {}, math.min(n, call('LLEN', FREE_LIST))
if num_free > 0 then blocks = call('LPOP', FREE_LIST, num_free) end
local coldest = n > num_free and call('ZRANGE', CACHED_SET, 0, n - num_free - 1) or {}
for i, block in ipairs(coldest) do blocks[num_free + i] = block end
local records, free_records, coldest_records = read_all(blocks), {}, {}
for i = 1, num_free do free_records[i] = records[i] end
for i = 1, #coldest do coldest_records[i] = records[num_free + i] end
expect(free_records, FREE)
expect(coldest_records, CACHED)
unindex(coldest, coldest_records)
leave_cache(coldest, coldest_records)

local rebuild, slot = tonumber(call('HGET', META, 'rebuild')), tonumber(call('HGET', holder_key(epoch), 'slot'))
local epoch8, head = u64(epoch), struct.pack('<BBI2I4', RESERVED, 0, 0, slot)
local sides, reply = {}, { '+' }
for i = 1, n do
  local block, low, high = blocks[i], struct.unpack('<I4I4', records[i], 9)
  -- The upper half is the rebuild count, so a generation that a lost ledger issued is never issued again (I11).
  if high == rebuild then low = low + 1 else low, high = 1, rebuild end
  local generation = struct.pack('<I4I4', low, high)
  records[i] = head .. generation .. epoch8 .. string.sub(records[i], 25)
  sides[2 * i - 1], sides[2 * i] = block, epoch8
  reply[i + 1] = pack_ref(block, generation)
end
write_all(blocks, records)
send('HSET', REFS, sides)
add_own(epoch, blocks, ticks(n))
call('HINCRBY', META, 'reserved', n)
return answer(epoch, number, table.concat(reply))
