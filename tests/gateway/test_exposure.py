"""The warnings of a gateway that other machines can reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.api_keys import read_keys
from gateway.api.exposure import warn_of_public_bind
from gateway.settings import GatewaySettings


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_a_public_bind_is_told(host: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = GatewaySettings(model="m", redis_url="redis://x", host=host)
    warn_of_public_bind(settings, has_keys=False)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "without an API key" in caplog.text and "without --ssl-certfile" in caplog.text
    caplog.clear()
    warn_of_public_bind(settings.model_copy(update={"ssl_certfile": Path("front.pem")}), has_keys=True)
    assert caplog.records == []


def test_loopback_is_not(caplog: pytest.LogCaptureFixture) -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        warn_of_public_bind(GatewaySettings(model="m", redis_url="redis://x", host=host), has_keys=False)
    assert caplog.records == []


def test_a_key_file_that_others_can_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text("acme a-key\n")
    read_keys(None, str(path))
    assert caplog.records == []
    path.chmod(0o644)
    read_keys(None, str(path))
    assert "has mode 0644: others can access it" in caplog.text and "a-key" not in caplog.text
