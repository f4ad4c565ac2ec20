"""The options of a generation and of an embedding, and their conversion to request messages.

This module checks the names of options: a misspelt name raises TypeError before anything is sent. The gateway checks
the values against its limits, and its error names the field.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypedDict, cast

from common import convert
from common.types import StructuredOutput
from protos.v1 import inference_pb2 as pb
from protos.v1 import types_pb2 as types_pb

Message = Mapping[str, str]
"""One turn of a chat: {"role": ..., "content": ...}."""
Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or the turns of a chat."""

_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "beam_width",
    "length_penalty",
)
_STOPPING = ("max_tokens", "min_tokens", "ignore_eos", "include_stop_str_in_output")


class GenerateOptions(TypedDict, total=False):
    """The options of `generate` and `chat`. An absent option uses the model's or the gateway's default."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str]
    """Words that the output may not contain."""
    allowed_token_ids: Sequence[int]
    """The only tokens that may be drawn."""
    seed: int
    logprobs: int
    """Number of most likely tokens whose log-probabilities are returned for each output token, in addition to the
    token's own.
    """
    prompt_logprobs: int
    n: int
    """Number of samples; in a beam search, the number of best beams to return. The samples share one computation of the
    prompt.
    """
    beam_width: int
    """Number of beams of a beam search, which looks for the most likely continuation instead of drawing tokens."""
    length_penalty: float
    """The sum of a beam's log-probabilities is divided by the beam's length to this power. The default is 1."""
    early_stopping: bool | Literal["never"]
    """The condition that ends a beam search, as in transformers."""
    structured_output: StructuredOutput
    """The grammar that the text must match: a JSON schema, any JSON object, a regular expression, a choice or a Lark
    grammar.
    """
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    truncate_prompt_tokens: int
    """Number of tokens to keep at the end of the prompt; -1 keeps as many as leave room for the output."""
    model: str
    request_id: str
    cache_salt: str
    """A salt. Requests with different salts do not share cached prefixes, except public ones."""
    priority: int
    """Lower numbers go first."""
    timeout: float
    """The time limit of the request in seconds. The default is the client's time limit."""


def check_names(options: Mapping[str, object], known: Collection[str] = GenerateOptions.__annotations__) -> None:
    """Checks the names of options. Raises TypeError for an unknown option. The message names the closest known option,
    or else all known options.
    """
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; the options are {', '.join(sorted(known))}"
            raise TypeError(f"unknown option {name!r}{hint}")


def given(options: GenerateOptions) -> GenerateOptions:
    """Returns the options that are not None. Raises TypeError for an unknown option."""
    check_names(cast(Mapping[str, object], options))
    return cast(GenerateOptions, {name: value for name, value in options.items() if value is not None})


def build_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """Returns the message for `prompt` and `options`. Raises TypeError for an unknown option or a value of the wrong
    type, and ValueError for a value that the field cannot represent.
    """
    options = given(options)
    request = pb.GenerateRequest()
    _set_prompt(request, prompt)
    values = cast(Mapping[str, object], options)
    for name in ("model", "request_id", "priority", "skip_special_tokens", "truncate_prompt_tokens"):
        _set(request, name, values)
    for name in _SAMPLING:
        _set(request.sampling, name, values)
    _set(request.sampling, "num_sequences", values, "n")
    _set_early_stopping(request, values)
    request.sampling.logit_bias.update(options.get("logit_bias", {}))
    request.sampling.bad_words.extend(options.get("bad_words", ()))
    if (allowed := options.get("allowed_token_ids")) is not None:
        request.sampling.allowed_token_ids.CopyFrom(types_pb.TokenSequence(ids=allowed))
    if (structured := options.get("structured_output")) is not None:
        request.sampling.structured_output.CopyFrom(convert.structured_to_pb(structured))
    for name in _STOPPING:
        _set(request.stopping, name, values)
    stop = options.get("stop", ())
    request.stopping.stop.extend([stop] if isinstance(stop, str) else stop)
    request.stopping.stop_token_ids.extend(options.get("stop_token_ids", ()))
    _set(request.cache, "cache_salt", values)
    return request


class EmbedOptions(TypedDict, total=False):
    """The options of `embed`."""

    dimensions: int
    """Number of leading dimensions to keep. The shortened vector is scaled to length 1 again."""
    truncate_prompt_tokens: int
    model: str
    request_id: str
    priority: int
    cache_salt: str
    timeout: float
    """The time limit of the request in seconds. The default is the client's time limit."""


def build_embed_request(text: str | Sequence[int], options: EmbedOptions) -> pb.EmbedRequest:
    """Returns the request for an embedding. Raises TypeError for an unknown option or a value of the wrong type, and
    ValueError for a value that the field cannot represent.
    """
    check_names(cast(Mapping[str, object], options), EmbedOptions.__annotations__)
    request, values = pb.EmbedRequest(), cast(Mapping[str, object], options)
    _set_text(request, text)
    for name in ("model", "request_id", "priority", "dimensions", "truncate_prompt_tokens"):
        _set(request, name, values)
    _set(request.cache, "cache_salt", values)
    return request


def _set(message: object, name: str, values: Mapping[str, object], option: str | None = None) -> None:
    """Fills the field `name` with the value of `option` (default: the option of the same name), unless the option is
    absent or None. Raises TypeError or ValueError if the field does not accept the value.
    """
    option = option or name
    value = values.get(option)
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"option {option!r}: {value!r} is not a valid value") from error


def _set_early_stopping(request: pb.GenerateRequest, values: Mapping[str, Any]) -> None:
    value = values.get("early_stopping")
    if value is None:
        return
    if not isinstance(value, bool) and value != "never":
        raise ValueError(f"option 'early_stopping': {value!r} is not a valid value (True, False or 'never')")
    request.sampling.early_stopping = convert.early_stopping_to_pb(value)


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping):
        request.chat.CopyFrom(chat_to_pb(cast(Sequence[Message], prompt)))
    else:
        _set_text(request, cast("str | Sequence[int]", prompt))


def _set_text(request: pb.GenerateRequest | pb.EmbedRequest, text: str | Sequence[int]) -> None:
    if isinstance(text, str):
        request.text = text
    else:
        request.token_ids.ids.extend(text)
        request.token_ids.SetInParent()


def chat_to_pb(messages: Sequence[Message]) -> pb.Chat:
    """Converts a chat to protobuf. Raises TypeError if the keys of a message are not exactly role and content."""
    turns = []
    for index, message in enumerate(messages):
        if set(message) != {"role", "content"}:
            raise TypeError(f"message {index} must have the keys 'role' and 'content'; it has {sorted(message)}")
        turns.append(pb.ChatMessage(role=message["role"], content=message["content"]))
    return pb.Chat(messages=turns)
