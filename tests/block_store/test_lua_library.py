"""Each ledger script gets the statements of the library that it uses, and no others."""

from __future__ import annotations

import re

import pytest

from block_store.ledger.lua_library import FILES, source, with_library
from block_store.ledger.scripts import _OPERATIONS

LIBRARY = "\n".join(source(f"lib/{name}") for name in FILES)
FUNCTIONS = re.findall(r"^local function (\w+)", LIBRARY, re.MULTILINE)


def uses(name: str, text: str) -> int:
    """Returns how often a text names `name`, outside comments."""
    return len(re.findall(rf"\b{name}\b", re.sub("--.*", "", text)))


@pytest.mark.parametrize("operation", _OPERATIONS)
def test_every_function_in_a_script_is_used_and_every_used_one_is_there(operation: str) -> None:
    script = with_library(source(operation))
    for name in FUNCTIONS:
        defined = len(re.findall(rf"^local function {name}\b", script, re.MULTILINE))
        assert defined == (uses(name, script) > 0), name
        assert uses(name, script) != 1, f"{name} is only defined"
    assert script.index("return '-STALE_DATASET'") < script.index(source(operation))


def test_no_function_of_the_library_is_without_a_user() -> None:
    scripts = "".join(with_library(source(operation)) for operation in _OPERATIONS)
    assert [name for name in FUNCTIONS if not uses(name, scripts)] == []


def test_a_script_that_uses_nothing_still_compares_the_dataset() -> None:
    lines = with_library("return '+' -- pin, let_go").splitlines()
    assert lines[:2] == ["local call = redis.call", "local META = KEYS[1]"]
    assert lines[2].startswith("if call('HGET', META, 'dataset')") and len(lines) == 4
