"""The internal services of a running deployment: closed to other users of the machine, open to the operator."""

from __future__ import annotations

import os
import signal
import stat
import time
from pathlib import Path

import grpc
import pytest

from block_store import operator_file
from common.access import POLICY, Access
from looseleaf import LLM
from looseleaf.cli import main
from testing.system import assert_nothing_held, trust_at, wait_for

PROMPT = list(range(20, 60))


def code_of(address: str, method: str, shown: tuple[tuple[str, str], ...] = ()) -> grpc.StatusCode:
    with grpc.insecure_channel(address) as channel:
        try:
            next(channel.stream_stream(method)(iter([b""]), metadata=shown, timeout=60), None)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("service", ["block_store", "prefill", "decode"])
def test_no_internal_method_answers_a_stranger(llm: LLM, service: str) -> None:
    wrong = (("looseleaf-secret", "0" * 64), ("authorization", "Bearer x"))
    for method, access in POLICY.items():
        if access is not Access.PUBLIC:
            for shown in ((), wrong):
                assert code_of(llm.addresses.services[service], method, shown) is grpc.StatusCode.UNAUTHENTICATED
    assert code_of(llm.addresses.services[service], "/grpc.health.v1.Health/Check") is grpc.StatusCode.OK


def test_the_secret_is_in_no_command_line_and_in_one_file(llm: LLM) -> None:
    found = operator_file.find(llm.addresses.block_store)
    assert found is not None and found.trust.secret_file is not None
    secret = trust_at(llm.addresses.block_store).secret
    password = found.redis_url.partition("unix://:")[2].partition("@")[0]
    assert len(password) == 64
    assert secret is not None and len(secret) == 64
    for file in (found.trust.secret_file, found.trust.secret_file.parent / "operator.json"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert secret not in (found.trust.secret_file.parent / "operator.json").read_text()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            shown = (process / "cmdline").read_text(errors="replace")
            assert secret not in shown and password not in shown
        except (FileNotFoundError, ProcessLookupError):
            continue


def test_who_operates_it_sees_blocks_and_checks_them(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    address = llm.addresses.block_store
    llm.client.generate(PROMPT, max_tokens=4)
    assert_nothing_held(address)
    assert main(["blocks", address]) == 0
    assert "cached" in capsys.readouterr().out
    found = operator_file.find(address)
    assert found is not None and found.trust.secret_file is not None
    assert main(["fsck", str(found.trust.secret_file.parent), "--digests"]) == 0
    assert " 0 differences" in capsys.readouterr().out


def test_a_worker_that_comes_again_knows_the_secret(llm: LLM) -> None:
    before = llm.client.generate(PROMPT, max_tokens=8, temperature=0.0).token_ids
    pid = llm.pids["decode"]
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.1)
    assert llm.client.generate(PROMPT, max_tokens=8, temperature=0.0).token_ids == before
    wait_for(lambda: llm.pids["decode"], lambda now: now != pid, 60, "not started again")


def test_nothing_of_it_is_left_behind(checkpoint: Path) -> None:
    with LLM(str(checkpoint), num_blocks=64, max_model_len=256) as llm:
        found = operator_file.find(llm.addresses.block_store)
        assert found is not None and found.trust.secret_file is not None
        directory = found.trust.secret_file.parent
    assert not directory.exists()
