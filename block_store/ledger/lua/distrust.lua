-- distrust(epoch): the caller has seen that the ledger and the arena's header disagree. All further calls are refused,
-- so that the store rebuilds the ledger. A holder must be live (0: the caller is not a holder), since what it has seen
-- after its lease proves nothing.
if ARGV[2] ~= '0' and not live(ARGV[2]) then return '-FENCED' end
call('HSET', META, 'dataset', '')
return '+'
