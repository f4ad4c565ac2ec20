-- distrust(epoch): the caller has seen that the ledger is damaged or contradicts the arena's header. Further calls are
-- refused, so that the store rebuilds the ledger. If the epoch is not 0, the holder with this epoch must be live,
-- because what a holder sees after the end of its lease proves nothing.
if ARGV[2] ~= '0' and not live(ARGV[2]) then return '-FENCED' end
call('HSET', META, 'dataset', '')
return '+'
