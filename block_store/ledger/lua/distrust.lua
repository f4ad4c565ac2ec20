-- distrust(epoch): the caller has seen that the ledger and the arena's header disagree. All further calls are refused,
-- so that the store rebuilds the ledger. Epoch 0 means that the caller is not a holder. A holder must be live: what it
-- sees after its lease has ended proves nothing.
if ARGV[2] ~= '0' and not live(ARGV[2]) then return '-FENCED' end
call('HSET', META, 'dataset', '')
return '+'
