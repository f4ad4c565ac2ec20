-- unregister(epoch): ends the holder. This call and, if the holder has many references, later sweeps release them. The
-- caller declares that its writes are complete. Idempotent.
if live(ARGV[2]) then
  end_holder(ARGV[2], false)
  bury()
end
return '+'
