-- Functions that number holders and end them.

-- Returns the number of a new holder.
local function new_epoch()
  local epoch = text(call('HINCRBY', META, 'epoch', 1))
  if call('EXISTS', holder_key(epoch)) == 1 then error('the next epoch is in use') end
  return epoch
end

-- Ends a holder, which is fenced at once. `bury` later releases its blocks.
local function end_holder(epoch, reaped)
  call('ZREM', LEASES, epoch)
  local token = call('HGET', holder_key(epoch), 'token')
  if token then call('HDEL', TOKENS, token) end
  call('HDEL', FLOORS, epoch)
  if call('EXISTS', own_key(epoch)) == 1 then
    call('RENAME', own_key(epoch), dying_key(epoch))
    call('ZADD', DYING, reaped and 1 or 0, epoch)
  end
  call('DEL', holder_key(epoch))
end

-- Releases up to MOST_LET_GO blocks of holders that have ended, tails first. Returns whether some remain.
local function bury()
  local room, dying = MOST_LET_GO, call('ZRANGE', DYING, 0, MOST_HOLDERS, 'WITHSCORES')
  for i = 1, #dying, 2 do
    local epoch, key = dying[i], dying_key(dying[i])
    local blocks = call('ZRANGE', key, 0 - room, -1)
    let_go(epoch, blocks, dying[i + 1] == '1')
    call('ZREMRANGEBYRANK', key, 0 - #blocks, -1)
    if call('EXISTS', key) == 1 then return true end
    call('ZREM', DYING, epoch)
    room = room - #blocks
    if room == 0 then break end
  end
  return call('ZCARD', DYING) > 0
end
