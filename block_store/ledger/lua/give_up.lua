-- give_up(ticket, secret): ends a ticket that no worker will claim, or the remaining part of one. Idempotent.
if is_ticket(ARGV[2], ARGV[3]) then
  end_holder(ARGV[2], false)
  bury()
end
return '+'
