-- register(name, writer slot, floor, lease ms, token): adds a new holder and answers with its epoch. A repeated call
-- with the same token gets the same answer and adds nothing.
local name, slot, floor, lease_ms, token = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local known = call('HGET', TOKENS, token)
if known then return '+' .. known end
local sum, floors, num_blocks = floor, call('HVALS', FLOORS), tonumber(call('HGET', META, 'num_blocks'))
for i = 1, #floors do sum = sum + tonumber(floors[i]) end
if sum > num_blocks then return '-FLOORS_EXCEED_ARENA ' .. text(sum) .. ' ' .. text(num_blocks) end
local epoch = new_epoch()
call('HSET', holder_key(epoch), 'kind', 'worker', 'name', name, 'slot', slot, 'floor', floor, 'token', token,
  'number', 0, 'reply', '-OUT_OF_ORDER')
call('HSET', TOKENS, token, epoch)
if floor > 0 then call('HSET', FLOORS, epoch, floor) end
call('ZADD', LEASES, now_ms() + lease_ms, epoch)
return '+' .. epoch
