-- unregister(epoch): releases the holder's references and ends it. The caller declares that its writes are complete.
-- Idempotent. If the holder had very many blocks, the sweep releases the remaining ones.
if live(ARGV[2]) then
  end_holder(ARGV[2], false)
  bury()
end
return '+'
