"""Converts vLLM's requests into a `Wanted`. The error for unsupported fields of a GenerateRequest names the fields.

Absent numbers have the same meaning as in vLLM's own server: proto3's 0 means "not given" for top_p, repetition_penalty
and n. The model's generation config does not apply, because the router has applied it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from smg_grpc_proto import vllm_engine_pb2 as pb

from common.errors import FieldViolation, InvalidArgument
from common.types import StructuredOutput
from gateway.intake.wanted import IdsPrompt, Prompt, TextPrompt, Wanted

HEAD_START = "looseleaf_head_start"
"""The field of `kv_transfer_params_json` that names a prefill."""
_MESSAGES = ("mm_inputs", "media_refs", "kv_transfer_params", "data_parallel_rank")
_PRESENT = ("logprobs", "prompt_logprobs", "seed", "truncate_prompt_tokens", "max_tokens")
_PLAIN = (
    "top_k", "min_p", "frequency_penalty", "presence_penalty", "min_tokens", "ignore_eos", "skip_special_tokens",
    "include_stop_str_in_output",
)  # fmt: skip
_GRAMMARS: Mapping[str, Callable[[pb.SamplingParams], StructuredOutput]] = {
    "json_schema": lambda params: StructuredOutput("json_schema", params.json_schema),
    "regex": lambda params: StructuredOutput("regex", params.regex),
    "grammar": lambda params: StructuredOutput("lark", params.grammar),
    "json_object": lambda params: StructuredOutput("json_object"),
    "choice": lambda params: StructuredOutput("choice", options=tuple(params.choice.choices)),
}


def wanted_of(request: pb.GenerateRequest) -> Wanted:
    """Converts a request, whose values the validator checks later. Raises InvalidArgument for unsupported fields, which
    the error names.
    """
    params = request.sampling_params
    _refuse_unsupported(request)
    wanted = Wanted(
        prompt=_prompt(request),
        prompt_field="input",
        request_id=request.request_id or None,
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p or 1.0,
        repetition_penalty=params.repetition_penalty or 1.0,
        n=params.n or 1,
        stop=list(params.stop),
        stop_token_ids=list(params.stop_token_ids),
        logit_bias=list(params.logit_bias.items()),
        fills_context=True,
    )
    for name in _PLAIN:
        setattr(wanted, name, getattr(params, name))
    for name in _PRESENT:
        if params.HasField(name):  # type: ignore[arg-type]
            setattr(wanted, name, getattr(params, name))
    which = params.WhichOneof("constraint")
    if which is not None and (which != "json_object" or params.json_object):
        wanted.structured, wanted.structured_field = _GRAMMARS[which](params), which
    return wanted


def embed_wanted_of(request: pb.EmbedRequest) -> Wanted:
    """Converts a request for an embedding, whose values the validator checks later."""
    prompt = IdsPrompt(request.tokenized.input_ids) if request.HasField("tokenized") else None
    request_id = request.request_id or None
    return Wanted(prompt=prompt, prompt_field="tokenized", request_id=request_id, embeds=True, max_tokens=1)


def first_token_only(wanted: Wanted) -> None:
    """Changes a router's prefill request so that decode can continue from its first tokens.

    The router has replaced `max_tokens` and `ignore_eos` with its own values, so prefill must not end any sample.
    Decode gets the client's values and applies them to the first tokens. Prefill still needs `min_tokens`, which masks
    the stop tokens.
    """
    wanted.max_tokens, wanted.fills_context, wanted.stop = None, False, ()
    wanted.min_tokens = min(1, wanted.min_tokens or 0)
    wanted.ignore_eos = not wanted.min_tokens and wanted.structured is None
    if not wanted.min_tokens:
        wanted.stop_token_ids = ()


def head_start_of(request: pb.GenerateRequest) -> str | None:
    """Returns the name of the prefill in a request, or None if the request names none. Raises InvalidArgument if
    `kv_transfer_params_json` is not empty and names no prefill.
    """
    text = request.kv_transfer_params_json
    if not text:
        return None
    try:
        name = json.loads(text)[HEAD_START]
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        name = None
    if not isinstance(name, str):
        raise InvalidArgument.of(
            "kv_transfer_params_json", f"must be an object with {HEAD_START}, as prefill returned it"
        )
    return name


def head_start_json(name: str) -> str:
    """Returns the `kv_transfer_params_json` that names a prefill."""
    return json.dumps({HEAD_START: name})


def _prompt(request: pb.GenerateRequest) -> Prompt | None:
    which = request.WhichOneof("input")
    if which == "tokenized":
        return IdsPrompt(request.tokenized.input_ids)
    return TextPrompt(request.text) if which == "text" else None


def _refuse_unsupported(request: pb.GenerateRequest) -> None:
    given = [name for name in _MESSAGES if request.HasField(name)]  # type: ignore[arg-type]
    given += ["extra_mm_inputs"] if request.extra_mm_inputs else []
    given += ["structural_tag"] if request.sampling_params.HasField("structural_tag") else []
    if given:
        violations = tuple(FieldViolation(name, "is not supported") for name in given)
        raise InvalidArgument(f"{', '.join(given)}: not supported", violations=violations)
