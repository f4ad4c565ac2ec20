-- distrust(): the caller has seen that the ledger and the arena's header disagree. From now on every call is refused, so
-- that the store builds the ledger anew.
call('HSET', META, 'dataset', '')
return '+'
