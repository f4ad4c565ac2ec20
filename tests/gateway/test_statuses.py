"""Each kind of failure has the status of the table in `common.errors`: in a response, in a stream and over gRPC."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from common import errors
from common.rpc import RpcServer
from common.status import error_of
from gateway.api.asgi import error_response
from gateway.api.grpc_service import InferenceServicer, key_check
from gateway.api.http_app import HttpApi
from gateway.api.server import HttpServer, bind_http
from protos.v1 import decode_pb2, inference_pb2, inference_pb2_grpc, types_pb2
from testing.gateway.parts import Fault, Script
from tests.gateway.conftest import MakeRig, Rig

KEY = "s3cret"
ATTEMPTS = 6
"""The number of attempts with each of two prompts."""
Change = dict[str, Any]


@dataclass
class Case:
    """A test case: a condition, the steps that cause it, and the expected error."""

    grpc_code: str
    http_status: int
    change: Change
    """A change of the request: a field, or `key`."""
    script: Callable[[], Script] = Script
    prepare: Callable[[Rig], Any] = lambda rig: None
    options: Change | None = None
    retry_after: bool = False
    code: str | None = None
    """OpenAI's own code, if there is one."""
    mid_stream: bool = False
    """Whether a stream has already sent its first token, and therefore status 200."""


def prefill_says(kind: type[errors.LooseleafError], **details: Any) -> Callable[[], Script]:
    return lambda: Script(prefills=[kind("it is so", **details) for _ in range(ATTEMPTS)])


def decode_says(rejection: int) -> Callable[[], Script]:
    return lambda: Script(submits=[Fault("reject", 0, rejection) for _ in range(ATTEMPTS)])


def no_workers(rig: Rig) -> None:
    rig.workers.on_records = lambda records: None  # type: ignore[method-assign]
    rig.workers._router.update([], 0.0)


def drain(rig: Rig) -> None:
    rig.admission.draining = True


CASES: dict[str, Case] = {
    "bad parameter": Case("INVALID_ARGUMENT", 400, {"temperature": 9.0}),
    "prompt too long": Case("INVALID_ARGUMENT", 400, {"prompt": "mill " * 2000}, code="context_length_exceeded"),
    "too large for decode": Case(
        "INVALID_ARGUMENT", 400, {}, decode_says(decode_pb2.REJECTION_TOO_LARGE), mid_stream=True
    ),
    "unknown model": Case("NOT_FOUND", 404, {"model": "other"}, code="model_not_found"),
    "no credential": Case("UNAUTHENTICATED", 401, {"key": None}, code="invalid_api_key"),
    "wrong credential": Case("UNAUTHENTICATED", 401, {"key": "wrong"}, code="invalid_api_key"),
    "without the right": Case("PERMISSION_DENIED", 403, {}, prefill_says(errors.PermissionDenied)),
    "queue full": Case("RESOURCE_EXHAUSTED", 429, {}, options={"max_queue": 0}, retry_after=True),
    "workers' queues full": Case(
        "RESOURCE_EXHAUSTED", 429, {}, prefill_says(errors.ResourceExhausted), retry_after=True
    ),
    "nobody ready": Case("UNAVAILABLE", 503, {}, prepare=no_workers, options={"recover_s": 0.0}, retry_after=True),
    "draining": Case("UNAVAILABLE", 503, {}, prepare=drain, retry_after=True),
    "workers lost": Case("UNAVAILABLE", 503, {}, prefill_says(errors.Unavailable), retry_after=True),
    "lost KV, again and again": Case("UNAVAILABLE", 503, {}, prefill_says(errors.Aborted), retry_after=True),
    "pair incompatible": Case("FAILED_PRECONDITION", 500, {}, prefill_says(errors.FailedPrecondition)),
    "not supported": Case("UNIMPLEMENTED", 400, {}, prefill_says(errors.Unimplemented)),
    "deadline in prefill": Case("DEADLINE_EXCEEDED", 504, {}, prefill_says(errors.DeadlineExceeded)),
    "deadline": Case("DEADLINE_EXCEEDED", 504, {}, lambda: Script(prefills=[600.0, 600.0]), options={"timeout_s": 0.4}),
    "a worker fails": Case("INTERNAL", 500, {}, prefill_says(errors.Internal)),
    "decode fails": Case("INTERNAL", 500, {}, decode_says(decode_pb2.REJECTION_INTERNAL), mid_stream=True),
}


class Fronts:
    """The parts of one gateway, with both protocols."""

    def __init__(self, rig: Rig, http: HttpServer, rpc: RpcServer, port: int) -> None:
        self._http, self._rpc = http, rpc
        self._client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60)
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{rpc.port}")
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def http(self, change: Change, *, stream: bool) -> httpx.Response:
        body = {"prompt": "the mill", "max_tokens": 4, "stream": stream, **change}
        key = body.pop("key", KEY)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return await self._client.post("/v1/completions", json=body, headers=headers)

    async def grpc(self, change: Change) -> grpc.aio.AioRpcError:
        key = change.get("key", KEY)
        message = inference_pb2.GenerateRequest(
            text=change.get("prompt", "the mill"),
            sampling=types_pb2.SamplingParams(temperature=change.get("temperature", 0.0)),
            stopping=types_pb2.StoppingParams(max_tokens=4),
        )
        if "model" in change:
            message.model = change["model"]
        call = self._stub.Generate(message, metadata=() if key is None else (("authorization", f"Bearer {key}"),))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        return caught.value

    async def close(self) -> None:
        await self._client.aclose()
        await self._channel.close()
        await self._http.stop(1.0)
        await self._rpc.stop(0)


@pytest.fixture
async def serve(make_rig: MakeRig) -> AsyncIterator[Any]:
    opened: list[Fronts] = []

    async def start(case: Case) -> tuple[Rig, Fronts]:
        rig = await make_rig(case.script(), api_key=KEY, **(case.options or {}))
        sock = bind_http("127.0.0.1", 0)
        http = HttpServer(HttpApi(rig.front).app(lambda: True, show_metrics=False, timeout_s=20.0), sock)
        rpc = RpcServer("127.0.0.1", 0, check=key_check(rig.authenticator))
        add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
        rpc.add(add, InferenceServicer(rig.front), "looseleaf.v1.InferenceService")
        await http.start()
        await rpc.start()
        opened.append(Fronts(rig, http, rpc, sock.getsockname()[1]))
        case.prepare(rig)
        return rig, opened[-1]

    yield start
    for fronts in opened:
        await fronts.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", CASES)
async def test_over_http(serve: Any, name: str, stream: bool) -> None:
    case = CASES[name]
    rig, fronts = await serve(case)
    reply = await fronts.http(case.change, stream=stream)
    begun = stream and case.mid_stream
    events = reply.text.strip().split("\n\n")
    error = (json.loads(events[-2].removeprefix("data: ")) if begun else reply.json())["error"]
    assert reply.status_code == (200 if begun else case.http_status), error
    assert error["code"] == (case.code or case.grpc_code.lower())
    assert ("retry-after" in reply.headers) is case.retry_after
    assert not case.retry_after or int(reply.headers["retry-after"]) >= 1
    assert "ExceptionGroup" not in error["message"] and rig.metric("looseleaf_requests_failed_total") == 1


@pytest.mark.parametrize("name", CASES)
async def test_over_grpc(serve: Any, name: str) -> None:
    case = CASES[name]
    _, fronts = await serve(case)
    failed = await fronts.grpc(case.change)
    assert failed.code() is grpc.StatusCode[case.grpc_code]
    assert (error_of(failed).retry_after_s is not None) is case.retry_after


@pytest.mark.parametrize("name", ["workers lost", "deadline", "a worker fails"])
async def test_one_of_several_prompts_that_fails_is_the_answer(serve: Any, name: str) -> None:
    case = CASES[name]
    rig, fronts = await serve(case)
    reply = await fronts.http({"prompt": ["the mill", "the wind"]}, stream=False)
    assert reply.status_code == case.http_status
    assert rig.admission.current == 0 and rig.gate.inside == 0


def test_every_error_that_clients_see_is_tried() -> None:
    unseen = {"ABORTED", "CANCELLED"}  # internal; a client that has disconnected
    assert {kind.grpc_code for kind in errors.ALL_ERRORS} - unseen == {case.grpc_code for case in CASES.values()}


def test_a_retry_time_is_rounded_up() -> None:
    refusals = [
        errors.ResourceExhausted("the queue is full", retry_after_s=seconds) for seconds in (0.1, 1.0, 1.2, 2.5)
    ]
    assert [error_response(refusal).headers["retry-after"] for refusal in refusals] == ["1", "1", "2", "3"]
