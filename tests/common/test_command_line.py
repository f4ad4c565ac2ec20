"""The part of a process's command line that other users can see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from common.command_line import hidden

SCRIPT = """
import sys
from pydantic import Field
from common.settings import Settings, settings_config

class Own(Settings):
    model_config = settings_config("OWN_", "own")
    key: str | None = Field(None, repr=False)
    plain: str = ""

settings = Own.load(sys.argv[1:])
print(settings.key, settings.plain, flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["p", "--key", "secret", "--plain", "x"], ["p", "--key", "***", "--plain", "x"]),
        (["p", "--key=secret"], ["p", "--key=***"]),
        (["p", "--key"], ["p", "--key"]),
        (["p", "--key", "--key"], ["p", "--key", "***"]),
        (["p", "--keys=x", "secret"], ["p", "--keys=x", "secret"]),
    ],
)
def test_values_of_secret_flags_are_replaced(words: list[str], expected: list[str]) -> None:
    assert hidden(words, ["--key"]) == expected


def test_a_process_that_has_read_its_settings_shows_no_secret() -> None:
    command = [sys.executable, "-c", SCRIPT, "--key", "a-secret", "--plain", "seen"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "a-secret seen\n"
        shown = Path(f"/proc/{process.pid}/cmdline").read_text()
        process.stdin.write("\n")
    assert "a-secret" not in shown and "--key ***" in shown and "seen" in shown
