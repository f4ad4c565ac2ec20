"""Locust users of Looseleaf. Half of them use gRPC, half OpenAI's HTTP API, and all of them stream.

    locust --headless -u 32 -r 8 -t 60s -f loadtest/locustfile.py --host http://127.0.0.1:8000

The gRPC address comes from --grpc-address. For each protocol, the users report ttft, itl for each gap between messages
with tokens, and e2e for each request; the length column counts tokens. Importing this file prepares grpc for gevent,
which must happen before any channel is opened.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import grpc.experimental.gevent as grpc_gevent
from locust import User, constant, events, task

from loadtest.stats import StreamTimer
from loadtest.workload import Lengths, Workload
from looseleaf.simulation.trace import read_lengths
from protos.v1 import inference_pb2 as pb
from protos.v1 import inference_pb2_grpc as pb_grpc

grpc_gevent.init_gevent()

_TIMEOUT_S = 120.0


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def add_arguments(parser: Any) -> None:
    """Adds the flags of the workload."""
    parser.add_argument("--grpc-address", default="127.0.0.1:50051", help="host:port of the gateway's gRPC")
    parser.add_argument("--workload-seed", type=int, default=0, help="seed of lengths, prompts and sampling")
    parser.add_argument("--prompt-median", type=float, default=96.0, help="median prompt length in tokens")
    parser.add_argument("--output-median", type=float, default=32.0, help="median output length in tokens")
    parser.add_argument("--shared-share", type=float, default=0.5, help="share of prompts with a common prefix")
    parser.add_argument("--trace", default="", help="trace of lengths in Azure's or Mooncake's format")
    parser.add_argument("--trace-divisor", type=float, default=16.0, help="divides the lengths of the trace")


@events.init.add_listener  # type: ignore[untyped-decorator]
def prepare(environment: Any, **_: Any) -> None:
    """Creates one workload and one request counter for all users of this process."""
    options = environment.parsed_options
    model = the_model(options.grpc_address)
    trace = read_lengths(Path(options.trace), divisor=options.trace_divisor) if options.trace else ()
    workload = Workload(
        seed=options.workload_seed,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        prompt=Lengths(options.prompt_median, 0.8, model.max_model_len // 2),
        output=Lengths(options.output_median, 0.6, model.max_model_len // 4),
        shared_share=options.shared_share,
        trace=trace,
    )
    environment.looseleaf_model = model.id
    environment.looseleaf_requests = map(workload.request, itertools.count())


def the_model(address: str) -> Any:
    """Returns the first model that the gateway lists."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = pb_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        return stub.ListModels(pb.ListModelsRequest(), timeout=10.0).models[0]


class GrpcUser(User):  # type: ignore[misc]
    """A user of InferenceService.Generate, with blocking stubs and its own connection."""

    wait_time = constant(0)  # type: ignore[misc]

    def on_start(self) -> None:
        self._channel = grpc.insecure_channel(
            self.environment.parsed_options.grpc_address, options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self._stub: Any = pb_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def on_stop(self) -> None:
        self._channel.close()

    @task
    def generate(self) -> None:
        item = next(self.environment.looseleaf_requests)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=item.prompt_ids))
        request.sampling.seed = item.seed
        request.stopping.max_tokens = item.max_tokens
        timer = StreamTimer(self.environment.events.request.fire, "grpc")
        try:
            for message in self._stub.Generate(request, timeout=_TIMEOUT_S):
                timer.tokens(len(message.token_ids))
        except grpc.RpcError as error:
            timer.failed(RuntimeError(f"{error.code().name}: {error.details()}"))
        else:
            timer.done()


class OpenAIUser(User):  # type: ignore[misc]
    """A user of POST /v1/completions with server-sent events, with its own connection."""

    wait_time = constant(0)  # type: ignore[misc]

    def on_start(self) -> None:
        location = urlsplit(self.environment.host or "http://127.0.0.1:8000")
        self._connection = HTTPConnection(location.hostname or "127.0.0.1", location.port or 80, timeout=_TIMEOUT_S)

    def on_stop(self) -> None:
        self._connection.close()

    @task
    def complete(self) -> None:
        item = next(self.environment.looseleaf_requests)
        body = {
            "model": self.environment.looseleaf_model,
            "prompt": list(item.prompt_ids),
            "max_tokens": item.max_tokens,
            "seed": item.seed,
            "stream": True,
        }
        timer = StreamTimer(self.environment.events.request.fire, "http")
        try:
            self._stream(json.dumps(body).encode(), timer)
        except (OSError, HTTPException, RuntimeError, ValueError) as error:
            self._connection.close()  # the next request opens a new connection
            timer.failed(error)
        else:
            timer.done()

    def _stream(self, body: bytes, timer: StreamTimer) -> None:
        self._connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        reply = self._connection.getresponse()
        if reply.status != 200:
            raise RuntimeError(f"HTTP {reply.status}: {reply.read(300).decode(errors='replace')}")
        for event in sse_events(reply):
            timer.tokens(num_tokens(event, first=timer.num_tokens == 0))
        reply.read()  # the end of the body, so that the connection can be used again


def num_tokens(event: dict[str, Any], *, first: bool) -> int:
    """Returns the number of an event's choices with text. If `first`, a choice that ends without text also counts,
    because a token may have no text. `first` says that the stream has had no token yet.
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
