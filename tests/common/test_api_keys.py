"""API keys of several tenants."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.api_keys import ApiKeys, TenantLimits, read_keys
from common.errors import StartupError


def test_keys_and_limits_of_a_setting_and_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(
        "# who may come\n\nacme  a-key best_priority=-3 requests_per_minute=60 cache_percent=0\n"
        "acme another tokens_per_minute=5000 requests_per_minute=60\nzoo\tz-key\n"
    )
    assert read_keys(None, None) == ApiKeys()
    assert read_keys("own", None) == ApiKeys({"own": "default"})
    keys = read_keys("own", str(path))
    assert keys.tenants == {"own": "default", "a-key": "acme", "another": "acme", "z-key": "zoo"}
    assert keys.limits == {"acme": TenantLimits(60, 5000, -3, 0), "zoo": TenantLimits(best_priority=0)}
    assert "a-key" not in repr(keys)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("acme\n", "line 1: must be a tenant's name and a key"),
        ("acme k\n\nzoo k\n", "line 3: the key of zoo is given twice"),
        ("# nobody\n", "contains no key"),
        (
            "zoo k\nacme secret tokens=5\n",
            "line 2: word 3 is not a limit; the key may be followed by requests",
        ),
        ("acme requests_per_minute=5\n", "line 1: word 2 is a limit; the key of acme is missing"),
        ("acme secret best_priority\n", "line 1: word 3 is not a limit"),
        ("acme secret requests_per_minute=5 second-secret==\n", "line 1: word 4 is not a limit"),
        ("acme secret requests_per_minute=0\n", "line 1: requests_per_minute must be a whole number from 1 to"),
        ("acme secret requests_per_minute=1.5\n", "line 1: requests_per_minute must be .* got '1.5'"),
        ("acme secret tokens_per_minute=99999999999\n", "line 1: tokens_per_minute must be"),
        ("acme secret best_priority=--1\n", "line 1: best_priority must be a whole number from -2147483648 to"),
        ("a k cache_percent=101\n", "line 1: cache_percent must be a whole number from 0 to 100"),
        (
            "a k best_priority=1\na l best_priority=2\n",
            "line 2: best_priority of a is given twice, with different values",
        ),
        (None, "cannot be read"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str | None, sentence: str) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
    with pytest.raises(StartupError, match=sentence) as refused:
        read_keys(None, str(path))
    assert str(path) in str(refused.value) and "secret" not in str(refused.value)
