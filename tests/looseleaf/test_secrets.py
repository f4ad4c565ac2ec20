"""`looseleaf secrets`, and a Redis that requires the created password."""

from __future__ import annotations

from pathlib import Path

import pytest

from block_store.redis.password import with_password
from common.errors import StartupError
from looseleaf.cli import main


def test_secrets_are_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "deep" / "secrets"
    assert main(["secrets", str(directory)]) == 0
    files = [directory / "secret", directory / "redis-password"]
    assert capsys.readouterr().out.split() == list(map(str, files))
    assert directory.stat().st_mode & 0o777 == 0o700 and all(f.stat().st_mode & 0o777 == 0o600 for f in files)
    before = [file.read_text() for file in files]
    assert before[0] != before[1]
    files[1].unlink()
    assert main(["secrets", str(directory)]) == 0
    assert files[0].read_text() == before[0] and files[1].read_text() != before[1]
    assert main(["secrets", str(files[0] / "below")]) == 1


def test_a_password_joins_the_url(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.touch(mode=0o600)
    file.write_text("0123456789/@:?#%abc\n")
    quoted = "0123456789%2F%40%3A%3F%23%25abc"
    assert with_password("redis://host:6379/2", file) == f"redis://:{quoted}@host:6379/2"
    assert with_password("rediss://user@host", file) == f"rediss://user:{quoted}@host"
    assert with_password("unix:///run/redis.sock?db=1", file) == f"unix://:{quoted}@/run/redis.sock?db=1"
    sentinels = "redis+sentinel://", "[::1]:26379,two/mymaster/0?sentinel_password=a@b"
    assert with_password("".join(sentinels), file) == f"{sentinels[0]}:{quoted}@{sentinels[1]}"
    assert with_password("redis://:other@host", None) == "redis://:other@host"
    for url in ("redis://:other@host", "redis://host?password=other"):
        with pytest.raises(StartupError, match="already contains a password"):
            with_password(url, file)
    with pytest.raises(StartupError, match="--redis-password-file"):
        with_password("redis://host", tmp_path / "none")
