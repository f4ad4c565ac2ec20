"""Converts text to token ids and back, in a thread if the input is a chat or long. `tokenizers` releases the
interpreter lock while it works, so a thread is enough. Short texts are converted in the event loop, because a hand-over
to a thread would cost more than the work (about 0.3 ms per 1,000 characters).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tokenizers import Tokenizer

from common.errors import InvalidArgument
from gateway.intake.assets import ModelAssets
from gateway.intake.chat_template import ChatTemplate
from gateway.intake.wanted import ChatPrompt

T = TypeVar("T")
INLINE_CHARS = 512
INLINE_IDS = 256


def chat_templates(assets: ModelAssets) -> tuple[ChatTemplate | None, ChatTemplate | None]:
    """Returns the model's chat template and the template for requests with tools, which is usually the same one."""
    if assets.chat_template is None:
        return None, None
    plain = ChatTemplate(assets.chat_template, assets.special_tokens)
    if assets.tool_template is None:
        return plain, plain
    return plain, ChatTemplate(assets.tool_template, assets.special_tokens)


class TokenizerPool:
    """The model's tokenizer and chat template, with a pool of threads for chats and long inputs."""

    def __init__(self, assets: ModelAssets, num_threads: int) -> None:
        self._tokenizer: Tokenizer = assets.tokenizer
        self._template, self._tool_template = chat_templates(assets)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of a text whose length has been checked."""
        if len(text) <= INLINE_CHARS:
            return self._encode(text, add_special_tokens)
        return await self.in_thread(lambda: self._encode(text, add_special_tokens))

    async def encode_chat(self, prompt: ChatPrompt, *, add_special_tokens: bool) -> tuple[str, list[int]]:
        """Returns the prompt text and token ids of a conversation. Raises InvalidArgument if there is no template, or
        if the template cannot render the conversation.
        """
        template = self._tool_template if prompt.tools else self._template
        if template is None:
            raise InvalidArgument.of("messages", "cannot be used: this model has no chat template; use a completion")

        def work() -> tuple[str, list[int]]:
            text = template.render(
                prompt.messages,
                tools=prompt.tools,
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
                variables=prompt.variables,
            )
            return text, self._encode(text, add_special_tokens)

        return await self.in_thread(work)

    async def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids that are in the vocabulary, without special tokens."""
        if len(ids) <= INLINE_IDS:
            return self._decode(ids)
        return await self.in_thread(lambda: self._decode(ids))

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
