"""The number of sequences of a request (n, best_of, beam searches), and the limits of the workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import InvalidArgument
from common.group_need import GroupNeed, GroupRoom, blocks_of, floor_of
from common.kv_retention import KvRules, Retention
from gateway.api.openai_parse import parse_body
from gateway.api.openai_request import ChatBody, CompletionBody
from gateway.intake.assets import GenerationDefaults
from gateway.intake.group_limits import rooms_of
from gateway.intake.limits import PromptLimits
from gateway.intake.resolved_request import ResolvedRequest
from gateway.intake.salts import Salts
from gateway.intake.tokenizing import TokenizerPool
from gateway.intake.validate import Validator
from gateway.intake.wanted import ChatPrompt, IdsPrompt, Wanted
from testing.gateway.parts import make_assets, make_record

MAX_LEN = 512
PROMPT = [1] * 40  # two and a half blocks
ASSETS = make_assets(defaults=GenerationDefaults(temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.1))
LIMITS: list[GroupRoom] = []
"""The group limits that the validator gets. A test fills the list, and the fixture empties it."""


@pytest.fixture(scope="module")
def validator() -> Iterator[Validator]:
    pool = TokenizerPool(ASSETS, 1)
    yield Validator(
        ASSETS, pool, Salts(b"s"), timeout_s=60.0, max_model_len=lambda: MAX_LEN, group_rooms=lambda: LIMITS
    )
    pool.close()


@pytest.fixture(autouse=True)
def no_workers() -> Iterator[None]:
    yield
    LIMITS.clear()


def room(max_sequences: int, max_blocks: int) -> GroupRoom:
    return GroupRoom(max_sequences, max_blocks, KvRules(16))


async def resolve(validator: Validator, **wanted: Any) -> ResolvedRequest:
    return await validator.resolve(Wanted(**{"prompt": IdsPrompt(PROMPT), **wanted}), "tenant")


async def refusal(validator: Validator, **wanted: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        await resolve(validator, **wanted)
    assert caught.value.message.startswith(caught.value.violations[0].field)
    return caught.value.message


# requested fields, (width, returned sequences, whether it is a beam search)
SHAPES: list[tuple[dict[str, Any], tuple[int, int, bool]]] = [
    ({}, (1, 1, False)),
    ({"n": 4}, (4, 4, False)),
    ({"n": 3, "best_of": 3}, (3, 3, False)),
    ({"beam_width": 4}, (4, 4, True)),
    ({"beam_width": 4, "n": 2}, (4, 2, True)),
    ({"use_beam_search": True, "best_of": 4}, (4, 1, True)),
    ({"use_beam_search": True, "best_of": 4, "n": 3}, (4, 3, True)),
    ({"use_beam_search": True, "n": 3}, (3, 3, True)),
    ({"use_beam_search": True}, (1, 1, True)),
    ({"use_beam_search": False, "n": 2}, (2, 2, False)),
]


@pytest.mark.parametrize(("wanted", "shape"), SHAPES)
async def test_both_fronts_say_how_many_run_and_how_many_are_returned(
    validator: Validator, wanted: dict[str, Any], shape: tuple[int, int, bool]
) -> None:
    request = await resolve(validator, **wanted, max_tokens=5)
    sampling = request.sampling
    assert (sampling.width, sampling.num_sequences, sampling.beam_width is not None) == shape
    assert request.tenant == "tenant" and request.cost == len(PROMPT) + shape[0] * 5


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"best_of": 2}, "best_of must equal n (1) without a beam search"),
        ({"best_of": 2, "n": 3}, "best_of must equal n (3)"),
        ({"length_penalty": 2.0}, "length_penalty may only"),
        ({"early_stopping": True}, "early_stopping may only"),
        ({"early_stopping": "never"}, "early_stopping may only"),
        ({"use_beam_search": True, "early_stopping": "always"}, 'early_stopping must be true, false or "never"'),
        ({"use_beam_search": True, "early_stopping": 1}, 'early_stopping must be true, false or "never"'),
        ({"use_beam_search": True, "n": 3, "best_of": 2}, "n must be at most 2 (best_of), got 3"),
        ({"beam_width": 2, "n": 3}, "n must be at most 2 (beam_width), got 3"),
        ({"use_beam_search": True, "best_of": 33}, "best_of must be at least 1 and at most 32, got 33"),
        ({"use_beam_search": True, "n": 33}, "n must be at least 1 and at most 32, got 33"),
        ({"use_beam_search": True, "n": 0}, "n must be at least 1"),
        ({"beam_width": 2, "temperature": 0.6}, "temperature must be 0 or 1 with a beam search"),
        ({"beam_width": 2, "top_k": 5}, "top_k must be -1 or 0 with a beam search"),
        ({"beam_width": 2, "top_p": 0.9}, "top_p must be 1 with a beam search"),
        ({"beam_width": 2, "min_p": 0.1}, "min_p must be 0 with a beam search"),
        ({"beam_width": 2, "stop": ["x"]}, "stop may not be given with a beam search"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(
    validator: Validator, wanted: dict[str, Any], message: str
) -> None:
    assert (await refusal(validator, **wanted)).startswith(message)


async def test_the_models_defaults_for_drawing_do_not_reach_a_beam_search(validator: Validator) -> None:
    quiet: dict[str, Any] = {"temperature": 0, "top_k": -1, "top_p": 1.0, "min_p": 0, "length_penalty": 1.0}
    for wanted in ({}, quiet, {"temperature": 1.0, "seed": 3, "logprobs": 2}):
        sampling = (await resolve(validator, beam_width=2, early_stopping="never", **wanted)).sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 0, 1.0, 0.0)
        assert sampling.repetition_penalty == 1.1 and sampling.early_stopping == "never"
    drawn = (await resolve(validator, n=2, length_penalty=1.0, early_stopping=False)).sampling
    assert (drawn.temperature, drawn.top_k, drawn.early_stopping) == (0.6, 20, False)


async def test_no_group_is_wider_than_what_some_decode_worker_runs(validator: Validator) -> None:
    await resolve(validator, n=128)  # without a worker, no limit is known
    LIMITS[:] = [room(4, 0), room(8, 0)]
    for field in ("n", "beam_width"):
        assert (await resolve(validator, **{field: 8})).sampling.width == 8
        told = await refusal(validator, **{field: 9})
        assert told.startswith(f"{field} must be at most 8, the sequences that a decode worker runs"), told
    assert (await refusal(validator, use_beam_search=True, best_of=9)).startswith("best_of must be at most 8")


async def test_no_group_needs_more_blocks_than_some_decode_worker_grants(validator: Validator) -> None:
    small, large = room(8, 9), room(8, 24)
    LIMITS[:] = [small, large]
    # 2 shared blocks, 4 each for 64 tokens of the prompt's tail and the output, 1 each for the tail during its copy
    assert GroupNeed(40, 56, 4).blocks(KvRules(16)) == 22 and GroupNeed(40, 57, 4).blocks(KvRules(16)) == 26
    await resolve(validator, n=4, max_tokens=56)
    told = await refusal(validator, n=4, max_tokens=57)
    assert told == (
        "n of 4, max_tokens 57 and a prompt of 40 tokens need 26 blocks of KV; the limit of a decode worker is 24"
    )
    assert (await refusal(validator, beam_width=4, max_tokens=57)).startswith("beam_width of 4, max_tokens 57")
    LIMITS[:] = [small, room(2, 100)]  # the worker with enough blocks does not run so many sequences
    assert "limit of a decode worker is 9" in await refusal(validator, n=4, max_tokens=57)
    LIMITS[:] = [small]
    assert (await refusal(validator, max_tokens=400)).startswith("max_tokens of 400 and a prompt of 40 tokens need 29")
    LIMITS[:] = [small, room(8, 0)]  # one of them does not state its limit
    await resolve(validator, n=4, max_tokens=57)


async def test_a_default_max_tokens_is_clipped_to_the_blocks_of_a_group(validator: Validator) -> None:
    LIMITS[:] = [room(8, 21)]
    chat = ChatPrompt([{"role": "user", "content": "hi"}])
    one, four = [await resolve(validator, prompt=chat, n=n) for n in (1, 4)]
    prompt_len = len(four.prompt_ids)
    assert one.stopping.max_tokens == 20 * 16 - prompt_len
    assert GroupNeed(prompt_len, four.stopping.max_tokens, 4).blocks(KvRules(16)) <= 21
    assert GroupNeed(prompt_len, four.stopping.max_tokens + 1, 4).blocks(KvRules(16)) > 21
    LIMITS[:] = [room(8, 3)]
    assert (await refusal(validator, n=8)).startswith("n of 8, max_tokens 16 and")


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 40), st.sampled_from([8, 16, 64]), st.integers(1, 500))
def test_room_is_what_group_blocks_says(prompt_len: int, max_tokens: int, width: int, size: int, limit: int) -> None:
    fits = GroupNeed(prompt_len, max_tokens, width).blocks(KvRules(size)) <= limit
    assert fits == (max_tokens <= GroupRoom(64, limit, KvRules(size)).max_tokens(prompt_len, width, 400))


def test_an_unknown_floor_is_enough_for_every_group() -> None:
    unknown, need = GroupRoom(4, 0, KvRules(16)), GroupNeed(prompt_len=10**6, max_tokens=10**6, width=4)
    assert unknown.holds(need)
    assert unknown.max_tokens(need.prompt_len, need.width, need.max_tokens) == need.max_tokens


def test_limits_come_from_decode_workers_that_take_requests() -> None:
    decode = make_record("decode", "d0", max_num_seqs=4, max_group_blocks=30)
    records = [
        decode, replace(decode, worker_id="d1"), replace(decode, worker_id="d2", draining=True, max_num_seqs=9),
        make_record("prefill", "p0", max_num_seqs=99),
    ]  # fmt: skip
    assert rooms_of(records) == {"d0": room(4, 30), "d1": room(4, 30)}


def held_by_prefill(need: GroupNeed, rules: KvRules) -> int:
    """Returns the blocks of a group's windows, and of one chunk of one sequence: prefill cannot continue a group that
    has returned with fewer.
    """
    size, length = rules.block_size, need.prompt_len + need.max_tokens - 1
    shared, end, total = need.prompt_len // size, blocks_of(length, size), 0
    for group in rules.groups:
        window, everything = group.most_held(length, size), shared + need.width * (end - shared)
        chunk = group.most_held(length, size, rules.prefill_step) - window
        windows = min(need.width * window, min(shared, window) + need.width * min(end - shared, window))
        total += min(everything, windows + chunk)
    return total


WINDOWS = st.lists(st.one_of(st.none(), st.integers(1, 200)), min_size=1, max_size=4).map(tuple)


@given(WINDOWS, st.integers(1, 300), st.integers(1, 300), st.sampled_from([1, 4, 16]), st.integers(1, 8), st.data())
@example((101, 1, 31, 36), 16, 232, 4, 7, None)
def test_a_group_that_is_accepted_can_return_to_a_prefill_worker_with_any_step(
    windows: tuple[int | None, ...], step: int, decode_step: int, size: int, width: int, data: st.DataObject | None
) -> None:
    """The arena has only the floors of both workers. Decode's floor is set aside even though nothing runs there."""
    length = 58 * size
    prompt_len = 71 if data is None else data.draw(st.integers(1, length - 1))
    max_tokens = 16 if data is None else data.draw(st.integers(1, length - prompt_len))
    groups = tuple(map(Retention, windows))
    rules, of_decode = KvRules(size, groups, step), KvRules(size, groups, decode_step)
    decode = make_record(
        "decode", "d", max_model_len=length, block_size=size, kv_windows=windows, prefill_step=decode_step,
        max_group_blocks=floor_of("decode", length, of_decode),
    )  # fmt: skip
    accepted = rooms_of([decode, make_record("prefill", "p", prefill_step=step)])["d"]
    need = GroupNeed(prompt_len, max_tokens, width)
    if accepted.holds(need):
        assert held_by_prefill(need, rules) <= floor_of("prefill", length, rules)
    if data is None:
        assert GroupRoom.of(decode).holds(need), "decode alone would have accepted it"
        assert not accepted.holds(need)


PROMPT_LIMITS = PromptLimits(text_bytes=1000, fitting_bytes=1000, max_model_len=100)


@pytest.mark.parametrize(
    ("kind", "rest"),
    [(CompletionBody, b'"prompt":"x"'), (ChatBody, b'"messages":[{"role":"user","content":"x"}]')],
)
def test_bodies_take_the_fields_of_groups_and_no_others(kind: Any, rest: bytes) -> None:
    asked = b'{"n":2,"best_of":3,"use_beam_search":true,"length_penalty":0.6,"early_stopping":"never",' + rest + b"}"
    (wanted,) = parse_body(kind, asked, PROMPT_LIMITS).all_wanted()
    assert (wanted.n, wanted.best_of, wanted.use_beam_search, wanted.beam_width) == (2, 3, True, None)
    assert (wanted.length_penalty, wanted.early_stopping) == (0.6, "never")
    for unknown in (b'"beam_width":2', b'"num_beams":2'):
        with pytest.raises(InvalidArgument, match="is not a known field"):
            parse_body(kind, b"{" + unknown + b"," + rest + b"}", PROMPT_LIMITS)
    for wrong in (b'"n":"2"', b'"use_beam_search":"yes"', b'"length_penalty":"x"'):
        with pytest.raises(InvalidArgument, match="is invalid"):
            parse_body(kind, b"{" + wrong + b"," + rest + b"}", PROMPT_LIMITS)
