"""Divides an answer of the Responses or Messages API into blocks: text, reasoning and tool calls. At most one block is
open at a time. Complete answers and streams go through the same steps, so they have the same blocks.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from common.types import FinishReason
from gateway.api.answer import AskingBody
from gateway.api.chat_plan import ChatPlan, ChatPlanner
from gateway.api.tool_choice import ToolChoice
from gateway.intake.resolved_request import ResolvedRequest
from gateway.intake.wanted import Wanted
from gateway.request.delta import Delta
from gateway.tools.formats import CallIds
from gateway.tools.output_reader import OutputReader
from gateway.tools.pieces import CallBegin, Content, Piece, Reasoning

BlockKind = Literal["text", "reasoning", "call"]


@dataclass(slots=True)
class Block:
    kind: BlockKind
    index: int
    """The block's number within the answer."""
    name: str = ""
    """The function's name, for a call."""
    call_id: str = ""
    secret: str = field(default_factory=lambda: secrets.token_hex(24))
    """The part that makes the block's id unique."""
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The block's text, or the arguments of a call."""
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class Change:
    """A change to a block: the block was opened, has more text, or is complete."""

    what: Literal["open", "grow", "close"]
    block: Block
    text: str = ""


class Blocks:
    """The list of one sample's blocks, built from its deltas."""

    def __init__(self, reader: OutputReader | None, ids: CallIds) -> None:
        """If `reader` is None, all text is content."""
        self.all: list[Block] = []
        self._reader = reader
        self._ids = ids
        self._is_open = False

    @property
    def has_calls(self) -> bool:
        return any(block.kind == "call" for block in self.all)

    def read(self, delta: Delta) -> list[Change]:
        """Adds the sample's next delta and returns the changes. The last delta closes the last block, which is an empty
        text if the sample has no output.
        """
        changes: list[Change] = []
        for piece in self._pieces(delta):
            self._take(piece, changes)
        if delta.finish_reason is not None:
            if not self.all:
                self._open(Block("text", 0), changes)
            self._close(changes)
        return changes

    def _pieces(self, delta: Delta) -> Sequence[Piece]:
        if self._reader is None:
            return [Content(delta.text)] if delta.text else []
        return self._reader.feed(delta.text) + ([] if delta.finish_reason is None else self._reader.finish())

    def _take(self, piece: Piece, changes: list[Change]) -> None:
        if isinstance(piece, CallBegin):
            self._open(Block("call", len(self.all), piece.name, self._ids.next(piece.call_id)), changes)
            return
        kind: BlockKind = "text" if isinstance(piece, Content) else "call"
        if isinstance(piece, Reasoning):
            kind = "reasoning"
        if not self._is_open or self.all[-1].kind != kind:
            self._open(Block(kind, len(self.all)), changes)
        self.all[-1].texts.append(piece.text)
        changes.append(Change("grow", self.all[-1], piece.text))

    def _open(self, block: Block, changes: list[Change]) -> None:
        self._close(changes)
        self.all.append(block)
        self._is_open = True
        changes.append(Change("open", block))

    def _close(self, changes: list[Change]) -> None:
        if self._is_open:
            changes.append(Change("close", self.all[-1]))
        self._is_open = False


class ToolBody(AskingBody, Protocol):
    """The interface of a request body that may offer tools."""

    def chosen_tools(self) -> ToolChoice:
        """Returns the tools that may be called. Raises InvalidArgument if the tools or the choice are invalid."""


class BlockAnswer:
    """The base class for answers of the Responses and Messages APIs. Each answer has one plan, one request and one
    sample.
    """

    ending = b""
    field_names: Mapping[str, str] = {}

    def __init__(self, body: ToolBody, planner: ChatPlanner) -> None:
        self.requests: list[ResolvedRequest] = []
        self.blocks = Blocks(None, CallIds(str))
        self.last = Delta()
        """The sample's last delta, or an empty delta before there is one."""
        self._body = body
        self._planner = planner
        self._plan: ChatPlan | None = None
        self.reasoning_tokens = 0
        """Number of tokens of the reasoning. If a delta has reasoning and other text, its tokens are divided according
        to the texts' lengths.
        """
        self._uncounted = 0
        """Number of tokens since the last text. The reader holds back the beginnings of tags."""

    @property
    def asking(self) -> ToolBody:
        return self._body

    def all_wanted(self) -> list[Wanted]:
        """Returns the body's only request, and plans the answer. Raises InvalidArgument if a field is invalid, and
        Unimplemented if a field is not supported.
        """
        [wanted] = self._body.all_wanted()
        self._plan = self._planner.plan(wanted, self._body.chosen_tools())
        return [wanted]

    def take(self, requests: list[ResolvedRequest]) -> None:
        assert self._plan is not None  # made by `all_wanted`
        self.requests = requests
        reader = self._plan.reader(requests[0].prompt_text or "") if self._plan.reads else None
        self.blocks = Blocks(reader, self._plan.call_ids())

    def add(self, number: int, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self.read(delta)

    def read(self, delta: Delta) -> list[Change]:
        if delta.finish_reason is not None:
            self.last = delta
        changes = self.blocks.read(delta)
        self._count_reasoning(len(delta.token_ids), changes)
        return changes

    def _count_reasoning(self, num_tokens: int, changes: Sequence[Change]) -> None:
        self._uncounted += num_tokens
        if total := sum(len(change.text) for change in changes):
            reasoning = sum(len(change.text) for change in changes if change.block.kind == "reasoning")
            self.reasoning_tokens += round(self._uncounted * reasoning / total)
            self._uncounted = 0

    @property
    def ended_with_calls(self) -> bool:
        """Whether the model called tools and then ended its answer."""
        return self.last.finish_reason is FinishReason.STOP and self.blocks.has_calls
