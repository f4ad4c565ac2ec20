"""Checks a request for structured output before its grammar is compiled: the grammar's size, and options that cannot be
combined with a grammar.
"""

from __future__ import annotations

from gateway.intake.group_limits import is_beam_search
from gateway.intake.limits import MAX_CHOICE_BYTES, MAX_CHOICES, MAX_GRAMMAR_BYTES, Checker
from gateway.intake.wanted import Wanted


def check_structured(checker: Checker, wanted: Wanted) -> None:
    """Adds to `checker` the violations in a request for structured output. Such a request may not be a beam search,
    which would need a grammar state for every beam, or set `ignore_eos`, which would continue the output after the
    grammar's end.
    """
    structured, name = wanted.structured, wanted.structured_field
    if structured is None and wanted.structured_after is None:
        return
    if is_beam_search(wanted):
        checker.refuse(name, "may not be given with a beam search")
    if wanted.ignore_eos:
        checker.refuse("ignore_eos", f"may not be given with {name}, whose grammar says where the output ends")
    if structured is None:
        return
    if structured.kind == "choice":
        _check_choice(checker, name, structured.options)
    elif structured.kind != "json_object":
        if not structured.source.strip():
            checker.refuse(name, "must not be empty")
        checker.text(name, structured.source, MAX_GRAMMAR_BYTES)


def _check_choice(checker: Checker, name: str, options: tuple[str, ...]) -> None:
    if not 1 <= len(options) <= MAX_CHOICES:
        checker.refuse(name, f"must hold at least 1 and at most {MAX_CHOICES} strings, got {len(options)}")
    for index, option in enumerate(options[:MAX_CHOICES]):
        if not option:
            checker.refuse(f"{name}[{index}]", "must not be empty")
        checker.text(f"{name}[{index}]", option, MAX_CHOICE_BYTES)
