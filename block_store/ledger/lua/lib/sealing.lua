-- Functions that seal blocks, and that create tickets.

-- Seals all items or none. Takes no references to other blocks that already have an item's hash. An item is block u32,
-- generation u64, full u8, hash[32], quota u16 (position of the owner's quota in `quotas`; 0: none). A quota is the
-- owner's id[32] and a percentage of all blocks u32. Returns a refusal, or nil and: the items' blocks, the packed
-- reference to use for each (its own, or that of a block that already has the hash), and the blocks that already had
-- the hash of an item before this call, with their records.
local function seal_items(epoch, packed, quotas)
  local ITEM, epoch8, n, seen = 47, u64(epoch), 0, {}
  local blocks, hashes = {}, {} -- a partial block's hash is '', which is never in the index
  for at = 1, #packed, ITEM do
    n = n + 1
    blocks[n] = text((struct.unpack('<I4', packed, at)))
    hashes[n] = string.byte(packed, at + 12) == 1 and string.sub(packed, at + 13, at + 44) or ''
  end
  local records = read_all(blocks)
  for i, block in ipairs(blocks) do
    local record, at = records[i], (i - 1) * ITEM + 1
    local mine = string.sub(record, 9, 24) == string.sub(packed, at + 4, at + 11) .. epoch8 -- generation, writer
    if seen[block] or state_of(record) ~= RESERVED or not mine then
      return '-STALE ' .. block
    end
    seen[block] = true
  end
  local owners = { [0] = 0 }
  for at = 1, #quotas, 36 do
    local id = string.sub(quotas, at, at + 31)
    local owner = tonumber(call('HGET', OWNERS, id) or call('HLEN', OWNERS) + 1)
    if owner > MOST_OWNERS then
      owner = 0
    else
      call('HSET', OWNERS, id, owner)
      local part = struct.unpack('<I4', quotas, at + 32) / 100
      call('HSET', QUOTAS, owner, text(math.floor(part * call('HGET', META, 'num_blocks'))))
    end
    owners[#owners + 1] = owner
  end
  call('HINCRBY', META, 'reserved', 0 - n)
  call('HINCRBY', META, 'sealed', n)
  local indexed, entries, here, known, places, refs = hmget(INDEX, hashes), {}, {}, {}, {}, {}
  for i, block in ipairs(blocks) do
    local hash, record = hashes[i], records[i]
    if indexed[i] then
      known[#known + 1], places[#places + 1] = indexed[i], i
      records[i] = in_state(record, SEALED, 0)
    elseif here[hash] then -- indexed by an earlier item of this call
      records[i] = in_state(record, SEALED, 0)
      refs[i] = here[hash]
    else
      refs[i] = pack_ref(block, generation_of(record))
      if hash == '' then
        records[i] = in_state(record, SEALED, 0)
      else
        local owner = owners[struct.unpack('<I2', packed, (i - 1) * ITEM + 46)]
        records[i] = string.char(SEALED, 1) .. struct.pack('<I2', owner) .. string.sub(record, 5, 24) .. hash
        entries[#entries + 1], here[hash] = hash, refs[i]
        entries[#entries + 1] = block
      end
    end
  end
  write_all(blocks, records)
  send('HSET', INDEX, entries)
  local known_records = read_all(known)
  for k, place in ipairs(places) do refs[place] = pack_ref(known[k], generation_of(known_records[k])) end
  return nil, blocks, refs, known, known_records
end

-- Returns the ticket, or a new one for '0', with a lease that ends in `lease_ms`. The caller has checked the secret.
local function open_ticket(ticket, secret, lease_ms)
  if ticket == '0' then
    ticket = new_epoch()
    call('HSET', holder_key(ticket), 'kind', 'ticket', 'name', 'ticket', 'number', 0, 'reply', '', 'secret', secret)
  end
  call('ZADD', LEASES, now_ms() + lease_ms, ticket)
  return ticket
end
