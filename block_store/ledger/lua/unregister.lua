-- unregister(epoch): releases everything and ends the holder, who says by it that its writes are complete. Once gone,
-- stays gone. Of very many blocks some are left to the sweep.
if live(ARGV[2]) then
  end_holder(ARGV[2], false)
  bury()
end
return '+'
