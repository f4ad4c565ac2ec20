"""The tuner of attention tiles runs every kind of call. The tiling from the tables comes first in its output."""

from __future__ import annotations

import sys

import pytest

from kernels.gpu import tune


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [(["decode"], "(16, 64, 4, 3, 1)"), (["prefill", "--deterministic", "--head-dim", "64"], "(64, 64, 4, 2, 1)")],
)
def test_rehearsal(device: str, arguments: list[str], chosen: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip  # noqa: E501
    monkeypatch.setattr(sys, "argv", ["tune", *arguments, "--rehearse"])
    tune.main()
    case, first, *_ = capsys.readouterr().out.splitlines()
    assert case.startswith(str(tune.TOY[arguments[0]][0]))
    assert first.strip().startswith(chosen) and first.endswith("us")
