"""No file of the product is longer than 300 lines unless its first line has a reason, "(long: ...)"."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("block_store", "common", "decode_svc", "engine", "gateway", "kernels", "looseleaf", "prefill_svc", "worker")
SUFFIXES = {".py", ".cpp", ".h", ".c", ".lua"}
MOST = 300


def test_long_files_say_why() -> None:
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.splitlines() if Path(name).suffix in SUFFIXES]
    assert len(files) > 250
    texts = {file: file.read_text() for file in files}
    long = {file: text for file, text in texts.items() if text.count("\n") > MOST}
    assert not [str(file) for file, text in long.items() if "(long: " not in text.partition("\n")[0]]
    short = [str(file) for file, text in texts.items() if file not in long and "(long: " in text.partition("\n")[0]]
    assert not short, "the reason outlived the length"
