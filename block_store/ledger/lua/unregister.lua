-- unregister(epoch): ends the holder and releases its references, of which the sweep releases those beyond the first
-- MOST_LET_GO. The caller declares that its writes are complete. Idempotent.
if live(ARGV[2]) then
  end_holder(ARGV[2], false)
  bury()
end
return '+'
