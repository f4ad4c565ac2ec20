"""Compiles the grammars of a worker's process in a thread, and caches them. The roles of a process share the thread and
the cache. There is no time limit here, because the gateway refuses a grammar that takes too long in a trial
(`gateway.intake.grammar_trial`).
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING

from common.errors import InvalidArgument
from common.grammar import GrammarError, compile_grammar, load_tokenizer
from engine.grammar_state import GrammarState
from engine.sequence import Sequence

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from common.types import StructuredOutput

MAX_COMPILED = 32
"""Maximum number of compiled grammars in memory. A grammar takes between a few KB and, at the limit of states, about 20
MB.
"""
INLINE_TOKENS = 64
"""Maximum number of tokens that are replayed in the event loop. A token takes about 5 us."""
STACK_BYTES = 16 << 20
"""Stack size of the compiling thread, because the compiler recurses. It is larger than that of the gateway's trial, so
that a grammar that compiled there does not overflow the stack here.
"""


class Grammars:
    """A cache of the most recently used grammars, and the thread that compiles them."""

    def __init__(self, directory: str, vocab_size: int) -> None:
        """Creates an empty cache for the model in `directory`, whose logits have `vocab_size` columns."""
        self._directory = directory
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._has_begun = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Returns the number of compiled grammars."""
        return len(self._compiled)

    def warm(self) -> None:
        """Starts to load the tokenizer in the thread, because loading takes a second for a large vocabulary."""
        self._started().submit(self._load)

    async def prepare(self, sequences: Seq[Sequence]) -> None:
        """Calls `attach`, in the thread if it may take long. Raises the errors of `attach`."""
        if not self.attach_known(sequences):
            await asyncio.get_running_loop().run_in_executor(self._started(), self.attach, sequences)

    def attach_known(self, sequences: Seq[Sequence]) -> bool:
        """Calls `attach` if the grammar is compiled and at most INLINE_TOKENS must be replayed. Returns True if this
        call was made or, for free text, is not needed. Returns False if `attach` must still be called.
        """
        wanted = _wanted(sequences)
        if wanted is None:
            return True
        if wanted.digest not in self._compiled or sum(len(s.output_ids) for s in sequences) > INLINE_TOKENS:
            return False
        self.attach(sequences)
        return True

    def attach(self, sequences: Seq[Sequence]) -> None:
        """Gives each sequence of a group a grammar state that has accepted the output so far. Does nothing for free
        text. Raises InvalidArgument if the grammar cannot be used.
        """
        wanted = _wanted(sequences)
        if wanted is None:
            return
        try:
            matcher, tokenizer = self._compile(wanted), self._load()
        except GrammarError as error:
            raise InvalidArgument.of("structured_output", str(error)) from None
        for sequence in sequences:
            sequence.grammar = GrammarState(matcher.deep_copy(), tokenizer, sequence.stopping)
            sequence.grammar.follow(sequence.output_ids)

    def _compile(self, wanted: StructuredOutput) -> LLMatcher:
        """Returns the grammar in its initial state. The grammar is never advanced, so several threads may copy it."""
        digest = wanted.digest
        with self._lock:
            if (known := self._compiled.get(digest)) is not None:
                self._compiled.move_to_end(digest)
                return known
        compiled = compile_grammar(self._load(), wanted)
        with self._lock:
            self._compiled[digest] = compiled
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def _load(self) -> LLTokenizer:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._directory, self._vocab_size)
        return self._tokenizer

    def _started(self) -> ThreadPoolExecutor:
        """Returns the executor. Starts its thread with a large stack if it is not running yet."""
        if not self._has_begun:
            with _stack_size:
                before = threading.stack_size(STACK_BYTES)
                try:
                    self._thread.submit(lambda: None).result()
                finally:
                    threading.stack_size(before)
            self._has_begun = True
        return self._thread


def _wanted(sequences: Seq[Sequence]) -> StructuredOutput | None:
    """Returns the grammar of a group, or None for free text. Accepts a group without sequences, which the worker
    rejects later.
    """
    return sequences[0].sampling.structured if sequences else None


_stack_size = threading.Lock()
"""A lock that is held while the stack size for new threads is changed."""


@cache
def grammars_of(directory: str, vocab_size: int) -> Grammars:
    """Returns the process's grammars for a model."""
    return Grammars(directory, vocab_size)
