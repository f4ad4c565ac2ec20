"""Settings: flags and variables come from one definition, and invalid ones are refused."""

from __future__ import annotations

import pytest
from pydantic import Field

from block_store.settings import BlockStoreSettings
from common.settings import ServerSettings, WorkerSettings, settings_config


class Example(WorkerSettings):
    model_config = settings_config("LOOSELEAF_EXAMPLE_", "example")


class Plain(ServerSettings):
    model_config = settings_config("LOOSELEAF_PLAIN_", "plain")


class Locked(ServerSettings):
    model_config = settings_config("LOOSELEAF_LOCKED_", "locked")
    key: str = Field("", pattern="^[a-z]*$", repr=False)


def test_flags_win_over_variables_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOSELEAF_EXAMPLE_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("LOOSELEAF_EXAMPLE_BLOCK_SIZE", "32")
    settings = Example.load(["--model", "m", "--max-num-seqs", "9"])
    assert (settings.max_num_seqs, settings.block_size, settings.dtype) == (9, 32, "auto")


def test_a_mistyped_variable_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOOSELEAF_PLAIN_PROT", "1")
    with pytest.raises(SystemExit) as exit_:
        Plain.load([])
    assert exit_.value.code == 2
    assert "LOOSELEAF_PLAIN_PROT" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv,names",
    [
        (["--model", "m", "--dtype", "int3"], ["--dtype", "int3"]),
        (["--model", "m", "--block-size", "0"], ["--block-size", "0"]),
        (["--model", "m", "--max-num-seqs", "many"], ["--max-num-seqs", "many"]),
        (["--model", "m", "--max-num-seq", "3"], ["--max-num-seq"]),
        (["--model", "m", "--advertise", "0.0.0.0:50053"], ["--advertise", "0.0.0.0:50053", "HOST:PORT"]),
        (["--model", "m", "--advertise", "[::]:50053"], ["--advertise", "[::]:50053"]),
        (["--model", "m", "--advertise", "10.0.0.1"], ["--advertise", "10.0.0.1"]),
        (["--model", "m", "--advertise", "10.0.0.1:0"], ["--advertise", "10.0.0.1:0"]),
        ([], ["--model"]),
    ],
)
def test_a_bad_flag_is_named(argv: list[str], names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        Example.load(argv)
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert all(name in message for name in names), message


def test_a_bad_secret_is_named_and_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Locked.load(["--key", "S3CRET"])
    message = capsys.readouterr().err
    assert "--key" in message and "S3CRET" not in message


@pytest.mark.parametrize(("given", "num_bytes"), [("1000000", 1_000_000), ("256MiB", 256 << 20), ("4GB", 4 * 10**9)])
def test_a_memory_budget_may_have_a_unit(given: str, num_bytes: int) -> None:
    assert BlockStoreSettings.load(["--memory-budget", given]).memory_budget == num_bytes


@pytest.mark.parametrize("given", ["0", "-5", "many", "256XB"])
def test_a_memory_budget_that_is_none_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        BlockStoreSettings.load(["--memory-budget", given])
    assert "--memory-budget" in capsys.readouterr().err
