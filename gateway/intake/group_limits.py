"""Determines from n, best_of and the fields for beams how many sequences a request runs, and whether workers accept
that many.

gRPC and HTTP express a beam search in different ways. gRPC uses `beam_width`: n of these beams are returned, or all of
them if n is absent. HTTP uses `use_beam_search` with `best_of` beams (default: n) and returns n of them (default: 1). A
search of width 1 is also a beam search. Samples are never ranked, so `best_of` without a beam search must equal n. This
module does not depend on protobuf or JSON.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from common.errors import InvalidArgument
from common.group_need import GroupNeed, GroupRoom
from common.types import WorkerRecord
from gateway.intake.limits import RANGES, Checker
from gateway.intake.wanted import Wanted

NEUTRAL: dict[str, tuple[float, ...]] = {"temperature": (0, 1), "top_k": (-1, 0), "top_p": (1,), "min_p": (0,)}
"""Parameters that shape random draws. A beam search draws nothing, so it accepts only values that have no effect."""


def rooms_of(records: Iterable[WorkerRecord]) -> dict[str, GroupRoom]:
    """Returns the group limits of the decode workers that accept requests, by worker id."""
    ready = [record for record in records if not record.draining]
    steps = [record.prefill_step for record in ready if record.role == "prefill" and record.prefill_step]
    shortest = min(steps, default=None)
    return {record.worker_id: GroupRoom.of(record, shortest) for record in ready if record.role == "decode"}


def most_sequences(limits: Iterable[GroupRoom]) -> int | None:
    """Returns the largest number of sequences that a decode worker runs at once, or None if there are no decode
    workers.
    """
    return max((limit.max_sequences for limit in limits), default=None)


def is_beam_search(wanted: Wanted) -> bool:
    return wanted.use_beam_search or wanted.beam_width is not None


def width_of(wanted: Wanted) -> tuple[str, int]:
    """Returns the name of the field that decides how many sequences run at once, and the number of sequences."""
    if wanted.beam_width is not None:
        return "beam_width", wanted.beam_width
    if wanted.use_beam_search and wanted.best_of is not None:
        return "best_of", wanted.best_of
    return "n", num_sequences(wanted)


def num_sequences(wanted: Wanted) -> int:
    """Returns the number of sequences in the answer."""
    if wanted.n is not None:
        return wanted.n
    return 1 if wanted.beam_width is None else wanted.beam_width


def check_group(checker: Checker, wanted: Wanted, limits: Collection[GroupRoom]) -> None:
    """Adds the violations in the fields for samples and beams to `checker`, except those that depend on the prompt's
    length. If `limits` is empty, because there have been no workers, only `RANGES` limits the width.
    """
    checker.number("n", wanted.n)
    checker.number("length_penalty", wanted.length_penalty)
    stopping = wanted.early_stopping
    if stopping is not None and not isinstance(stopping, bool) and stopping != "never":
        checker.refuse("early_stopping", 'must be true, false or "never"')
    if is_beam_search(wanted):
        _check_beams(checker, wanted)
    else:
        _check_samples(checker, wanted)
    name, width = width_of(wanted)
    most = most_sequences(limits)
    if most is not None and width > most:
        checker.refuse(name, f"must be at most {most}, the sequences that a decode worker runs at once, got {width}")


def _check_samples(checker: Checker, wanted: Wanted) -> None:
    count = num_sequences(wanted)
    if wanted.best_of is not None and wanted.best_of != count:
        checker.refuse(
            "best_of", f"must equal n ({count}) without a beam search (samples are not ranked), got {wanted.best_of}"
        )
    if wanted.length_penalty not in (None, 1.0):
        checker.refuse("length_penalty", "may only be given with a beam search")
    if wanted.early_stopping:
        checker.refuse("early_stopping", "may only be given with a beam search")


def _check_beams(checker: Checker, wanted: Wanted) -> None:
    name, width = width_of(wanted)
    checker.number(name, width, RANGES["beam_width"])
    if num_sequences(wanted) > width:
        checker.refuse("n", f"must be at most {width} ({name}), got {num_sequences(wanted)}")
    for field, neutral in NEUTRAL.items():
        value = getattr(wanted, field)
        if value is not None and value not in neutral:
            allowed = " or ".join(map(str, neutral))
            checker.refuse(field, f"must be {allowed} with a beam search, which draws nothing")
    if wanted.stop:
        checker.refuse("stop", "may not be given with a beam search, whose text is known only at its end")


def max_tokens_within(
    wanted: Wanted, prompt_len: int, limits: Collection[GroupRoom], max_tokens: int, *, clip: bool
) -> int:
    """Returns `max_tokens` if a decode worker has enough blocks for the group with that many tokens, if the blocks of a
    worker are not known, or if no worker runs as many sequences as the group has. Otherwise, if `clip` is set, returns
    the largest number of tokens for which a worker has enough blocks.

    Raises InvalidArgument if no decode worker has enough blocks for `max_tokens` tokens or, if `clip` is set, for one
    token.
    """
    name, width = width_of(wanted)
    takers = [limit for limit in limits if limit.max_sequences >= width]
    rooms = {limit: limit.max_tokens(prompt_len, width, max_tokens) for limit in takers}
    limit = max(rooms, key=lambda limit: (rooms[limit], limit.max_blocks), default=None)
    if limit is None or max_tokens <= (room := rooms[limit]):
        return max_tokens
    if clip and room >= 1:
        return room
    blocks = GroupNeed(prompt_len, max_tokens, width).blocks(limit.rules)
    which, first = ("max_tokens", "of") if name == "n" and width == 1 else (name, f"of {width}, max_tokens")
    raise InvalidArgument.of(
        which,
        f"{first} {max_tokens} and a prompt of {prompt_len} tokens need {blocks} blocks of KV; "
        f"the limit of a decode worker is {limit.max_blocks}",
    )
