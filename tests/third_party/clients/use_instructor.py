"""`instructor`: structured output in each of its modes."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field
from tried import MODEL, TOOLS_URL, URL, run, works

ASK: Any = [{"role": "user", "content": "Who is the hero?"}]


class Hero(BaseModel):
    """The hero of a story."""

    model_config = ConfigDict(extra="forbid")  # otherwise a small model adds fields until max_tokens
    name: str = Field(max_length=12)
    kind: Literal["fox", "wolf"]


def client(mode: instructor.Mode, url: str = URL) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)


def hero(mode: instructor.Mode, url: str = URL, **fields: Any) -> Hero:
    made = client(mode, url).chat.completions.create(
        model=MODEL, messages=ASK, response_model=Hero, max_tokens=200, temperature=0, max_retries=1, **fields
    )
    assert isinstance(made, Hero)
    return made


@works("mode JSON_SCHEMA")
def json_schema() -> None:
    hero(instructor.Mode.JSON_SCHEMA)


@works("mode TOOLS")
def tools() -> None:
    hero(instructor.Mode.TOOLS, TOOLS_URL)


@works("mode TOOLS_STRICT")
def strict() -> None:
    hero(instructor.Mode.TOOLS_STRICT, TOOLS_URL)


@works(
    "mode JSON with an explicit schema (extra_body)",
    "mode JSON alone allows any object: the model must know the fields",
)
def with_schema() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "hero", "schema": Hero.model_json_schema()}}
    hero(instructor.Mode.JSON, extra_body={"response_format": schema})


@works("create_partial: a streamed object")
def partial() -> None:
    stream = client(instructor.Mode.JSON_SCHEMA).chat.completions.create_partial(
        model=MODEL, messages=ASK, response_model=Hero, max_tokens=200, temperature=0
    )
    assert list(stream)[-1].kind in ("fox", "wolf")


@works("a list of objects")
def several() -> None:
    class Heroes(BaseModel):
        model_config = ConfigDict(extra="forbid")
        heroes: list[Hero] = Field(min_length=2, max_length=2)

    made = client(instructor.Mode.JSON_SCHEMA).chat.completions.create(
        model=MODEL, messages=ASK, response_model=Heroes, max_tokens=300, temperature=0, max_retries=1
    )
    assert len(made.heroes) == 2


run()
