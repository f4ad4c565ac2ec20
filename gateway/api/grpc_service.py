"""The gRPC InferenceService. It converts requests into `Wanted`, and deltas into responses. It makes no policy
decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

from common import convert
from common.errors import InvalidArgument, LooseleafError
from common.guard import Check, Context
from common.request_ids import HEADER, take_request_id
from common.types import EarlyStopping
from gateway.admission.admission import Admission, Entry
from gateway.api.credentials import Authenticator
from gateway.api.embedding_reply import shortened
from gateway.api.front import Front
from gateway.api.http_explain import DEFAULT_LIMIT, explain
from gateway.intake.limits import RANGES
from gateway.intake.resolved_request import ResolvedRequest
from gateway.intake.wanted import ChatPrompt, IdsPrompt, Prompt, TextPrompt, Wanted
from gateway.request.delta import Delta
from gateway.request.explanation import usage_to_pb
from gateway.request.outlet import Outlet, Write
from protos.v1 import inference_pb2 as pb
from protos.v1 import inference_pb2_grpc

STALLED_CLIENT_S = 5.0
"""How long after its deadline, in seconds, a request may still wait for a client that does not read."""


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """The gRPC service that clients call."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._assets = front.assets
        self._authenticator = front.authenticator
        self._admission = front.admission
        self._validator = front.validator
        self._runner = front.runner
        self._adapters = front.adapters

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        with admitted(self._front, context) as entry:
            resolved = await self._resolved(wanted_of(request), entry, context)
            await self._run(resolved, _Messages(resolved.request_id, context).write)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        with admitted(self._front, context) as entry:
            resolved = await self._resolved(embed_wanted_of(request), entry, context)
            deltas: list[Delta] = []
            await self._run(resolved, deltas.extend)
            found = deltas[-1]
            dimensions = request.dimensions if request.HasField("dimensions") else None
            return embed_response_of(resolved.request_id, found, shortened(found.embedding, dimensions))

    async def _resolved(self, wanted: Wanted, entry: Entry, context: Context) -> ResolvedRequest:
        wanted.timeout_s = time_left(context)
        resolved = await self._validator.resolve(wanted, entry.tenant)
        entry.take([resolved])
        return resolved

    async def _run(self, request: ResolvedRequest, write: Write) -> None:
        in_time = self._admission.answers.within(request.timeout_s + STALLED_CLIENT_S)
        async with Outlet(write) as outlet, in_time:
            await self._runner.run(request, outlet)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        self._authenticator.tenant(authorization(context))
        self._validator.check_model(request.model)
        name, prompt = _prompt_of(request, request.WhichOneof("input"))
        special = request.add_special_tokens if request.HasField("add_special_tokens") else None
        ids = await self._validator.tokenize(prompt, name, add_special_tokens=special)
        return pb.TokenizeResponse(token_ids=ids, max_model_len=self._validator.checker().max_model_len)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        self._authenticator.tenant(authorization(context))
        self._validator.check_model(request.model)
        return pb.DetokenizeResponse(text=await self._validator.detokenize(request.token_ids, "token_ids"))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        self._authenticator.tenant(authorization(context))
        base, max_model_len = self._assets.name, self._validator.checker().max_model_len
        names = [(base, ""), *((ref.name, base) for ref in self._adapters.served)]
        models = [
            pb.Model(
                id=name,
                max_model_len=max_model_len,
                vocab_size=self._assets.vocab_size,
                eos_token_ids=self._assets.eos_token_ids,
                pooling=self._validator.pooling,
                parent=parent,
            )
            for name, parent in names
        ]
        return pb.ListModelsResponse(models=models)

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        tenant = self._authenticator.tenant(authorization(context))
        request_id = request.request_id if request.HasField("request_id") else None
        limit = request.limit if request.HasField("limit") else DEFAULT_LIMIT
        return explain(self._runner.explanations, tenant, request_id, limit)


@contextmanager
def admitted(front: Front, context: Context) -> Iterator[Entry]:
    """A context manager that authenticates the caller and admits a request. It counts every LooseleafError of both
    steps and of the `with` block, by status code.
    """
    try:
        with front.admission.enter(front.authenticator.tenant(authorization(context))) as entry:
            yield entry
    except LooseleafError as error:
        front.metrics.failed(error.grpc_code)
        raise


class _Messages:
    """A writer that sends one request's deltas as messages."""

    __slots__ = ("_request_id", "_write")

    def __init__(self, request_id: str, context: Context) -> None:
        self._request_id = request_id
        self._write = context.write

    def write(self, deltas: list[Delta]) -> Any:
        if len(deltas) == 1:
            return self._write(response_of(self._request_id, deltas[0]))
        return self._write_all(deltas)

    async def _write_all(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            await self._write(response_of(self._request_id, delta))


def key_check(
    authenticator: Authenticator,
    admission: Admission | None = None,
    failed: Callable[[str], None] = lambda code: None,
) -> Check:
    """Returns a check of a call's API key, which runs before a message is received. For Generate and Embed, the check
    also asks `admission` whether a request may be admitted now. `failed` counts the refusals of `admission` by status
    code. gRPC's own services (health and reflection) need no key. The check adds the request id to the call's trailing
    metadata.
    """

    def check(method: str, context: Context) -> None:
        context.set_trailing_metadata(((HEADER, take_request_id(_metadata(context, HEADER))),))
        if not method.startswith("/grpc."):
            tenant = authenticator.tenant(authorization(context), address_of(context.peer()))
            if admission is not None and method.endswith(("/Generate", "/Embed")):
                try:
                    admission.check(tenant)
                except LooseleafError as error:
                    failed(error.grpc_code)
                    raise

    return check


def address_of(peer: str) -> str:
    """Returns a peer's address without its port. Peers look like "ipv4:10.0.0.1:4711" or "ipv6:%5B::1%5D:4711"."""
    _, _, host = peer.rpartition(":")[0].partition(":")
    return unquote(host).strip("[]")


def authorization(context: Context) -> str | None:
    """Returns the caller's Authorization header, or None if there is none."""
    return _metadata(context, "authorization")


def _metadata(context: Context, name: str) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == name:
            return value if isinstance(value, str) else value.decode("latin-1")
    return None


def time_left(context: Context) -> float | None:
    """Returns the seconds until the client's deadline, or None if there is no deadline or it is later than the longest
    timeout allowed. Without a deadline, grpc.aio returns None or a very large time.
    """
    left = context.time_remaining()
    return None if left is None or left > RANGES["timeout"].high else left


def _prompt_of(message: Any, which: str | None) -> tuple[str, Prompt | None]:
    """Returns the name of the field that contains a message's prompt, and the prompt. `which` names the field that is
    set (text, token_ids or chat). If it is None, the prompt is None.
    """
    if which == "text":
        return "text", TextPrompt(message.text)
    if which == "token_ids":
        return "token_ids", IdsPrompt(message.token_ids.ids)
    if which == "chat":
        return "chat.messages", ChatPrompt([{"role": m.role, "content": m.content} for m in message.chat.messages])
    return "prompt", None


def wanted_of(request: pb.GenerateRequest) -> Wanted:
    """Converts a message to a request. Absent optional fields stay None.

    Raises InvalidArgument for an unknown `early_stopping` value. The validator checks the other fields.
    """
    sampling, stopping = request.sampling, request.stopping
    wanted = Wanted(
        logit_bias=list(sampling.logit_bias.items()),
        bad_words=list(sampling.bad_words),
        stop=list(stopping.stop),
        stop_token_ids=list(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
        include_stop_str_in_output=stopping.include_stop_str_in_output,
    )
    wanted.prompt_field, wanted.prompt = _prompt_of(request, request.WhichOneof("prompt"))
    for message, names in (
        (request, ("request_id", "model", "priority", "skip_special_tokens", "truncate_prompt_tokens")),
        (sampling, _SAMPLING),
        (stopping, _STOPPING),
    ):
        for name in names:
            if message.HasField(name):  # type: ignore[attr-defined]
                setattr(wanted, name, getattr(message, name))
    if sampling.HasField("num_sequences"):
        wanted.n = sampling.num_sequences
    if sampling.HasField("early_stopping"):
        wanted.early_stopping = _early_stopping(sampling.early_stopping)
    if sampling.HasField("allowed_token_ids"):
        wanted.allowed_token_ids = list(sampling.allowed_token_ids.ids)
    if sampling.HasField("structured_output"):
        wanted.structured = convert.structured_from_pb(sampling.structured_output)
    if request.cache.HasField("cache_salt"):
        wanted.cache_salt = request.cache.cache_salt
    return wanted


def embed_wanted_of(request: pb.EmbedRequest) -> Wanted:
    """Converts a message to a request, which the validator checks later."""
    wanted = Wanted(embeds=True, max_tokens=1)
    wanted.prompt_field, wanted.prompt = _prompt_of(request, request.WhichOneof("input"))
    for name in ("request_id", "model", "priority", "truncate_prompt_tokens"):
        if request.HasField(name):  # type: ignore[arg-type]
            setattr(wanted, name, getattr(request, name))
    if request.cache.HasField("cache_salt"):
        wanted.cache_salt = request.cache.cache_salt
    return wanted


_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "logprobs", "prompt_logprobs", "beam_width", "length_penalty",
)  # fmt: skip
_STOPPING = ("max_tokens", "min_tokens")


def _early_stopping(value: int) -> EarlyStopping:
    try:
        return convert.early_stopping_from_pb(value)
    except KeyError:
        what = f"must be one of BeamStopping's values, got {value}"
        raise InvalidArgument.of("early_stopping", what) from None


def response_of(request_id: str, delta: Delta) -> pb.GenerateResponse:
    if delta.is_plain:
        return pb.GenerateResponse(
            request_id=request_id, index=delta.index, text_delta=delta.text, token_ids=delta.token_ids
        )
    message = pb.GenerateResponse(
        request_id=request_id,
        index=delta.index,
        text_delta=delta.text,
        token_ids=delta.token_ids,
        logprobs=delta.logprobs,
        beam_score=delta.beam_score,
    )
    if delta.prompt_logprobs:
        message.prompt_logprobs.extend(delta.prompt_logprobs)
    if delta.finish_reason is not None:
        message.finish_reason = convert.finish_reason_to_pb(delta.finish_reason)
        if delta.stop_string is not None:
            message.stop_string = delta.stop_string
        elif delta.stop_token_id is not None:
            message.stop_token_id = delta.stop_token_id
    if delta.summary is not None:
        message.usage.CopyFrom(usage_to_pb(delta.summary))
        message.timings.CopyFrom(convert.timings_to_pb(delta.summary.timings))
    return message


def embed_response_of(request_id: str, delta: Delta, embedding: Sequence[float]) -> pb.EmbedResponse:
    assert delta.summary is not None  # contained in the only delta
    timings = convert.timings_to_pb(delta.summary.timings)
    return pb.EmbedResponse(
        request_id=request_id, embedding=embedding, usage=usage_to_pb(delta.summary), timings=timings
    )
