"""Defines two clients of the gateway over gRPC. `Client` is blocking, `AsyncClient` is for asyncio, and both can
stream.

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_tokens=32).text)
        for delta in client.generate("Once upon a time", stream=True):
            print(delta.text, end="")
        for sample in client.generate("Once upon a time", n=4).samples:
            print(sample.text)

With `n` or `beam_width`, a stream contains deltas of several samples, and `delta.index` is the sample's number.

A call that is refused or fails raises a subclass of `LooseleafError`. Closing a stream early cancels the request at the
gateway. A stream is closed by its `close` or `aclose`, or by garbage collection, as after a `break`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, Unpack, cast, overload

import grpc
import grpc.aio

from common.certificates import front_credentials
from common.errors import Unavailable
from common.rpc import CHANNEL_OPTIONS, open_channel
from common.status import error_of
from looseleaf.explanation import Explanation, explanation_from_pb
from looseleaf.options import (
    EmbedOptions,
    GenerateOptions,
    Message,
    Prompt,
    build_embed_request,
    build_request,
    chat_to_pb,
    given,
)
from looseleaf.results import (
    Completion,
    Delta,
    Embedding,
    ModelInfo,
    delta_from_pb,
    embedding_from_pb,
    join,
    model_from_pb,
)
from protos.v1 import inference_pb2 as pb
from protos.v1 import inference_pb2_grpc as pb_grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"


class _Base:
    """The base class of both clients, with the address, the credentials and the time limit."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        tls_ca: str | Path | None = None,
    ) -> None:
        """`address` is the gateway's host:port. `timeout`, in seconds, limits each call that has no timeout of its own.
        `tls_ca` is a PEM file with the CA of the gateway's certificate, and enables TLS.
        """
        self.address = address
        self._timeout = timeout
        self._credentials = None if tls_ca is None else front_credentials(tls_ca)
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key is not None else ()

    def _call(self, options: GenerateOptions) -> dict[str, Any]:
        return {"timeout": given(options).get("timeout", self._timeout), "metadata": self._metadata}

    def _error(self, error: grpc.RpcError) -> Exception:
        mapped = error_of(error)
        if not isinstance(mapped, Unavailable) or "failed to connect" not in mapped.message:
            return mapped
        if "Failed to connect to remote host" in mapped.message:
            return Unavailable(f"nothing answers at {self.address}; `looseleaf serve` starts a server")
        reason = mapped.message.rpartition("last error: ")[2]  # such as that of a TLS handshake
        return Unavailable(f"cannot connect to {self.address}: {reason}")


class Client(_Base):
    """A blocking client with one connection. It is safe to use from several threads."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        tls_ca: str | Path | None = None,
    ) -> None:
        super().__init__(address, api_key=api_key, timeout=timeout, tls_ca=tls_ca)
        if self._credentials is None:
            self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, self._credentials, options=CHANNEL_OPTIONS)
        self._stub = cast(Any, pb_grpc.InferenceServiceStub)(self._channel)

    @overload
    def generate(
        self, prompt: Prompt, *, stream: Literal[False] = False, **options: Unpack[GenerateOptions]
    ) -> Completion: ...
    @overload
    def generate(
        self, prompt: Prompt, *, stream: Literal[True], **options: Unpack[GenerateOptions]
    ) -> Iterator[Delta]: ...
    def generate(
        self, prompt: Prompt, *, stream: bool = False, **options: Unpack[GenerateOptions]
    ) -> Completion | Iterator[Delta]:
        """Returns the continuation of a prompt (text, token ids, or chat turns) or, with `stream`, an iterator of its
        deltas.
        """
        deltas = self._deltas(build_request(prompt, options), options)
        return deltas if stream else join(deltas)

    @overload
    def chat(
        self, messages: str | Sequence[Message], *, stream: Literal[False] = False, **options: Unpack[GenerateOptions]
    ) -> Completion: ...
    @overload
    def chat(
        self, messages: str | Sequence[Message], *, stream: Literal[True], **options: Unpack[GenerateOptions]
    ) -> Iterator[Delta]: ...
    def chat(
        self, messages: str | Sequence[Message], *, stream: bool = False, **options: Unpack[GenerateOptions]
    ) -> Completion | Iterator[Delta]:
        """Returns the assistant's next turn after `messages`, or, with `stream`, an iterator of its deltas. A string
        counts as one user turn.
        """
        deltas = self._deltas(build_request(turns_of(messages), options), options)
        return deltas if stream else join(deltas)

    def embed(self, text: str | Sequence[int], **options: Unpack[EmbedOptions]) -> Embedding:
        """Returns the embedding of a text or of token ids."""
        request = build_embed_request(text, options)
        return embedding_from_pb(self._unary(self._stub.Embed, request, options.get("timeout")))

    def tokenize(self, text: str | Sequence[Message], *, add_special_tokens: bool | None = None) -> tuple[int, ...]:
        """Returns the token ids of a text, or of chat turns in the chat template. By default, special tokens are added
        to a text but not to chat turns.
        """
        reply = self._unary(self._stub.Tokenize, tokenize_request(text, add_special_tokens))
        return tuple(reply.token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Returns the text of token ids, without special tokens."""
        return str(self._unary(self._stub.Detokenize, pb.DetokenizeRequest(token_ids=token_ids)).text)

    def models(self) -> tuple[ModelInfo, ...]:
        """Returns the models that the gateway serves."""
        return tuple(map(model_from_pb, self._unary(self._stub.ListModels, pb.ListModelsRequest()).models))

    def explain(self, request_id: str | None = None, *, limit: int = 100) -> tuple[Explanation, ...]:
        """Returns the explanations of at most `limit` requests, newest first: of those with this id or, without an id,
        of all recent requests.
        """
        reply = self._unary(self._stub.Explain, pb.ExplainRequest(request_id=request_id, limit=limit))
        return tuple(map(explanation_from_pb, reply.explanations))

    def close(self) -> None:
        """Closes the connection. Running calls are cancelled."""
        self._channel.close()

    def _unary(self, method: Any, request: Any, timeout: float | None = None) -> Any:
        try:
            return method(request, timeout=timeout or self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._error(error) from None

    def _deltas(self, request: pb.GenerateRequest, options: GenerateOptions) -> Iterator[Delta]:
        call = self._stub.Generate(request, **self._call(options))
        try:
            for message in call:
                yield delta_from_pb(message)
        except grpc.RpcError as error:
            raise self._error(error) from None
        finally:
            call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(_Base):
    """An asyncio client with one connection: `await client.generate(...)`, `async for delta in client.stream(...)`."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        tls_ca: str | Path | None = None,
    ) -> None:
        super().__init__(address, api_key=api_key, timeout=timeout, tls_ca=tls_ca)
        if self._credentials is None:
            self._channel = open_channel(address)
        else:
            self._channel = grpc.aio.secure_channel(address, self._credentials, options=CHANNEL_OPTIONS)
        self._stub = cast(Any, pb_grpc.InferenceServiceStub)(self._channel)

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Returns the continuation of a prompt (text, token ids, or chat turns)."""
        return join([delta async for delta in self.stream(prompt, **options)])

    async def chat(self, messages: str | Sequence[Message], **options: Unpack[GenerateOptions]) -> Completion:
        """Returns the assistant's next turn after `messages`. A string counts as one user turn."""
        return await self.generate(turns_of(messages), **options)

    async def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncIterator[Delta]:
        """Yields the deltas of a continuation as they arrive."""
        call = self._stub.Generate(build_request(prompt, options), **self._call(options))
        try:
            async for message in call:
                yield delta_from_pb(message)
        except grpc.RpcError as error:
            raise self._error(error) from None
        finally:
            call.cancel()

    async def embed(self, text: str | Sequence[int], **options: Unpack[EmbedOptions]) -> Embedding:
        """Returns the embedding of a text or of token ids."""
        request = build_embed_request(text, options)
        return embedding_from_pb(await self._unary(self._stub.Embed, request, options.get("timeout")))

    async def tokenize(
        self, text: str | Sequence[Message], *, add_special_tokens: bool | None = None
    ) -> tuple[int, ...]:
        """Returns the token ids of a text, or of chat turns in the chat template. By default, special tokens are added
        to a text but not to chat turns.
        """
        reply = await self._unary(self._stub.Tokenize, tokenize_request(text, add_special_tokens))
        return tuple(reply.token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Returns the text of token ids, without special tokens."""
        return str((await self._unary(self._stub.Detokenize, pb.DetokenizeRequest(token_ids=token_ids))).text)

    async def models(self) -> tuple[ModelInfo, ...]:
        """Returns the models that the gateway serves."""
        reply = await self._unary(self._stub.ListModels, pb.ListModelsRequest())
        return tuple(map(model_from_pb, reply.models))

    async def explain(self, request_id: str | None = None, *, limit: int = 100) -> tuple[Explanation, ...]:
        """Returns the explanations of at most `limit` requests, newest first: of those with this id or, without an id,
        of all recent requests.
        """
        reply = await self._unary(self._stub.Explain, pb.ExplainRequest(request_id=request_id, limit=limit))
        return tuple(map(explanation_from_pb, reply.explanations))

    async def close(self) -> None:
        """Closes the connection. Running calls are cancelled."""
        await self._channel.close()

    async def _unary(self, method: Any, request: Any, timeout: float | None = None) -> Any:
        try:
            return await method(request, timeout=timeout or self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._error(error) from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def turns_of(messages: str | Sequence[Message]) -> Sequence[Message]:
    """Returns `messages` as chat turns. A string counts as one user turn."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def tokenize_request(text: str | Sequence[Message], add_special_tokens: bool | None) -> pb.TokenizeRequest:
    request = pb.TokenizeRequest(add_special_tokens=add_special_tokens)
    if isinstance(text, str):
        request.text = text
    else:
        request.chat.CopyFrom(chat_to_pb(text))
    return request
