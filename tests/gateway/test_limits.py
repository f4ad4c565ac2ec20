"""Every limit at its bounds, tested with the validator that gRPC and HTTP share."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Collection
from typing import Any

import pytest

from common.errors import InvalidArgument, NotFound
from common.group_need import GroupRoom
from gateway.intake.assets import GenerationDefaults, ModelAssets
from gateway.intake.limits import MAX_SALT_BYTES, MIN_PROMPT_BYTES
from gateway.intake.resolved_request import ResolvedRequest
from gateway.intake.salts import Salts
from gateway.intake.tokenizing import TokenizerPool
from gateway.intake.validate import Validator
from gateway.intake.wanted import ChatPrompt, IdsPrompt, TextPrompt, Wanted
from testing.gateway.parts import BOS_ID, EOS_ID, VOCAB_SIZE, make_assets

MAX_LEN = 512
PROMPT = [1, 5, 6]


def make_validator(assets: ModelAssets, pool: TokenizerPool, limits: Collection[GroupRoom] = ()) -> Validator:
    salts = Salts(b"secret")
    return Validator(assets, pool, salts, timeout_s=60.0, max_model_len=lambda: MAX_LEN, group_rooms=lambda: limits)


@pytest.fixture(scope="module")
def validator(assets: ModelAssets) -> AsyncIterator[Validator]:
    pool = TokenizerPool(assets, 1)
    yield make_validator(assets, pool)
    pool.close()


async def resolve(validator: Validator, **wanted: Any) -> ResolvedRequest:
    return await validator.resolve(Wanted(**{"prompt": IdsPrompt(PROMPT), **wanted}))


# field, accepted values, refused values, words that the message must contain
TABLE: list[tuple[str, list[Any], list[Any], str]] = [
    ("temperature", [0, 0.5, 2, 2.0], [-0.001, 2.001, math.nan, math.inf, -math.inf], "at most 2"),
    ("top_k", [-1, 0, 1, VOCAB_SIZE], [-2, VOCAB_SIZE + 1], f"at most {VOCAB_SIZE}"),
    ("top_p", [1e-6, 1], [0, 1.001, -1, math.nan], "above 0 and at most 1"),
    ("min_p", [0, 1], [-0.001, 1.001, math.nan], "at least 0 and at most 1"),
    ("presence_penalty", [-2, 2], [-2.001, 2.001, math.nan], "at least -2 and at most 2"),
    ("frequency_penalty", [-2, 2], [-2.001, 2.001, math.inf], "at least -2 and at most 2"),
    ("repetition_penalty", [1e-6, 10], [0, 10.001, math.nan], "above 0 and at most 10"),
    ("seed", [-(2**63), 0, 2**63 - 1], [-(2**63) - 1, 2**63, 10**400], str(2**63 - 1)),
    ("logprobs", [0, 20], [-1, 21], "at most 20"),
    ("prompt_logprobs", [0, 20], [-1, 21], "at most 20"),
    ("priority", [-(2**31), 2**31 - 1], [-(2**31) - 1, 2**31], str(2**31 - 1)),
    ("n", [1, 128], [0, -1, 129, 10**400], "at most 128"),
    ("beam_width", [1, 32], [0, 33], "at most 32"),
    ("timeout_s", [0.001, 86_400], [0, -1, 86_401, math.nan], "at most 86400"),
    ("max_tokens", [1, MAX_LEN - len(PROMPT)], [0, -1, MAX_LEN - len(PROMPT) + 1, MAX_LEN + 1], str(MAX_LEN)),
    ("min_tokens", [0, 16], [-1, 17, MAX_LEN + 1], "at least 0 and at most"),
    ("logit_bias", [[(0, -100), (VOCAB_SIZE - 1, 100)]], [[(0, -100.1)], [(0, math.nan)]], "at most 100"),
    ("logit_bias", [[(i, 0.0) for i in range(300)]], [[(i, 0.0) for i in range(301)]], "at most 300"),
    ("logit_bias", [], [[(VOCAB_SIZE, 1.0)], [(-1, 1.0)]], f"vocabulary size {VOCAB_SIZE}"),
    ("stop", [["x"] * 16, ["y" * 256], ["é" * 128]], [["x"] * 17], "at most 16"),
    ("stop", [], [["y" * 257], ["é" * 129]], "at most 256 bytes"),
    ("stop", [], [[""], ["a", ""]], "empty"),
    ("stop", [], [["\ud800"]], "surrogate"),
    ("stop_token_ids", [[0] * 64, [VOCAB_SIZE - 1]], [[0] * 65], "at most 64"),
    ("stop_token_ids", [], [[VOCAB_SIZE], [-1]], f"vocabulary size {VOCAB_SIZE}"),
    ("cache_salt", ["", "s" * MAX_SALT_BYTES], ["s" * (MAX_SALT_BYTES + 1)], f"at most {MAX_SALT_BYTES} bytes"),
    ("request_id", ["r"], ["r" * 257], "at most 256 bytes"),
    ("request_id", ["aZ09._:/+=@-"], ["a b", "\x1b[31m", "[/b]", "é"], "may contain only letters, digits and ._:/+=@-"),
    ("prompt", [IdsPrompt([0]), IdsPrompt([VOCAB_SIZE - 1])], [IdsPrompt([VOCAB_SIZE]), IdsPrompt([-1])], "vocab"),
    ("prompt", [IdsPrompt([5] * (MAX_LEN - 1))], [IdsPrompt([5] * MAX_LEN)], f"limit is {MAX_LEN - 1}"),
    ("prompt", [TextPrompt("a")], [TextPrompt(""), IdsPrompt([]), None], "must"),
    ("prompt", [], [TextPrompt("x" * (MIN_PROMPT_BYTES + 1))], f"at most {MIN_PROMPT_BYTES} bytes"),
    ("prompt", [], [TextPrompt("mill " * 5000)], f"limit is {MAX_LEN - 1}"),
    ("prompt", [TextPrompt("\U0001f600")], [TextPrompt("a\udfffb")], "surrogate"),
    ("prompt", [], [ChatPrompt([]), ChatPrompt([{"role": "", "content": "x"}])], ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "good", "bad", "named"), TABLE, ids=lambda v: v if isinstance(v, str) else "")
async def test_a_limit_holds_at_its_bounds_and_names_itself(
    validator: Validator, name: str, good: list[Any], bad: list[Any], named: str
) -> None:
    for value in good:
        await resolve(validator, **{name: value})
    for value in bad:
        with pytest.raises(InvalidArgument) as caught:
            await resolve(validator, **{name: value})
        assert caught.value.violations and named in caught.value.message
        shown = "timeout" if name == "timeout_s" else name
        assert caught.value.violations[0].field.startswith(shown) and caught.value.message.startswith(shown)


async def test_the_length_penalty_of_beams_is_limited(validator: Validator) -> None:
    for value in (-5, 0, 0.6, 5):
        assert (await resolve(validator, beam_width=2, length_penalty=value)).sampling.length_penalty == value
    for value in (-5.001, 5.001, math.nan, math.inf):
        with pytest.raises(InvalidArgument, match=r"^length_penalty must be at least -5 and at most 5"):
            await resolve(validator, beam_width=2, length_penalty=value)


def test_every_range_of_the_table_is_tried_at_its_bounds() -> None:
    from gateway.intake.limits import RANGES

    tried = {"timeout" if row[0] == "timeout_s" else row[0] for row in TABLE} | {"length_penalty"}
    assert set(RANGES) <= tried


async def test_all_violations_are_told_at_once(validator: Validator) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await resolve(validator, temperature=9, top_p=0, stop=[""], prompt=IdsPrompt([]))
    assert [v.field for v in caught.value.violations] == ["temperature", "top_p", "stop[0]", "prompt"]


async def test_an_unknown_model_is_not_found(validator: Validator) -> None:
    await resolve(validator, model="tiny")
    await resolve(validator, model="")
    with pytest.raises(NotFound):
        await resolve(validator, model="other")


async def test_defaults_come_from_the_generation_config() -> None:
    given = GenerationDefaults(temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.1)
    assets = make_assets(defaults=given, eos_token_ids=(2, 7))
    pool = TokenizerPool(assets, 1)
    validator = make_validator(assets, pool)
    request = await resolve(validator)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty) == (0.6, 20, 0.9, 1.1)
    assert request.stopping.stop_token_ids == (2, 7) and request.stopping.max_tokens == 16
    asked = await resolve(validator, temperature=0.0, top_k=-1, stop_token_ids=[9], ignore_eos=True)
    assert asked.sampling.temperature == 0 and asked.sampling.top_k == 0 and asked.stopping.stop_token_ids == (9,)
    assert (await resolve(validator)).sampling.seed != request.sampling.seed, "a seed is drawn for each"
    assert (await resolve(validator, seed=5)).sampling.seed == 5
    pool.close()


async def test_a_default_max_tokens_is_clipped_to_the_context_and_chat_takes_all_of_it(validator: Validator) -> None:
    near_end = await resolve(validator, prompt=IdsPrompt([5] * (MAX_LEN - 3)))
    assert near_end.stopping.max_tokens == 3
    chat = await resolve(validator, prompt=ChatPrompt([{"role": "user", "content": "hi"}]))
    assert chat.stopping.max_tokens == MAX_LEN - len(chat.prompt_ids)


async def test_special_tokens_are_added_to_text_but_not_to_chat(validator: Validator) -> None:
    assert (await resolve(validator, prompt=TextPrompt("the"))).prompt_ids[0] == BOS_ID
    assert (await resolve(validator, prompt=TextPrompt("the"), add_special_tokens=False)).prompt_ids[0] != BOS_ID
    assert (await resolve(validator, prompt=ChatPrompt([{"role": "user", "content": "hi"}]))).prompt_ids[0] != BOS_ID
    assert EOS_ID not in (await resolve(validator, ignore_eos=True)).stopping.stop_token_ids


def test_salts_separate_tenants_and_can_only_narrow() -> None:
    salts = Salts(b"secret")
    derived = {salts.derive(tenant, salt) for tenant in ("", "a", "b") for salt in (None, "", "x", "a")}
    assert len(derived) == 12
    assert salts.derive("", None) == b"" and salts.derive("a", "x") == Salts(b"secret").derive("a", "x")
    assert salts.derive("a", "x") != Salts(b"other!").derive("a", "x")
    assert "secret" not in repr(salts)
