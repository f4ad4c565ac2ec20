"""The compiled grammars of a worker's process, and the thread that compiles them. The roles of a process share both.

The gateway has tried every grammar that a worker receives, so compiling it here stays within the gateway's time limit.
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
"""Number of grammars kept, which are the most recently used ones. Each takes a few KB, or 20 MB if it reaches the limit
of states.
"""
INLINE_TOKENS = 64
"""Number of tokens that are replayed in the event loop; each takes about 5 us."""
STACK_BYTES = 16 << 20
"""Stack of the compiling thread. It is larger than in the gateway's trial process, because the compiler recurses."""


class Grammars:
    """A cache of the most recently used grammars, and the thread that compiles them."""

    def __init__(self, directory: str, vocab_size: int) -> None:
        """`directory` is the model's directory, and `vocab_size` is the number of columns of its logits."""
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
        """Loads the tokenizer in the thread. This takes a second for a large vocabulary."""
        self._started().submit(self._load)

    async def prepare(self, sequences: Seq[Sequence]) -> None:
        """Does the work of `attach`, in the thread if it takes long. Raises the errors of `attach`."""
        if not self.attach_known(sequences):
            await asyncio.get_running_loop().run_in_executor(self._started(), self.attach, sequences)

    def attach_known(self, sequences: Seq[Sequence]) -> bool:
        """Does the work of `attach` if it takes only microseconds, because the grammar is compiled and there is little
        to replay. Returns whether nothing is left to do.
        """
        wanted = _wanted(sequences)
        if wanted is None:
            return True
        if wanted.digest not in self._compiled or sum(len(s.output_ids) for s in sequences) > INLINE_TOKENS:
            return False
        self.attach(sequences)
        return True

    def attach(self, sequences: Seq[Sequence]) -> None:
        """Gives each sequence of a group a state that has followed its tokens. Does nothing for free text.

        Raises InvalidArgument for a grammar that cannot be used.
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
    """Returns the grammar that the output of a group must match, or None for free text. A group without sequences is
    not an error here: the worker rejects it later.
    """
    return sequences[0].sampling.structured if sequences else None


_stack_size = threading.Lock()
"""Held while the stack size for new threads is changed."""


@cache
def grammars_of(directory: str, vocab_size: int) -> Grammars:
    """Returns the process's grammars for a model."""
    return Grammars(directory, vocab_size)
