"""Plans a chat: which tools it offers or enforces, and whether reasoning is split off. Each chat has one plan.
`ChatPlanner.plan` makes the plan, and adds to the request the options that the plan needs (a grammar, special tokens as
text). The plan creates a reader for each sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from common.errors import InvalidArgument
from common.types import StructuredOutput
from gateway.api.tool_choice import ToolChoice
from gateway.intake.assets import ModelAssets
from gateway.intake.tokenizing import chat_templates
from gateway.intake.wanted import ChatPrompt, Prompt, Wanted
from gateway.tools.call_format import CallFormat
from gateway.tools.enforce import calls_grammar, thinking_before
from gateway.tools.formats import CallIds, OutputFormats, special_ids
from gateway.tools.known_formats import call_format
from gateway.tools.names import CallFormatName, ReasoningFormatName
from gateway.tools.output_reader import OutputReader
from gateway.tools.reasoning import ReasoningSplitter, begins_inside


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """The plan for reading the answer to one body."""

    planner: ChatPlanner
    tools: ToolChoice
    form: CallFormat | None
    """The format in which the answer is read, or None if the answer is not searched for calls."""
    reasoning: ReasoningFormatName | None
    continued: str | None
    """The text of the message that the answer continues, or None."""

    @property
    def reads(self) -> bool:
        """Whether the answer's text is searched for reasoning or calls."""
        return self.form is not None or self.reasoning is not None

    def reader(self, prompt: str) -> OutputReader:
        """Returns a reader for one sample that follows this prompt."""
        splitter = parser = None
        if self.reasoning is not None:
            splitter = ReasoningSplitter(inside=begins_inside(self.reasoning, prompt, self.continued))
        if self.form is not None:
            known = {function.name: function.parameters for function in self.tools.functions}
            most = 0 if self.tools.choice == "none" else None if self.tools.many else 1
            parser = self.form.parser(known, most)
        return OutputReader(splitter, parser)

    def call_ids(self) -> CallIds:
        """Returns the source of ids for the calls of the answer."""
        return self.planner.call_ids()


class ChatPlanner:
    """A factory of chat plans for one model."""

    def __init__(
        self, assets: ModelAssets, parser: CallFormatName = "auto", reasoning: ReasoningFormatName | None = None
    ) -> None:
        """`parser` names the format of tool calls, or is "auto" to infer the format from the chat template. `reasoning`
        names the format of the reasoning that is split off, or is None to split off no reasoning.
        """
        self._template, self._tool_template = chat_templates(assets)
        self.formats = OutputFormats(call_format(parser, assets.tool_template or assets.chat_template), reasoning)
        calls = self.formats.calls
        self._call_marks = {} if calls is None else special_ids(assets.tokenizer, calls.marks)
        self._thinking_marks = special_ids(assets.tokenizer, self.formats.reasoning_marks)

    @property
    def reads_tools(self) -> bool:
        """Whether the chat template reads tools."""
        return self._tool_template is not None and self._tool_template.takes_tools

    @property
    def writes_calls(self) -> bool:
        """Whether the chat template writes the tool calls of earlier answers, as far as its source shows."""
        return self._template is not None and self._template.takes_calls

    def plan(self, wanted: Wanted, tools: ToolChoice) -> ChatPlan:
        """Returns the plan of a chat and adds the required options to `wanted`. Raises InvalidArgument for features
        that the model does not support or that cannot be combined.
        """
        offered = tools.choice != "none"
        if not offered and isinstance(wanted.prompt, ChatPrompt):
            wanted.prompt = replace(wanted.prompt, tools=None)
        self.check(wanted.prompt)
        if offered:
            self._check_tools(wanted, tools)
        continued = _continued(wanted.prompt)
        reasoning = self.formats.reasoning if wanted.structured is None else None
        form = self.formats.calls
        if not offered and (form is None or not form.covers_answer or wanted.structured is not None):
            form = None
        marks = (self._call_marks if form is not None else {}) | (self._thinking_marks if reasoning is not None else {})
        wanted.shown_special = {token_id: mark for mark, token_id in marks.items()}
        if tools.enforced:
            wanted.structured_field = "tools"
            wanted.structured_after = partial(self._grammar, tools, continued)
        return ChatPlan(self, tools, form, reasoning, continued)

    def call_ids(self) -> CallIds:
        calls = self.formats.calls
        return CallIds(str if calls is None else calls.new_id)

    def check(self, prompt: Prompt | None) -> None:
        """Raises InvalidArgument if the model's chat template does not support tools or tool calls that the prompt has,
        or if the prompt sets a variable that clients cannot set.
        """
        if not isinstance(prompt, ChatPrompt):
            return
        template = self._tool_template if prompt.tools else self._template
        if template is None:
            return
        if prompt.tools and not template.takes_tools:
            raise InvalidArgument.of("tools", "cannot be used: the model's chat template does not support tools")
        for index, message in enumerate(prompt.messages):
            if "tool_calls" in message and not template.takes_calls:
                what = "cannot be used: the model's chat template does not support tool calls"
                name = f"messages[{index}].tool_calls" if prompt.names is None else prompt.names[index]
                raise InvalidArgument.of(name, what)
        for name in prompt.variables:
            if name in template.own_names:
                raise InvalidArgument.of("chat_template_kwargs", f"cannot set {name[:100]!r}")

    def _check_tools(self, wanted: Wanted, tools: ToolChoice) -> None:
        form = self.formats.calls
        if form is None:
            what = "cannot be used: the format of this model's tool calls is not known; see --tool-call-parser"
            raise InvalidArgument.of("tools", what)
        if wanted.structured is not None:
            what = "cannot be combined with tools, unless tool_choice is none"
            raise InvalidArgument.of(wanted.structured_field.split(".")[0], what)
        if tools.enforced and tools.choice == "auto" and (form.covers_answer or not form.marker):
            what = "cannot be strict with tool_choice auto: this model's calls cannot be distinguished from text"
            raise InvalidArgument.of("tools", what)

    def _grammar(self, tools: ToolChoice, continued: str | None, prompt: str) -> StructuredOutput:
        assert self.formats.calls is not None
        marks = self._call_marks | self._thinking_marks
        thinking = thinking_before(self.formats.reasoning, prompt, continued)
        free = tools.choice == "auto"
        form, functions = self.formats.calls, tools.functions
        try:
            return calls_grammar(form, functions, marks, many=tools.many, thinking=thinking, free=free)
        except ValueError as error:
            what = f"cannot be enforced in the format {form.name}: {error}"
            raise InvalidArgument.of("tools", what) from error


def _continued(prompt: Prompt | None) -> str | None:
    """Returns the text of the message that the output continues, or None if the output continues no message."""
    if not isinstance(prompt, ChatPrompt) or not prompt.continue_final_message:
        return None
    return str(prompt.messages[-1]["content"])
