-- seal(epoch, number, items, quotas): seals all items or none (`seal_items`). Answers with the reference to use for
-- each item: its own, or that of a block that already has the hash, which the holder then also holds.
local epoch, number = ARGV[2], ARGV[3]
local early = lane(epoch, number)
if early then return early end
local refusal, blocks, refs, known, known_records = seal_items(epoch, ARGV[4], ARGV[5])
if refusal then return answer(epoch, number, refusal) end
pin(epoch, u64(epoch), known, known_records, ticks(#blocks))
return answer(epoch, number, '+' .. table.concat(refs))
