"""`bad_words` and `allowed_token_ids`: what workers receive, in both protocols, and which combinations are refused."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from protos.v1 import types_pb2 as types_pb
from testing.gateway.parts import EOS_ID, make_tokenizer
from tests.gateway.http_served import serve as serve  # a fixture
from tests.gateway.test_grpc import request
from tests.gateway.test_grpc import serve as serve_grpc  # noqa: F401  (a fixture)


def ids_of(text: str) -> list[int]:
    return list(make_tokenizer().encode(text, add_special_tokens=False).ids)


def told(script: Any) -> tuple[list[list[int]], list[int]]:
    """Returns the bad sequences and the allowed tokens of the last request to prefill."""
    sampling = script.prefilled[-1].sampling
    return [list(item.ids) for item in sampling.bad_token_ids], list(sampling.allowed_token_ids.ids)


async def test_a_word_is_banned_with_and_without_a_space_before_it(serve: Any) -> None:
    served = await serve()
    for path, body in (("completions", {"prompt": "the mill"}), ("chat/completions", {"messages": [MESSAGE]})):
        reply = await served.post(f"/v1/{path}", **body, max_tokens=2, bad_words=["w", " qz"])
        assert reply.status_code == 200
        bad, _ = told(served.rig.script)
        spaced, plain = ids_of(" w"), ids_of("w")
        assert len(spaced) == len(plain) == 1 and len(ids_of(" qz")) > len(ids_of("qz"))
        assert bad == [plain, spaced, ids_of("qz"), ids_of(" qz")]
    for nothing in ([], None):
        await served.post("/v1/completions", prompt="the mill", max_tokens=2, bad_words=nothing)
        assert told(served.rig.script) == ([], []) and not served.rig.script.prefilled[-1].sampling.HasField(
            "allowed_token_ids"
        )


async def test_allowed_ids_and_words_arrive_at_decode_too(serve: Any) -> None:
    served = await serve()
    await served.post("/v1/completions", prompt="the mill", max_tokens=4, allowed_token_ids=[9, 7, 7])
    assert told(served.rig.script)[1] == [7, 7, 9]
    assert list(served.rig.script.submitted[-1].sampling.allowed_token_ids.ids) == [7, 7, 9]
    assert served.rig.script.submitted[-1].sampling.bad_words == []


MESSAGE = {"role": "user", "content": "x"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"bad_words": [" "]}, "bad_words[0]"),
    ({"bad_words": ["x"] * 65}, "bad_words"),
    ({"bad_words": ["x" * 300]}, "bad_words[0]"),
    ({"bad_words": ["x"], "response_format": {"type": "json_object"}}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [5, 9999]}, "allowed_token_ids[1]"),
    ({"allowed_token_ids": [5], "bad_words": ["x"]}, "allowed_token_ids"),
    ({"allowed_token_ids": [5], "use_beam_search": True}, "allowed_token_ids"),
    ({"allowed_token_ids": [5], "guided_regex": "a+"}, "allowed_token_ids"),
    ({"allowed_token_ids": [EOS_ID], "min_tokens": 1}, "allowed_token_ids"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_what_might_leave_nothing_to_draw_is_refused(serve: Any, fields: dict[str, Any], param: str) -> None:
    served = await serve()
    reply = await served.post("/v1/completions", prompt="x", max_tokens=4, **fields)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.json()


async def test_grpc_takes_both(serve_grpc: Any) -> None:  # noqa: F811
    rig, stub = await serve_grpc()
    asked = request(bad_words=["wind"])
    assert [reply async for reply in stub.Generate(asked)]
    assert ids_of("wind") in told(rig.script)[0]
    asked = request(allowed_token_ids=types_pb.TokenSequence(ids=[5, 6]))
    assert [reply async for reply in stub.Generate(asked)] and told(rig.script)[1] == [5, 6]
    with pytest.raises(grpc.aio.AioRpcError, match="allowed_token_ids must hold at least 1"):
        [reply async for reply in stub.Generate(request(allowed_token_ids=types_pb.TokenSequence()))]
