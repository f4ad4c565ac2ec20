-- distrust(epoch): the caller has seen that the ledger and the arena's header disagree. From now on every call is
-- refused, so that the store builds the ledger anew. A holder must be live (0: the caller is not a holder), since what
-- it saw after its lease proves nothing.
if ARGV[2] ~= '0' and not live(ARGV[2]) then return '-FENCED' end
call('HSET', META, 'dataset', '')
return '+'
