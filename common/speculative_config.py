"""Defines the value of `--speculative-config`, a JSON object with vLLM's names (docs/speculation.md)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

MAX_DRAFT_TOKENS = 32
MAX_LOOKUP = 16
DEFAULT_LOOKUP = 5
"""vLLM's default for `prompt_lookup_max` and `prompt_lookup_min`."""
DEFAULT_KV_SPACE = 0.5
"""Default for `kv_space`, in GiB."""


class SpeculativeConfig(BaseModel):
    """The settings of a decode worker's speculation."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    method: Literal["ngram", "draft_model"]
    num_speculative_tokens: int = Field(ge=1, le=MAX_DRAFT_TOKENS)
    """Maximum number of draft tokens that a step verifies for a sequence."""
    prompt_lookup_max: int | None = Field(None, ge=1, le=MAX_LOOKUP)
    prompt_lookup_min: int | None = Field(None, ge=1, le=MAX_LOOKUP)
    model: str | None = Field(None, min_length=1)
    """Directory of the draft model."""
    kv_space: float | None = Field(None, gt=0)
    """Maximum size, in GiB, of the draft model's keys and values. This field is ours; vLLM has none for it."""

    @property
    def longest(self) -> int:
        """The length of the longest n-gram that is looked up."""
        return self.prompt_lookup_max or self.prompt_lookup_min or DEFAULT_LOOKUP

    @property
    def shortest(self) -> int:
        """The length of the shortest n-gram that is looked up."""
        return self.prompt_lookup_min or self.longest

    @property
    def kv_space_bytes(self) -> int:
        """Maximum size, in bytes, of the draft model's keys and values."""
        return int((DEFAULT_KV_SPACE if self.kv_space is None else self.kv_space) * 2**30)

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        lookup, draft = ("prompt_lookup_max", "prompt_lookup_min"), ("model", "kv_space")
        for name in draft if self.method == "ngram" else lookup:
            if getattr(self, name) is not None:
                raise ValueError(f"{name} does not apply to method {self.method}")
        if self.method == "draft_model" and self.model is None:
            raise ValueError("method draft_model requires model, the directory of the draft model")
        if self.shortest > self.longest:
            raise ValueError(f"prompt_lookup_min must be at most prompt_lookup_max, which is {self.longest}")
        return self

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses a JSON object. If the object is invalid, raises ValueError with a message that gives the reason and,
        if the error belongs to a field, names the field.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            found = error.errors()[0]
            where = ".".join(map(str, found["loc"]))
            raise ValueError(f"{where + ': ' if where else ''}{found['msg']}") from None


def _check(text: str | None) -> str | None:
    if text is not None:
        SpeculativeConfig.parse(text)
    return text


SpeculativeConfigText = Annotated[str | None, AfterValidator(_check)]
"""The type of a setting whose value is the JSON text of a `SpeculativeConfig`, or None for no speculation."""
SPECULATIVE_CONFIG = (
    "JSON object; verifies several predicted tokens in a step where that pays, without changing a token: "
    '{"method": "ngram", "num_speculative_tokens": 7} or '
    '{"method": "draft_model", "model": DIRECTORY, "num_speculative_tokens": 3}; default: off'
)
