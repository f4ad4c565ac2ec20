-- assert_all(epoch, number): declares that the holder has asserted all blocks that it holds, so that all other blocks
-- that waited for its writer slot become FREE. Answers with 1 if some of them remain for a further call, else 0.
local epoch, number = ARGV[2], ARGV[3]
local early = lane(epoch, number)
if early then return early end
local slot = call('HGET', holder_key(epoch), 'slot')
unquarantine(slot, MOST)
local more = call('ZCOUNT', QUARANTINE_SET, slot, slot) > 0
if not more then call('SREM', AWAITED, slot) end
return answer(epoch, number, more and '+1' or '+0')
