from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from bench import huge_pages
from engine.tiny import make_checkpoint


def test_a_rehearsal_prints_the_ratio_of_each_batch_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_checkpoint(tmp_path / "model")
    arguments = ["--batches", "1", "3", "--context", "64", "--steps", "1", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["bench.huge_pages", "--model", str(model), *arguments])
    try:
        huge_pages.main()
    except SystemExit as refused:
        pytest.skip(str(refused))
    first, *rows = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d+ MiB became huge in [\d.]+ s", first)
    assert [row.split(":")[0] for row in rows] == ["decode batch 1", "decode batch 3"]
    assert all(re.search(r"small [\d.]+ ms, huge [\d.]+ ms, ratio [\d.]+ \(", row) for row in rows)
