"""Request ids, version, health, load, pages of other origins, and the description of the API."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import grpc.aio
import jsonschema
import pytest
from grpc_reflection.v1alpha import reflection_pb2

from common.errors import StartupError
from common.request_ids import MAX_ID_CHARS, REQUEST_ID, take_request_id
from common.rpc import RpcServer
from common.telemetry import configure_logging
from common.version import VERSION
from gateway.api.grpc_service import InferenceServicer, key_check
from gateway.api.http_frame import read_origins
from gateway.api.http_options import HttpOptions
from gateway.api.openapi import description
from gateway.api.openapi_limits import Served, pattern_below
from protos.v1 import inference_pb2 as pb
from protos.v1 import inference_pb2_grpc
from testing.gateway.parts import Fault, Script
from tests.gateway.http_served import serve as serve  # a fixture
from tests.gateway.test_requests import until

BODY = {"prompt": "the mill", "max_tokens": 3}
SERVED = Served(400, 512, 8, None, reads_tools=False, writes_calls=False, calls_tools=False)
"""The limits of the scripted workers and their model."""


# --- request ids


async def test_a_request_id_comes_back_and_goes_to_the_workers(serve: Any) -> None:
    served = await serve()
    headers = {"x-request-id": "trace-1"}
    for stream in (False, True):
        reply = await served.client.post("/v1/completions", json={**BODY, "stream": stream}, headers=headers)
        assert reply.headers["x-request-id"] == "trace-1"
    assert {request.request_id for request in served.rig.script.prefilled} == {"trace-1"}
    assert {submit.request_id for submit in served.rig.script.submitted} == {"trace-1"}
    own = await served.client.post("/v1/completions", json={**BODY, "request_id": "mine"}, headers=headers)
    assert own.headers["x-request-id"] == "trace-1" and served.rig.script.prefilled[-1].request_id == "mine"


async def test_every_reply_has_a_request_id(serve: Any) -> None:
    served = await serve(api_key="s3cret")
    found = []
    for method, path, status in (
        ("POST", "/v1/completions", 401), ("GET", "/nothing", 404), ("GET", "/v1/completions", 405),
        ("GET", "/health", 200), ("GET", "/metrics", 200), ("OPTIONS", "/v1/models", 405), ("HEAD", "/ping", 200),
    ):  # fmt: skip
        reply = await served.client.request(method, path)
        assert reply.status_code == status
        found.append(reply.headers["x-request-id"])
    assert len(set(found)) == len(found) and all(found)
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"no http\r\n\r\n")
    assert b"x-request-id: gen-" in await reader.read()
    writer.close()


@pytest.mark.parametrize(
    ("given", "kept"),
    [("a-B_9.:/+=@", "a-B_9.:/+=@"), ("a b\tc", "abc"), ("é[31m]", "31m"), ("x" * 500, "x" * MAX_ID_CHARS)],
)
async def test_a_request_id_is_bounded_and_cleaned(serve: Any, given: str, kept: str) -> None:
    assert take_request_id(given) == kept
    assert take_request_id("\x1b[31m") == "31m"
    assert take_request_id("\r\n ").startswith("gen-") and take_request_id(None) != take_request_id("")
    served = await serve()
    reply = await served.client.get("/version", headers={b"x-request-id": given.encode("latin-1")})
    assert reply.headers["x-request-id"] == kept


async def test_the_log_lines_of_a_request_have_its_id(serve: Any) -> None:
    served = await serve(num_decode=2)
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        for log_format in ("text", "json"):
            served.rig.script.submits.append(Fault("gap"))
            with redirect_stderr(io.StringIO()) as written:
                configure_logging("DEBUG", log_format, service="gateway")
                body = {"prompt": "the mill", "max_tokens": 20}
                reply = await served.client.post("/v1/completions", json=body, headers={"x-request-id": "trace-7"})
            assert reply.status_code == 200
            [line] = [line for line in written.getvalue().splitlines() if "is prefilled again" in line]
            assert "[trace-7] " in line if log_format == "text" else json.loads(line)["request_id"] == "trace-7"
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    assert REQUEST_ID.get() == "", "it stays within the request"


async def test_over_grpc_it_is_metadata(serve: Any) -> None:
    served = await serve(api_key="s3cret")
    server = RpcServer("127.0.0.1", 0, check=key_check(served.rig.authenticator))
    add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
    server.add(add, InferenceServicer(served.rig.front), "looseleaf.v1.InferenceService")
    await server.start()

    async def call(method: str, message: Any, *metadata: tuple[str, str]) -> tuple[Any, dict[str, Any], list[Any]]:
        done = getattr(stub, method)(message, metadata=metadata)
        replies = [reply async for reply in done] if method == "Generate" else []
        return await done.code(), dict(await done.trailing_metadata()), replies

    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        key, mine = ("authorization", "Bearer s3cret"), ("x-request-id", "trace-2")
        code, trailing, replies = await call("Generate", pb.GenerateRequest(text="the mill"), key, mine)
        assert code is grpc.StatusCode.OK and trailing["x-request-id"] == "trace-2"
        assert {reply.request_id for reply in replies} == {"trace-2"}
        code, trailing, _ = await call("ListModels", pb.ListModelsRequest(), key)
        assert code is grpc.StatusCode.OK and trailing["x-request-id"].startswith("gen-")
        code, trailing, _ = await call("Tokenize", pb.TokenizeRequest(text="x"), mine)
        assert code is grpc.StatusCode.UNAUTHENTICATED and trailing["x-request-id"] == "trace-2"
        assert "grpc-status-details-bin" in trailing
    await server.stop(0)


# --- version, health and load


async def test_version_ping_load_and_models(serve: Any) -> None:
    served = await serve(Script(step_s=0.01), api_key="s3cret")
    assert (await served.client.get("/version")).json() == {"version": VERSION}
    for method in ("GET", "POST"):
        reply = await served.client.request(method, "/ping")
        assert (reply.status_code, reply.content) == (200, b"")
    assert (await served.client.get("/load")).json() == {"server_load": 0}
    served.client.headers["authorization"] = "Bearer s3cret"
    long = asyncio.create_task(served.post("/v1/completions", prompt="the mill", max_tokens=200))
    await until(lambda: bool(served.rig.script.submitted))
    assert (await served.client.get("/load")).json() == {"server_load": 1}
    await long
    assert (await served.client.get("/load")).json() == {"server_load": 0}
    [model] = (await served.client.get("/v1/models")).json()["data"]
    assert model["created"] > 1_700_000_000


async def test_a_method_that_is_not_allowed_names_those_that_are(serve: Any) -> None:
    served = await serve()
    for path, wrong, allowed in (("/v1/responses", "GET", {"POST"}), ("/ping", "PUT", {"GET", "HEAD", "POST"})):
        reply = await served.client.request(wrong, path)
        assert reply.status_code == 405 and set(re.split(", *", reply.headers["allow"])) == allowed
        assert reply.json()["error"]["code"] == "method_not_allowed"


async def test_pages_of_chosen_origins_may_call(serve: Any) -> None:
    here, there = "https://app.example", "https://evil.example"
    served = await serve(http=HttpOptions(origins=(here,)))
    asking = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    reply = await served.client.options("/v1/responses", headers={"origin": here, **asking})
    assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == here
    assert "authorization" in reply.headers["access-control-allow-headers"] and reply.headers["x-request-id"]
    assert (await served.client.options("/v1/responses", headers={"origin": there, **asking})).status_code == 400
    for stream in (False, True):
        body = {**BODY, "stream": stream}
        reply = await served.client.post("/v1/completions", json=body, headers={"origin": here})
        assert reply.headers["access-control-allow-origin"] == here
        assert "x-request-id" in reply.headers["access-control-expose-headers"].lower()
        reply = await served.client.post("/v1/completions", json=body, headers={"origin": there})
        assert reply.headers.get("access-control-allow-origin") != there
    closed = await serve()
    reply = await closed.client.options("/v1/responses", headers={"origin": here, **asking})
    assert reply.status_code == 405 and "access-control-allow-origin" not in reply.headers


def test_origins_are_read_strictly() -> None:
    assert read_origins(None) == () and read_origins("*") == ("*",)
    assert read_origins("https://a.example, http://localhost:3000,") == ("https://a.example", "http://localhost:3000")
    for wrong in ("a.example", "https://a.example/", "ftp://a", "https://"):
        with pytest.raises(StartupError, match="--allowed-origins"):
            read_origins(wrong)


# --- the description


def test_the_description_has_every_field_and_its_limits() -> None:
    schemas = description(SERVED)["components"]["schemas"]
    chat = schemas["ChatRequest"]["properties"]
    assert chat["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    assert schemas["CompletionRequest"]["properties"]["top_p"]["anyOf"][0]["exclusiveMinimum"] == 0
    assert chat["suffix"]["enum"] == [None, ""] and "ignored" in chat["user"]["description"]
    assert schemas["CompletionRequest"]["required"] == ["prompt"] and schemas["ResponsesRequest"]["required"] == [
        "input"
    ]
    found = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(description(SERVED))))
    assert found <= set(schemas)


async def test_the_description_allows_as_many_ids_as_detokenize_takes(serve: Any) -> None:
    served = await serve()
    spec = (await served.client.get("/openapi.json")).json()
    operation = spec["paths"]["/detokenize"]["post"]
    name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    body = {"tokens": [11] * 600}  # the longest sequence of the model has 512 tokens
    assert (await served.post("/detokenize", **body)).status_code == 200
    jsonschema.validate(body, spec["components"]["schemas"][name])


async def test_rules_between_fields_are_in_the_description(serve: Any) -> None:
    served = await serve()
    components = description(SERVED)["components"]
    chat, text = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}, {"prompt": "a", "max_tokens": 1}
    options = {"stream_options": {"include_usage": True}}
    beams, goes_on = {"use_beam_search": True, "n": 2}, {"continue_final_message": True}
    tools = [{"type": "function", "function": {"name": "get_time"}}]
    thought, block = [{"type": "reasoning_text", "text": "a"}], [{"type": "thinking", "thinking": "a"}]
    for path, kind, body, is_right in (
        ("/v1/completions", "CompletionRequest", {**text, **options}, False),
        ("/v1/completions", "CompletionRequest", {**text, **options, "stream": True}, True),
        ("/v1/completions", "CompletionRequest", {**text, "stream_options": None}, True),
        ("/v1/chat/completions", "ChatRequest", {**chat, "top_logprobs": 2}, False),
        ("/v1/chat/completions", "ChatRequest", {**chat, "top_logprobs": 0}, True),
        ("/v1/chat/completions", "ChatRequest", {**chat, "documents": [], "mm_processor_kwargs": {}}, True),
        ("/v1/chat/completions", "ChatRequest", {**chat, "top_logprobs": 2, "logprobs": True}, True),
        ("/v1/chat/completions", "ChatRequest", {**chat, "max_completion_tokens": 1}, False),
        ("/v1/chat/completions", "ChatRequest", {**chat, "max_completion_tokens": None}, True),
        ("/v1/chat/completions", "ChatRequest", {**chat, "chat_template": "a"}, False),
        ("/tokenize", "TokenizeRequest", {"prompt": "a", "chat_template": None}, True),
        ("/v1/embeddings", "EmbeddingRequest", {"input": "a", "dimensions": 0}, False),
        ("/score", "ScoreRequest", {"text_1": "a", "text_2": ["b", ""]}, False),
        ("/v1/completions", "CompletionRequest", {**text, "logit_bias": {"0399": 1}}, True),
        ("/v1/completions", "CompletionRequest", {**text, "logit_bias": {"400": 1}}, False),
        ("/v1/completions", "CompletionRequest", {**text, "n": 9}, False),
        ("/v1/completions", "CompletionRequest", {**text, "guided_regex": "a", "guided_json": {}}, False),
        ("/v1/completions", "CompletionRequest", {**text, "guided_regex": "a", "ignore_eos": True}, False),
        ("/v1/completions", "CompletionRequest", {**text, **beams, "temperature": 0.5}, False),
        ("/v1/completions", "CompletionRequest", {**text, **beams, "temperature": 1}, True),
        ("/v1/completions", "CompletionRequest", {**text, "length_penalty": 2}, False),
        ("/v1/completions", "CompletionRequest", {**text, "bad_words": [" "]}, False),
        ("/v1/chat/completions", "ChatRequest", {**chat, "tool_choice": "required"}, False),
        ("/v1/chat/completions", "ChatRequest", {**chat, "tool_choice": "auto"}, True),
        ("/v1/chat/completions", "ChatRequest", {**chat, "tools": tools}, False),
        ("/v1/chat/completions", "ChatRequest", {**chat, "tools": tools, "tool_choice": "none"}, True),
        ("/v1/chat/completions", "ChatRequest", {**chat, "tools": [{"type": "x"}], "tool_choice": "none"}, False),
        ("/v1/chat/completions", "ChatRequest", {**chat, **goes_on, "add_generation_prompt": True}, False),
        ("/v1/chat/completions", "ChatRequest", {**chat, **goes_on}, True),
        ("/tokenize", "TokenizeRequest", {"messages": chat["messages"], "prompt": "a"}, False),
        ("/v1/responses", "ResponsesRequest", {"input": [{"type": "reasoning"}]}, False),
        ("/v1/responses", "ResponsesRequest", {"input": [{"role": "user", "content": thought}]}, False),
        ("/v1/messages", "MessagesRequest", {**chat, "tool_choice": {"type": "any"}}, False),
        ("/v1/messages", "MessagesRequest", {**chat, "system": thought}, False),
        ("/v1/messages", "MessagesRequest", {**chat, "messages": [{"role": "user", "content": block}]}, False),
        ("/v1/messages", "MessagesRequest", {**chat, "messages": [{"role": "assistant", "content": block}]}, True),
    ):
        assert ((await served.post(path, **body)).status_code == 200) == is_right, body
        schema = {"$ref": f"#/components/schemas/{kind}", "components": components}
        assert jsonschema.Draft202012Validator(schema).is_valid(body) == is_right, body


@pytest.mark.parametrize("limit", [1, 2, 10, 11, 400, 4096])
def test_a_pattern_bounds_a_number(limit: int) -> None:
    pattern = re.compile(pattern_below(limit))
    assert [n for n in range(2 * limit + 20) if pattern.search(str(n))] == list(range(limit))
    assert pattern.search(f"00{limit - 1}") and not pattern.search(f"1{limit - 1}") and not pattern.search("-0")


async def test_every_example_of_the_description_is_answered(serve: Any) -> None:
    served = await serve()
    spec = (await served.client.get("/openapi.json")).json()
    assert spec == description(SERVED) and spec["openapi"].startswith("3.1")
    assert all(name in spec["info"]["description"] for name in ("OpenAI", "vLLM", "Anthropic"))
    done, examples = await served.post("/v1/completions", **BODY), 0
    for path, methods in spec["paths"].items():
        for method, operation in methods.items():
            if method == "get":
                named = path.replace("{model}", "tiny").replace("{request_id}", done.headers["x-request-id"])
                assert (await served.client.get(named)).status_code == 200
                continue
            if "requestBody" not in operation:
                assert (await served.client.post(path)).status_code == 200
                continue
            example = operation["requestBody"]["content"]["application/json"]["example"]
            assert (await served.post(path, **example)).status_code == 200
            examples += 1
    assert examples >= 5


async def test_the_page_needs_nothing_from_elsewhere(serve: Any) -> None:
    served = await serve()
    page = await served.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    parts = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert {"docs.css", "docs.js", "openapi.json"} == set(parts)
    for part in parts:
        reply = await served.client.get(f"/{part}")
        assert reply.status_code == 200 and "http://" not in reply.text and "<script>" not in page.text
    script = Path("gateway/api/pages/docs.js").read_text()
    assert "innerHTML" not in script


async def test_no_reflection_hides_them(serve: Any) -> None:
    served = await serve(http=HttpOptions(describe=False))
    for path in ("/docs", "/docs.js", "/openapi.json"):
        assert (await served.client.get(path)).status_code == 404


# --- reflection


async def test_reflection_is_served_under_its_final_name_too() -> None:
    server = RpcServer("127.0.0.1", 0)
    await server.start()
    answers = {}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        for version in ("v1", "v1alpha"):
            name = f"grpc.reflection.{version}.ServerReflection"
            call: Any = channel.stream_stream(
                f"/{name}/ServerReflectionInfo",
                reflection_pb2.ServerReflectionRequest.SerializeToString,
                reflection_pb2.ServerReflectionResponse.FromString,
            )
            asked = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=name),
            ]
            listed, file = [reply async for reply in call(iter(asked))]
            answers[version] = {service.name for service in listed.list_services_response.service}
            [raw] = file.file_descriptor_response.file_descriptor_proto
            assert name.rpartition(".")[0].encode() in raw and not file.HasField("error_response")
    assert answers["v1"] == answers["v1alpha"] >= {f"grpc.reflection.{v}.ServerReflection" for v in ("v1", "v1alpha")}
    await server.stop(0)


# --- slow clients


async def test_a_body_that_does_not_arrive_is_the_clients_fault(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.api.asgi.BODY_TIMEOUT_S", 0.2)
    served = await serve()
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
    writer.close()
