"""API keys of several tenants."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.api_keys import read_keys
from common.errors import StartupError


def test_keys_of_a_setting_and_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# who may come\n\nacme  a-key\nacme another\nzoo\tz-key\n")
    assert read_keys(None, None) == {}
    assert read_keys("own", None) == {"own": "default"}
    assert read_keys("own", str(path)) == {"own": "default", "a-key": "acme", "another": "acme", "z-key": "zoo"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("acme\n", "line 1: must be a tenant's name and a key"),
        ("acme k\n\nzoo k\n", "line 3: the key of zoo is given twice"),
        ("# nobody\n", "holds no key"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str | None, sentence: str) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
    with pytest.raises(StartupError, match=sentence) as refused:
        read_keys(None, str(path))
    assert str(path) in str(refused.value)
