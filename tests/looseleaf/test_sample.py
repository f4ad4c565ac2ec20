"""The line of generated text that a launch prints, if there is none to print."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from common.api_keys import ApiKeys, TenantLimits
from common.errors import Unavailable
from looseleaf.client import Client
from looseleaf.commands.certs import make
from looseleaf.serve.sample import sample

NO_KEYS = ApiKeys()


def test_a_sample_that_fails_is_a_line_with_the_reason(tmp_path: Path) -> None:
    assert sample("127.0.0.1:1", NO_KEYS, None).startswith("  says  nothing: nothing answers at 127.0.0.1:1")
    assert str(tmp_path / "none") in sample("127.0.0.1:1", NO_KEYS, str(tmp_path / "none"))


def test_no_quota_is_spent() -> None:
    quota = ApiKeys({"key": "zoo"}, {"zoo": TenantLimits(tokens_per_minute=600)})
    assert (
        sample("127.0.0.1:1", quota, None)
        == "  says  nothing: every tenant has a quota, which this line does not spend"
    )
    unlimited = ApiKeys({"key": "zoo", "other": "acme"}, dict(quota.limits))
    assert "nothing answers" in sample("127.0.0.1:1", unlimited, None)


def test_a_certificate_that_is_not_trusted_is_the_reason(tmp_path: Path) -> None:
    shown, trusted = tmp_path / "shown", tmp_path / "trusted"
    for directory in (shown, trusted):
        directory.mkdir()
        make(directory, [], timedelta(days=1))
    pair = ((shown / "front.key").read_bytes(), (shown / "front.pem").read_bytes())
    server = grpc.server(None)
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', grpc.ssl_server_credentials([pair]))}"
    server.start()
    try:
        with Client(address, tls_ca=trusted / "ca.pem", timeout=60.0) as client, pytest.raises(Unavailable) as failure:
            client.models()
        assert failure.value.message.startswith(f"cannot connect to {address}: ") and "handshake" in str(failure.value)
    finally:
        server.stop(None)
