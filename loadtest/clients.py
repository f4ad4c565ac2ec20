"""Clients that send one request of the load test over gRPC or over OpenAI's HTTP API, with blocking calls.

`locustfile` prepares grpc for gevent before any channel is opened, so a blocked call lets other greenlets run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

import grpc
from gevent import GreenletExit

from loadtest.stats import StreamTimer
from loadtest.workload import Request
from protos.v1 import inference_pb2 as pb
from protos.v1 import inference_pb2_grpc as pb_grpc

_TIMEOUT_S = 120.0
CUT_OFF = "CUT_OFF"
"""The status of a request that the end of the run cut off."""


class Refused(RuntimeError):
    """The error for an HTTP answer with a status other than 200. `status` names the code, as in "HTTP 429"."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


def the_model(address: str) -> Any:
    """Returns the first model that the gateway lists. Raises grpc.RpcError if the gateway does not answer."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = pb_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        return stub.ListModels(pb.ListModelsRequest(), timeout=10.0).models[0]


class GrpcClient:
    """A client of InferenceService.Generate with a connection of its own."""

    protocol = "grpc"

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._stub: Any = pb_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def send(self, item: Request, timer: StreamTimer) -> None:
        """Sends a request, and reports its times or its failure. Several greenlets can send at the same time."""
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=item.prompt_ids))
        request.sampling.seed = item.seed
        request.stopping.max_tokens = item.max_tokens
        request.stopping.ignore_eos = True
        try:
            for message in self._stub.Generate(request, timeout=_TIMEOUT_S):
                timer.tokens(len(message.token_ids))
        except grpc.RpcError as error:
            timer.failed(error.code().name, RuntimeError(f"{error.code().name}: {error.details()}"))
        except GreenletExit:
            timer.failed(CUT_OFF, RuntimeError("the run ended before the answer"))
            raise
        else:
            timer.done()

    def close(self) -> None:
        self._channel.close()


class HttpClient:
    """A client of POST /v1/completions with server-sent events. It keeps idle connections for later requests."""

    protocol = "http"

    def __init__(self, url: str, model: str) -> None:
        location = urlsplit(url)
        self._address = (location.hostname or "127.0.0.1", location.port or 80)
        self._model = model
        self._idle: list[HTTPConnection] = []

    def send(self, item: Request, timer: StreamTimer) -> None:
        """Sends a request, and reports its times or its failure. Several greenlets can send at the same time."""
        body = {
            "model": self._model, "prompt": list(item.prompt_ids), "max_tokens": item.max_tokens, "seed": item.seed,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        connection = self._idle.pop() if self._idle else HTTPConnection(*self._address, timeout=_TIMEOUT_S)
        try:
            num_tokens = _stream(connection, json.dumps(body).encode(), timer)
        except (OSError, HTTPException, RuntimeError, ValueError) as error:
            connection.close()
            timer.failed(error.status if isinstance(error, Refused) else type(error).__name__, error)
        except GreenletExit:
            connection.close()
            timer.failed(CUT_OFF, RuntimeError("the run ended before the answer"))
            raise
        else:
            self._idle.append(connection)
            timer.done(num_tokens)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


def _stream(connection: HTTPConnection, body: bytes, timer: StreamTimer) -> int:
    """Sends a request and reads the streamed answer. Returns the answer's number of tokens. Raises Refused if the
    status is not 200.
    """
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        raise Refused(f"HTTP {reply.status}", reply.read(300).decode(errors="replace"))
    usage: dict[str, int] = {}
    for event in sse_events(reply):
        timer.tokens(num_tokens(event, first=timer.num_tokens == 0))
        usage = event.get("usage") or usage
    reply.read()  # the end of the body, so that the connection can be used again
    return usage.get("completion_tokens", timer.num_tokens)


def num_tokens(event: dict[str, Any], *, first: bool) -> int:
    """Returns the number of an event's choices that have text. `first` says that the stream has had no token yet; a
    choice that ends without text then also counts, because a token may have no text.
    """
    return sum(1 for choice in event["choices"] if choice["text"] or (first and choice["finish_reason"]))


def sse_events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yields the JSON of each event until [DONE]. Raises RuntimeError for an error event or an incomplete stream."""
    for line in lines:
        if not line.startswith(b"data: "):
            continue
        data = line[len(b"data: ") :].strip()
        if data == b"[DONE]":
            return
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise RuntimeError(str(event["error"].get("message")))
        yield event
    raise RuntimeError("the stream ended without [DONE]")
