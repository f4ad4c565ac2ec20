"""The compiled grammars of a worker's process, and the thread that compiles them. Roles of a process share them.

The gateway has tried a grammar before a worker sees it, so compiling it here takes less than its limit of time.
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
"""Number of grammars that are kept, the last used ones. One takes some KB, at the limit of its states 20 MB."""
STACK_BYTES = 16 << 20
"""Stack of the thread that compiles: more than where the gateway tries a grammar, because the compiler recurses."""


class Grammars:
    """Compiles grammars in a thread of its own and keeps the last ones."""

    def __init__(self, directory: str, vocab_size: int) -> None:
        """`directory` is the model's, `vocab_size` the number of columns of its logits."""
        self._directory = directory
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._has_begun = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Number of compiled grammars."""
        return len(self._compiled)

    def warm(self) -> None:
        """Has the thread load the tokenizer, which takes a second for a large vocabulary."""
        self._started().submit(self._load)

    async def prepare(self, sequences: Seq[Sequence]) -> None:
        """Does what `attach` does, in the thread."""
        if sequences[0].sampling.structured is not None:
            await asyncio.get_running_loop().run_in_executor(self._started(), self.attach, sequences)

    def attach(self, sequences: Seq[Sequence]) -> None:
        """Gives each sequence of a group its state, after the tokens that it has. Does nothing for free text.

        Raises InvalidArgument for a grammar that cannot be used.
        """
        wanted = sequences[0].sampling.structured
        if wanted is None:
            return
        try:
            with self._lock:
                matcher, tokenizer = self._compile(wanted)
                states = [GrammarState(matcher.deep_copy(), tokenizer, s.stopping) for s in sequences]
        except GrammarError as error:
            raise InvalidArgument.of("structured_output", str(error)) from None
        for sequence, state in zip(sequences, states, strict=True):
            state.follow(sequence.output_ids)
            sequence.grammar = state

    def _compile(self, wanted: StructuredOutput) -> tuple[LLMatcher, LLTokenizer]:
        tokenizer = self._load()
        if (matcher := self._compiled.get(wanted.digest)) is None:
            matcher = self._compiled[wanted.digest] = compile_grammar(tokenizer, wanted)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(wanted.digest)
        return matcher, tokenizer

    def _load(self) -> LLTokenizer:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._directory, self._vocab_size)
        return self._tokenizer

    def _started(self) -> ThreadPoolExecutor:
        """Returns the thread, which is started with a large stack."""
        if not self._has_begun:
            with _stack_size:
                before = threading.stack_size(STACK_BYTES)
                try:
                    self._thread.submit(lambda: None).result()
                finally:
                    threading.stack_size(before)
            self._has_begun = True
        return self._thread


_stack_size = threading.Lock()
"""Held while the size of new threads' stacks is changed."""


@cache
def grammars_of(directory: str, vocab_size: int) -> Grammars:
    """Returns the process' grammars for a model."""
    return Grammars(directory, vocab_size)
