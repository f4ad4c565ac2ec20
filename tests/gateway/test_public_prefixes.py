"""The public part of a prompt, and the errors of an invalid file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import StartupError
from gateway.intake.public_prefixes import PublicPrefixes, load_public_prefixes
from gateway.intake.wanted import ChatPrompt, Prompt, TextPrompt, Wanted
from tests.gateway.conftest import MakeRig


def test_as_much_is_public_as_a_prompt_has_in_common_with_the_best_prefix() -> None:
    public = PublicPrefixes([[1, 2, 3, 4], [1, 2, 9], [7]])
    assert [public.common_tokens(ids) for ids in ([1, 2, 3, 4, 5], [1, 2, 3, 8], [1, 2, 9], [7, 1], [8], [])] == [
        4, 3, 3, 1, 0, 0,
    ]  # fmt: skip
    assert PublicPrefixes().common_tokens([1, 2]) == 0


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read as JSON"),
        ("[", "cannot be read as JSON"),
        ("{}", "must be a JSON array that is not empty"),
        ("[]", "must be a JSON array that is not empty"),
        ('["x", ""]', "item 1: must be a text, or an array of"),
        ('["x", 5]', "item 1: must be a text"),
        ('[[{"role": "system"}]]', "item 0: must be a text"),
        ('[[{"role": "tool", "content": "x"}]]', "item 0: .*no tools here"),
    ],
)
async def test_a_bad_file_is_named(make_rig: MakeRig, tmp_path: Path, content: str | None, sentence: str) -> None:
    rig, path = await make_rig(), tmp_path / "public.json"
    if content is not None:
        path.write_text(content)

    async def tokenize(prompt: Prompt, name: str) -> list[int]:
        return await rig.validator.tokenize(prompt, name, add_special_tokens=None)

    with pytest.raises(StartupError, match=sentence) as refused:
        await load_public_prefixes(str(path), tokenize)
    assert str(path) in str(refused.value)


async def test_prompts_and_conversations_that_begin_so_are_public_so_far(make_rig: MakeRig, tmp_path: Path) -> None:
    rig, path = await make_rig(), tmp_path / "public.json"
    system = {"role": "system", "content": "the wind was strong when the mill turned"}
    path.write_text(json.dumps(["the old mill stood still", [system]]))

    async def tokenize(prompt: Prompt, name: str) -> list[int]:
        return await rig.validator.tokenize(prompt, name, add_special_tokens=None)

    rig.validator.use_public((await load_public_prefixes(str(path), tokenize)).common_tokens)

    async def public(prompt: Prompt, tenant: str = "a", **more: Any) -> tuple[int, int]:
        resolved = await rig.validator.resolve(Wanted(prompt=prompt, **more), tenant)
        return resolved.public_tokens, len(resolved.prompt_ids)

    text_len = len(await tokenize(TextPrompt("the old mill stood still"), ""))
    found, whole = await public(TextPrompt("the old mill stood still when it was not"))
    assert text_len - 1 <= found <= text_len < whole
    found, whole = await public(ChatPrompt([system, {"role": "user", "content": "mill?"}]))
    assert 8 < found < whole
    assert (await public(TextPrompt("xyz")))[0] <= 1, "what every prompt begins with"
    assert (await public(TextPrompt("the old mill stood still"), cache_salt="mine"))[0] == 0
    assert (await public(TextPrompt("the old mill stood still"), tenant=""))[0] == 0
