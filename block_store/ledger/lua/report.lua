-- report(epoch, census, differences): for `fsck`, stores the differences that the holder has found between its record
-- and the ledger.
if not live(ARGV[2]) then return '-FENCED' end
call('HSET', TAG .. 'census:' .. ARGV[3], ARGV[2], ARGV[4])
call('EXPIRE', TAG .. 'census:' .. ARGV[3], 60)
return '+'
