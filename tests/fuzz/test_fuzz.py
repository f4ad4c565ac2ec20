"""A short run of the fuzzer, and bodies that Hypothesis generates. `make fuzz` sends a million inputs."""

from __future__ import annotations

import http.client
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import message_factory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.tiny import make_checkpoint
from looseleaf import LLM
from protos.v1 import inference_pb2
from testing.fuzz import inputs
from testing.fuzz.__main__ import FORBIDDEN, fuzz, lines_of
from testing.system import assert_nothing_held

NUM_INPUTS = int(os.environ.get("LOOSELEAF_TEST_FUZZ", "20000"))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=8), v, max_size=4))
BODIES = st.dictionaries(st.sampled_from(inputs._KEYS), VALUES, max_size=6)


@pytest.mark.timeout(900)
def test_no_input_breaks_anything() -> None:
    outcome = fuzz(NUM_INPUTS, seed=1)
    table = "\n".join(lines_of(outcome))
    assert not outcome.faults, table
    assert len(outcome.statuses) >= 15, table
    served = outcome.statuses["InferenceService.Generate"], outcome.statuses["http"]
    assert served[0]["OK"] and served[1]["200"] and served[1]["400"], table


def test_a_seed_makes_the_same_inputs_again_and_all_kinds_of_them() -> None:
    kind = message_factory.GetMessageClass(inference_pb2.GenerateRequest.DESCRIPTOR)

    def drawn(seed: int) -> list[bytes]:
        draw = random.Random(seed)
        return [
            inputs.http(draw) + inputs.almost(draw, inputs.message(draw, kind).SerializeToString()) for _ in range(50)
        ]

    assert drawn(1) == drawn(1) != drawn(2)
    assert len(set(drawn(1))) == 50


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = make_checkpoint(Path(tmp_path_factory.mktemp("model")), "llama", seed=1)
    with LLM(str(model), num_blocks=256, max_model_len=128) as running:
        yield running


@pytest.mark.parametrize("path", [
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/score",
])  # fmt: skip
def test_bodies_that_hypothesis_makes(llm: LLM, path: str) -> None:
    @settings(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(BODIES)
    def send(body: dict[str, Any]) -> None:
        connection = http.client.HTTPConnection(llm.addresses.http, timeout=30)
        right = {"model": "tiny", "prompt": [5, 6], "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        right |= {"input": "Hi", "max_output_tokens": 2, "text_1": "a", "text_2": "b"}
        connection.request("POST", path, json.dumps(right | body))
        answer = connection.getresponse()
        text = answer.read()
        assert str(answer.status) not in FORBIDDEN and b"Traceback" not in text, (answer.status, text[:500])
        connection.close()

    send()
    assert_nothing_held(llm.addresses.block_store)
