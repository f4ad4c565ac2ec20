"""Counts the ledger calls that workers make after they have been fenced. The scripts themselves count the calls,
because only a script can determine reliably whether a call came too late and whether it changed anything.
`count_late_calls` runs in a worker's process (`faulty`), and `late_calls` in the suite's process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from block_store.ledger import lua_library
from block_store.ledger.scripts import LedgerScripts

REFUSED = "refused"
HARMLESS = "of no effect"
"""The verdict on a call, such as a `release`, that was answered instead of refused, but changed nothing."""
EFFECTIVE = "EFFECTIVE"
"""The verdict on a call that changed something although its holder was fenced."""
_OF_HOLDERS = frozenset({
    "beat", "alloc", "seal", "acquire", "hand_over", "deliver", "claim", "release", "unregister", "holdings",
    "holds", "assert_held", "assert_all", "report",
})  # fmt: skip
"""The operations that are counted. Their first argument is the caller's epoch."""
_COUNTED = """
local function operation()
{operation}
end
-- Every change that a holder can make changes a counter, a length or a clock.
local function marks()
  local meta = call('HMGET', META, 'epoch', 'tick', 'reserved', 'sealed')
  return table.concat({{ meta[1], meta[2], meta[3], meta[4], call('LLEN', FREE_LIST), call('ZCARD', CACHED_SET),
    call('ZCARD', QUARANTINE_SET), call('HLEN', REFS), call('HLEN', INDEX), call('ZCARD', LEASES) }}, ' ')
end
if live(ARGV[2]) then return operation() end
local before, reply = marks(), operation()
local verdict = '{effective}'
if marks() == before then verdict = string.sub(reply, 1, 7) == '-FENCED' and '{refused}' or '{harmless}' end
call('HINCRBY', TAG .. 'late', ARGV[2] .. ' {name} ' .. verdict, 1)
return reply
"""


def count_late_calls() -> None:
    """Makes the ledgers that this process opens later count late calls. Call this once."""
    _replace_source(lua_library.source)


def _replace_source(source: Callable[[str], str]) -> None:
    lua_library.source = lambda name: counted(name, source(name))  # type: ignore[assignment]


def counted(name: str, script: str) -> str:
    """Returns an operation's script with counting added. Returns any other script unchanged."""
    if name not in _OF_HOLDERS:
        return script
    words = {"effective": EFFECTIVE, "refused": REFUSED, "harmless": HARMLESS}
    return _COUNTED.format(operation=script, name=name, **words)


def late_calls(ledger: LedgerScripts) -> Counter[tuple[int, str, str]]:
    """Returns how often each (epoch, operation, verdict) has been counted since the ledger was last built."""
    found: dict[bytes, bytes] = ledger.client.hgetall(ledger.tag + "late")  # type: ignore[assignment]
    calls: Counter[tuple[int, str, str]] = Counter()
    for field, times in found.items():
        epoch, name, verdict = field.decode().split(" ", 2)
        calls[int(epoch), name, verdict] = int(times)
    return calls
