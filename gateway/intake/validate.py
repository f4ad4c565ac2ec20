"""Turns a client's request into a request for workers: it checks the limits and fills in the defaults.

Every protocol fills in a `Wanted`, so this module uses no protobuf or JSON. Sampling defaults come from the model.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Collection, Sequence

from common.adapters import AdapterRef
from common.errors import FieldViolation, InvalidArgument, ModelNotFound
from common.group_need import GroupRoom
from common.request_ids import REQUEST_ID, new_request_id
from common.types import Pooling, SamplingParams, StoppingParams, StructuredOutput
from gateway.intake.assets import GenerationDefaults, ModelAssets
from gateway.intake.bans import bad_token_ids, check_bans
from gateway.intake.group_limits import (
    check_group,
    is_beam_search,
    max_tokens_within,
    num_sequences,
    width_of,
)
from gateway.intake.limits import (
    MAX_MESSAGES,
    MAX_NAME_BYTES,
    MAX_PROMPT_BYTES,
    MAX_SALT_BYTES,
    MIN_PROMPT_BYTES,
    TOO_LONG,
    Checker,
    PromptLimits,
)
from gateway.intake.resolved_request import ResolvedRequest
from gateway.intake.salts import Salts
from gateway.intake.structured_checks import check_structured
from gateway.intake.tokenizing import TokenizerPool
from gateway.intake.wanted import ChatPrompt, IdsPrompt, Prompt, TextPrompt, Wanted

DEFAULT_MAX_TOKENS = 16


class Validator:
    """A validator of requests for one model. It checks requests and fills in defaults."""

    def __init__(
        self,
        assets: ModelAssets,
        pool: TokenizerPool,
        salts: Salts,
        *,
        timeout_s: float,
        max_model_len: Callable[[], int],
        group_rooms: Callable[[], Collection[GroupRoom]],
        pooling: Pooling = "last",
    ) -> None:
        """`timeout_s` is both the default and the limit of a request's timeout. `group_rooms` returns the group limits
        of the decode workers, or an empty collection if there have been no workers.
        """
        self._assets = assets
        self._pool = pool
        self._salts = salts
        self._timeout_s = timeout_s
        self._max_model_len = max_model_len
        self.group_rooms = group_rooms
        self._find_adapter: Callable[[str], AdapterRef | None] = lambda name: None
        self._public_tokens: Callable[[Sequence[int]], int] = lambda prompt_ids: 0
        self._cache_percent: Callable[[str], int | None] = lambda tenant: None
        self.pooling = pooling
        """The method by which a text becomes an embedding."""
        self._try_grammar: Callable[[str, StructuredOutput], Awaitable[None]] = _refuse_grammar

    def use_adapters(self, find: Callable[[str], AdapterRef | None]) -> None:
        """Sets the function that returns the adapter served under a name, or None (`Adapters.find`)."""
        self._find_adapter = find

    def use_grammars(self, check: Callable[[str, StructuredOutput], Awaitable[None]]) -> None:
        """Sets the function that tries a grammar (`GrammarTrials.check`). Without it, no grammar is accepted."""
        self._try_grammar = check

    def use_public(self, public_tokens: Callable[[Sequence[int]], int]) -> None:
        """Sets the function that counts a prompt's public leading tokens (`PublicPrefixes.common_tokens`)."""
        self._public_tokens = public_tokens

    def use_quotas(self, cache_percent: Callable[[str], int | None]) -> None:
        """Sets the function that returns a tenant's cache limit in percent (`Tenants.cache_percent`)."""
        self._cache_percent = cache_percent

    async def resolve(self, wanted: Wanted, tenant: str = "") -> ResolvedRequest:
        """Checks a request and fills in its defaults. Raises ModelNotFound for an unknown model, InvalidArgument for an
        invalid request, and the errors of the function that `use_grammars` has set.
        """
        adapter = self.check_model(wanted.model)
        checker = self.checker()
        _check_numbers(checker, wanted)
        _check_rest(checker, wanted)
        check_group(checker, wanted, self.group_rooms())
        check_structured(checker, wanted)
        check_bans(checker, wanted, self._assets.eos_token_ids)
        self._check_prompt(checker, wanted)
        if wanted.prompt == TextPrompt(""):  # a tokenizer that adds a special token would turn it into a prompt
            checker.refuse(wanted.prompt_field, "must not be empty")
        checker.finish()
        if wanted.structured is not None:
            await self._try_grammar(wanted.structured_field, wanted.structured)
        wanted.bad_token_ids = await bad_token_ids(self._pool, wanted.bad_words)
        text, ids = await self._prompt_ids(wanted)
        if (kept := self._kept_tokens(wanted)) is not None and kept < len(ids):
            text, ids = None, ids[-kept:]
        if wanted.structured_after is not None:
            wanted.structured = wanted.structured_after(text or "")
            await self._try_grammar(wanted.structured_field, wanted.structured)
        checker.prompt_len(wanted.prompt_field, len(ids))
        checker.token_ids(wanted.prompt_field, ids)
        checker.finish()
        return self._resolved(wanted, tenant, text, ids, adapter)

    def _kept_tokens(self, wanted: Wanted) -> int | None:
        """Returns how many tokens at the end of the prompt are kept, or None for all tokens."""
        if wanted.truncate_prompt_tokens != -1:
            return wanted.truncate_prompt_tokens
        default = 1 if isinstance(wanted.prompt, ChatPrompt) else DEFAULT_MAX_TOKENS
        return max(1, self._max_model_len() - (default if wanted.max_tokens is None else wanted.max_tokens))

    def check_model(self, name: str | None) -> AdapterRef | None:
        """Returns the adapter with this name, or None for the base model. Raises ModelNotFound for an unknown name."""
        if not name or name == self._assets.name:
            return None
        if (adapter := self._find_adapter(name)) is None:
            what = f"{name[:100]!r} is not served here; this server serves {self._assets.name!r}"
            raise ModelNotFound(f"model {what}", violations=(FieldViolation("model", what),))
        return adapter

    def prompt_limits(self) -> PromptLimits:
        fitting = self._max_model_len() * self._assets.longest_token
        return PromptLimits(self._max_text_bytes(), min(MAX_PROMPT_BYTES, fitting), self._max_model_len())

    def checker(self) -> Checker:
        return Checker(self._assets.vocab_size, self._max_model_len())

    async def tokenize(self, prompt: Prompt | None, prompt_field: str, *, add_special_tokens: bool | None) -> list[int]:
        """Returns a prompt's token ids. A text may exceed max_model_len. Raises InvalidArgument for invalid prompts."""
        wanted = Wanted(prompt=prompt, prompt_field=prompt_field, add_special_tokens=add_special_tokens)
        checker = self.checker()
        self._check_prompt(checker, wanted)
        checker.finish()
        return (await self._prompt_ids(wanted))[1]

    async def detokenize(self, ids: Sequence[int], name: str) -> str:
        limit = self._max_text_bytes()
        if len(ids) > limit:  # more ids than any accepted text has
            raise InvalidArgument.of(name, f"must hold at most {limit} ids, got {len(ids)}")
        checker = self.checker()
        checker.token_ids(name, ids)
        checker.finish()
        return await self._pool.decode(ids)

    def _check_prompt(self, checker: Checker, wanted: Wanted) -> None:
        """Checks the size and the form of a prompt before any work on it."""
        name, prompt = wanted.prompt_field, wanted.prompt
        if prompt is None:
            checker.refuse(name, "must be given")
        elif isinstance(prompt, TextPrompt):
            checker.text(name, prompt.text, self._max_text_bytes(), TOO_LONG)
        elif isinstance(prompt, IdsPrompt):
            if wanted.truncate_prompt_tokens is None or not prompt.ids:
                checker.prompt_len(name, len(prompt.ids))
        elif not 1 <= len(prompt.messages) <= MAX_MESSAGES:
            checker.refuse(
                name, f"must hold at least 1 and at most {MAX_MESSAGES} messages, got {len(prompt.messages)}"
            )
        else:
            for index, message in enumerate(prompt.messages):
                checker.text(f"{name}[{index}].role", message["role"], MAX_NAME_BYTES)
                checker.text(f"{name}[{index}].content", message["content"] or "", self._max_text_bytes(), TOO_LONG)
                if not message["role"]:
                    checker.refuse(f"{name}[{index}].role", "must not be empty")

    def _max_text_bytes(self) -> int:
        """Returns the size limit in bytes of a text: the size of the longest text that could fit into the context, but
        at least `MIN_PROMPT_BYTES`, because normalizing may shorten a text, and at most `MAX_PROMPT_BYTES`.
        """
        return min(MAX_PROMPT_BYTES, max(MIN_PROMPT_BYTES, self._max_model_len() * self._assets.longest_token))

    async def _prompt_ids(self, wanted: Wanted) -> tuple[str | None, list[int]]:
        prompt, special = wanted.prompt, wanted.add_special_tokens
        if isinstance(prompt, TextPrompt):
            return prompt.text, await self._pool.encode(prompt.text, add_special_tokens=special is not False)
        if isinstance(prompt, ChatPrompt):
            return await self._pool.encode_chat(prompt, add_special_tokens=special is True)
        assert isinstance(prompt, IdsPrompt)
        return None, list(prompt.ids)

    def _resolved(
        self, wanted: Wanted, tenant: str, text: str | None, ids: list[int], adapter: AdapterRef | None
    ) -> ResolvedRequest:
        return ResolvedRequest(
            request_id=wanted.request_id or REQUEST_ID.get() or new_request_id(),
            prompt_ids=ids,
            sampling=self._sampling(wanted),
            stopping=self._stopping(wanted, len(ids)),
            timeout_s=self._timeout_s if wanted.timeout_s is None else min(wanted.timeout_s, self._timeout_s),
            stop=tuple(wanted.stop),
            include_stop=wanted.include_stop_str_in_output,
            salt=self._salts.derive(tenant, wanted.cache_salt),
            priority=wanted.priority or 0,
            prompt_text=text,
            shown_special=wanted.shown_special,
            skip_special_tokens=wanted.skip_special_tokens,
            tenant=tenant,
            public_tokens=self._public_tokens(ids) if tenant and wanted.cache_salt is None else 0,
            pooling=self.pooling if wanted.embeds else None,
            cache_quota=self._salts.quota(tenant, self._cache_percent(tenant)),
            adapter=adapter,
            operation=wanted.operation,
            received_ns=wanted.received_ns,
        )

    def _sampling(self, wanted: Wanted) -> SamplingParams:
        """Returns the sampling parameters. The model's defaults for drawing tokens do not apply to a beam search."""
        defaults, beams = self._assets.defaults, is_beam_search(wanted)
        shape = GenerationDefaults() if beams else defaults
        top_k = _or(wanted.top_k, shape.top_k)
        return SamplingParams(
            temperature=1.0 if beams else float(_or(wanted.temperature, shape.temperature)),
            top_k=0 if top_k == -1 else int(top_k),
            top_p=float(_or(wanted.top_p, shape.top_p)),
            min_p=float(_or(wanted.min_p, shape.min_p)),
            presence_penalty=wanted.presence_penalty or 0.0,
            frequency_penalty=wanted.frequency_penalty or 0.0,
            repetition_penalty=float(_or(wanted.repetition_penalty, defaults.repetition_penalty)),
            logit_bias=tuple(sorted(wanted.logit_bias)),
            seed=secrets.randbits(63) if wanted.seed is None else wanted.seed,
            logprobs=wanted.logprobs,
            prompt_logprobs=wanted.prompt_logprobs,
            num_sequences=num_sequences(wanted),
            beam_width=width_of(wanted)[1] if beams else None,
            length_penalty=float(_or(wanted.length_penalty, 1.0)),
            early_stopping=wanted.early_stopping or False,
            structured=wanted.structured,
            bad_token_ids=tuple(map(tuple, wanted.bad_token_ids)),
            allowed_token_ids=None if wanted.allowed_token_ids is None else tuple(sorted(wanted.allowed_token_ids)),
        )

    def _stopping(self, wanted: Wanted, prompt_len: int) -> StoppingParams:
        """Returns the stopping parameters. A default max_tokens is clipped to the context and to the blocks of a decode
        worker. Raises InvalidArgument if max_tokens does not fit or is below min_tokens.
        """
        room = self._max_model_len() - prompt_len
        if wanted.max_tokens is None:
            fills = wanted.fills_context or isinstance(wanted.prompt, ChatPrompt)
            max_tokens = room if fills else min(DEFAULT_MAX_TOKENS, room)
        elif wanted.max_tokens > room:
            whole = self._max_model_len()
            what = f"of {wanted.max_tokens} and a prompt of {prompt_len} tokens exceed max_model_len {whole}"
            raise InvalidArgument.of("max_tokens", what, TOO_LONG)
        else:
            max_tokens = wanted.max_tokens
        max_tokens = max_tokens_within(
            wanted, prompt_len, self.group_rooms(), max_tokens, clip=wanted.max_tokens is None
        )
        if (wanted.min_tokens or 0) > max_tokens:
            raise InvalidArgument.of(
                "min_tokens", f"must be at least 0 and at most {max_tokens} (max_tokens), got {wanted.min_tokens}"
            )
        eos = () if wanted.ignore_eos else self._assets.eos_token_ids
        stop_ids = tuple(dict.fromkeys((*wanted.stop_token_ids, *eos)))
        return StoppingParams(max_tokens, wanted.min_tokens or 0, stop_ids)


async def _refuse_grammar(name: str, structured: StructuredOutput) -> None:
    raise InvalidArgument.of(name, "is not supported by this gateway")


def _check_numbers(checker: Checker, wanted: Wanted) -> None:
    for name in (
        "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
        "logprobs", "prompt_logprobs", "priority",
    ):  # fmt: skip
        checker.number(name, getattr(wanted, name))
    checker.number("timeout", wanted.timeout_s)
    checker.top_k(wanted.top_k)
    checker.max_tokens(wanted.max_tokens)
    checker.min_tokens(wanted.min_tokens, wanted.max_tokens)
    checker.truncate_prompt_tokens(wanted.truncate_prompt_tokens)


def _check_rest(checker: Checker, wanted: Wanted) -> None:
    checker.stop(wanted.stop)
    checker.stop_token_ids(wanted.stop_token_ids)
    checker.logit_bias(wanted.logit_bias)
    checker.request_id(wanted.request_id)
    if wanted.cache_salt is not None:
        checker.text("cache_salt", wanted.cache_salt, MAX_SALT_BYTES)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
