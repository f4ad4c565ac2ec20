"""POST /v1/embeddings, POST /score and Embed, over real sockets: forms, limits, accounts, cancellation."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from typing import Any

import grpc
import openai
import pytest

from common.api_keys import ApiKeys, TenantLimits
from common.errors import Aborted
from protos.v1 import inference_pb2 as pb
from testing.gateway.parts import Script, expected_embedding
from tests.gateway.http_served import Served
from tests.gateway.http_served import serve as serve  # a fixture
from tests.gateway.test_grpc import serve as serve_grpc  # noqa: F401  (a fixture)
from tests.gateway.test_requests import until


def vector_of(served: Served, text: str) -> list[float]:
    return expected_embedding(served.rig.assets.tokenizer.encode(text).ids)


async def test_texts_and_ids_have_embeddings_in_their_order(serve: Any) -> None:
    served = await serve()
    reply = (await served.post("/v1/embeddings", input=["the mill", "wind"])).json()
    assert [item["embedding"] for item in reply["data"]] == [vector_of(served, t) for t in ("the mill", "wind")]
    assert [(item["object"], item["index"]) for item in reply["data"]] == [("embedding", 0), ("embedding", 1)]
    num_tokens = sum(len(served.rig.assets.tokenizer.encode(t).ids) for t in ("the mill", "wind"))
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] == num_tokens
    assert reply["model"] == "tiny" and reply["object"] == "list"
    for given in ([[5, 6, 7]], [5, 6, 7]):
        [item] = (await served.post("/v1/embeddings", input=given)).json()["data"]
        assert item["embedding"] == expected_embedding([5, 6, 7])
    assert not served.rig.script.submitted, "nothing is handed over to decode"
    assert served.rig.admission.current == 0


async def test_the_openai_client_decodes_base64(serve: Any) -> None:
    served = await serve()
    client = openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
    reply = await client.embeddings.create(model="tiny", input="the mill")  # the client requests base64
    assert reply.data[0].embedding == pytest.approx(vector_of(served, "the mill"))
    raw = (await served.post("/v1/embeddings", input="the mill", encoding_format="base64")).json()
    assert list(struct.unpack("<4f", base64.b64decode(raw["data"][0]["embedding"]))) == vector_of(served, "the mill")


async def test_fewer_dimensions_have_length_one_again(serve: Any) -> None:
    served = await serve()
    whole = vector_of(served, "the mill")
    reply = await served.post("/v1/embeddings", input="the mill", dimensions=2)
    cut = reply.json()["data"][0]["embedding"]
    assert cut == pytest.approx([value / math.hypot(*whole[:2]) for value in whole[:2]])
    for number in (0, 5):
        reply = await served.post("/v1/embeddings", input="the mill", dimensions=number)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "dimensions"


async def test_a_score_is_the_cosine_of_two_embeddings(serve: Any) -> None:
    served = await serve()
    texts = ["the mill", "wind", "the mill"]
    for path in ("/score", "/v1/score"):
        reply = (await served.post(path, text_1="the mill", text_2=texts)).json()
        first = vector_of(served, "the mill")
        others = [vector_of(served, text) for text in texts]
        cosines = [sum(a * b for a, b in zip(first, other, strict=True)) for other in others]
        assert [item["score"] for item in reply["data"]] == pytest.approx(cosines)
        assert reply["data"][0]["score"] == pytest.approx(1) and reply["data"][1]["score"] < 0.9999
    pairs = (await served.post("/score", text_1=["wind", "the"], text_2=["wind", "the"])).json()
    assert [item["score"] for item in pairs["data"]] == pytest.approx([1, 1])


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {}, "input"),
    ("/v1/embeddings", {"input": ""}, "input"),
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": ["a", ""]}, "input[1]"),
    ("/v1/embeddings", {"input": [9999]}, "input[0]"),
    ("/v1/embeddings", {"input": ["a"] * 65}, "input"),
    ("/v1/embeddings", {"input": [5] * 512}, "input"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ("/v1/embeddings", {"input": "a", "messages": [{}]}, "messages"),
    ("/score", {"text_1": "a"}, "text_2"),
    ("/score", {"text_1": ["a", "b"], "text_2": "a"}, "text_1"),
    ("/score", {"text_1": "a", "text_2": []}, "text_2"),
    ("/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED)
async def test_what_is_refused_names_the_field(serve: Any, path: str, body: dict[str, Any], param: str) -> None:
    reply = await (await serve()).post(path, **body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.json()


async def test_an_embedding_is_counted_limited_and_repeated_as_a_completion_is(serve: Any) -> None:
    limits = {"me": TenantLimits(tokens_per_minute=60)}
    served = await serve(keys=ApiKeys({"s3cret": "me"}, limits))
    served.client.headers["authorization"] = "Bearer s3cret"
    served.rig.script.prefills.append(Aborted("a block was reclaimed"))
    reply = (await served.post("/v1/embeddings", input="the mill")).json()
    num_tokens = reply["usage"]["prompt_tokens"]
    assert reply["looseleaf"]["attempts"] == 2 and [r.pooling for r in served.rig.script.prefilled] == [1, 1]
    rig = served.rig
    assert rig.metric("looseleaf_prompt_tokens_total") == num_tokens
    assert rig.metric("looseleaf_generation_tokens_total") == 0
    assert rig.metric("looseleaf_time_to_first_token_seconds_count") == 0
    assert rig.metric('looseleaf_requests_ended_total{finished_reason="stop"') == 1
    assert (await served.post("/v1/embeddings", input="the mill " * 40)).status_code == 429
    del served.client.headers["authorization"]
    assert (await served.post("/v1/embeddings", input="the mill")).status_code == 401


async def test_a_client_that_goes_away_cancels_its_embedding(serve: Any) -> None:
    served = await serve(Script(prefills=[600.0]))
    asked = asyncio.create_task(served.client.post("/v1/embeddings", json={"input": "the mill"}))
    await until(lambda: served.rig.script.prefilled)
    asked.cancel()
    await until(lambda: served.rig.script.prefills_cancelled == 1)
    await until(lambda: served.rig.admission.current == 0)


async def test_the_model_card_names_the_pooling(serve: Any) -> None:
    served = await serve()
    assert (await served.client.get("/v1/models")).json()["data"][0]["pooling"] == "last"


async def test_grpc_has_the_same_embeddings(serve_grpc: Any) -> None:  # noqa: F811
    rig, stub = await serve_grpc()
    reply = await stub.Embed(pb.EmbedRequest(token_ids=pb.TokenIds(ids=[5, 6, 7])))
    assert list(reply.embedding) == expected_embedding([5, 6, 7]) and reply.request_id
    assert reply.usage.prompt_tokens == 3 and reply.usage.completion_tokens == 0
    text = await stub.Embed(pb.EmbedRequest(text="the mill", dimensions=2, truncate_prompt_tokens=3))
    assert len(text.embedding) == 2 and text.usage.prompt_tokens == 3
    assert (await stub.ListModels(pb.ListModelsRequest())).models[0].pooling == "last"
    for wrong, name in ((pb.EmbedRequest(), "prompt"), (pb.EmbedRequest(text="a", dimensions=9), "dimensions")):
        with pytest.raises(grpc.aio.AioRpcError, match=name) as failed:
            await stub.Embed(wrong)
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as late:
        rig.script.prefills.append(600.0)
        await stub.Embed(pb.EmbedRequest(text="the mill"), timeout=0.2)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
