"""Defines the bodies of POST /v1/embeddings (OpenAI's API) and of POST /score (vLLM's API)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from common.errors import InvalidArgument
from gateway.api.openai_request import Body
from gateway.intake.limits import MAX_BATCH_PROMPTS
from gateway.intake.wanted import IdsPrompt, TextPrompt, Wanted

_IGNORED = ("user", "metadata", "service_tier", "safety_identifier")
_UNSUPPORTED: Mapping[str, Any] = {
    "messages": None, "normalize": True, "softmax": None, "activation": True, "use_activation": True, "task": None,
    "mm_processor_kwargs": {}, "instruction": None, "chat_template": None, "chat_template_kwargs": {},
    "embed_dtype": "float32", "endianness": "native",
}  # fmt: skip


class PooledBody(Body, kw_only=True):
    """The base class of embedding and score bodies, with their common fields."""

    ignored = frozenset(_IGNORED)
    unsupported: ClassVar[Mapping[str, Any]] = _UNSUPPORTED

    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None

    def _wanted(self, prompt: TextPrompt | IdsPrompt, name: str) -> Wanted:
        # A worker returns an embedding in place of the only token.
        wanted = Wanted(prompt=prompt, prompt_field=name, embeds=True, max_tokens=1)
        for field in PooledBody.__struct_fields__:
            setattr(wanted, field, getattr(self, field))
        return wanted


class EmbeddingBody(PooledBody, kw_only=True):
    """The body of POST /v1/embeddings."""

    input: Sequence[TextPrompt | IdsPrompt]
    """The texts. Clients send a string, a list of strings, a list of token ids, or a list of lists of token ids."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None

    def all_wanted(self) -> list[Wanted]:
        """Returns one request per text. Raises InvalidArgument if `dimensions` is less than 1."""
        if self.dimensions is not None and self.dimensions < 1:
            raise InvalidArgument.of("dimensions", f"must be at least 1, got {self.dimensions}")
        single = len(self.input) == 1
        names = ["input" if single else f"input[{index}]" for index in range(len(self.input))]
        return [self._wanted(prompt, name) for prompt, name in zip(self.input, names, strict=True)]


class ScoreBody(PooledBody, kw_only=True):
    """The body of POST /score."""

    text_1: str | list[str]
    text_2: str | list[str]

    def all_wanted(self) -> list[Wanted]:
        """Returns one request per text: those of `text_1`, then those of `text_2`. Raises InvalidArgument if the
        numbers of texts do not match or are not allowed.
        """
        first, second = self.num_texts
        if first not in (1, second):
            raise InvalidArgument.of("text_1", f"must hold one text, or as many as text_2, which has {second}")
        if not second:
            raise InvalidArgument.of("text_2", "must hold at least one text")
        if first + second > MAX_BATCH_PROMPTS:
            what = f"and text_1 must hold at most {MAX_BATCH_PROMPTS} texts together, got {first + second}"
            raise InvalidArgument.of("text_2", what)
        texts = [*_named("text_1", self.text_1), *_named("text_2", self.text_2)]
        return [self._wanted(TextPrompt(text), name) for name, text in texts]

    @property
    def num_texts(self) -> tuple[int, int]:
        """The numbers of texts in `text_1` and in `text_2`."""
        first, second = (1 if isinstance(text, str) else len(text) for text in (self.text_1, self.text_2))
        return first, second


def _named(name: str, texts: str | list[str]) -> Iterator[tuple[str, str]]:
    if isinstance(texts, str):
        yield name, texts
    else:
        yield from ((f"{name}[{index}]", text) for index, text in enumerate(texts))
