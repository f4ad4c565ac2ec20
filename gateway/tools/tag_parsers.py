"""Finds tool calls in the formats of Qwen 3 Coder, Seed-OSS, GLM, MiniMax and DeepSeek V3.2, in which each argument is
text between two tags.

Arguments are converted to JSON by the tool's schema (`typed_values`). A string is passed on while it is written, and
other values once they are complete.
"""

from __future__ import annotations

import json
import string
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial

from gateway.tools.call_object import END, NotACall, Scan, Take, expect, read_among, skip_space
from gateway.tools.call_parsers import CallParser, Tools
from gateway.tools.typed_values import STRING, json_of, resolved, types_of

_NAME = frozenset(string.ascii_letters + string.digits + "_.:/-")


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags before, between and after the parts of a call. A tag that a format does not have is empty."""

    open: str
    """The tag before the calls."""
    close: str
    call: str
    """The tag before the name of a function."""
    named: str
    key: str
    """The tag before the name of an argument."""
    keyed: str
    """The text after the name of an argument. If there is a `keyed_json`, this text means that the value is text."""
    value: str
    value_end: str
    call_end: str
    is_padded: bool
    """Whether there is a line break before and after each value."""
    keyed_json: str = ""
    """The text after the name of an argument whose value is JSON, or "" if only the tool's schema gives the type."""

    @property
    def marks(self) -> Sequence[str]:
        """The tags that may be special tokens."""
        tags = (self.open, self.close, self.key, self.keyed, self.value, self.value_end, self.call_end)
        return tuple(dict.fromkeys(tag for tag in tags if tag.startswith("<") and tag.endswith(">")))


QWEN_TAGS = Tags(
    open="<tool_call>", close="</tool_call>", call="<function=", named=">", key="<parameter=", keyed=">", value="",
    value_end="</parameter>", call_end="</function>", is_padded=True,
)  # fmt: skip
SEED_TAGS = Tags(
    open="<seed:tool_call>", close="</seed:tool_call>", call="<function=", named=">", key="<parameter=", keyed=">",
    value="", value_end="</parameter>", call_end="</function>", is_padded=False,
)  # fmt: skip
GLM_TAGS = Tags(
    open="<tool_call>", close="", call="", named="", key="<arg_key>", keyed="</arg_key>", value="<arg_value>",
    value_end="</arg_value>", call_end="</tool_call>", is_padded=False,
)  # fmt: skip
MINIMAX_TAGS = Tags(
    open="<minimax:tool_call>", close="</minimax:tool_call>", call='<invoke name="', named='">',
    key='<parameter name="', keyed='">', value="", value_end="</parameter>", call_end="</invoke>", is_padded=False,
)  # fmt: skip
DSML_TAGS = Tags(
    open="<\uff5cDSML\uff5cfunction_calls>", close="</\uff5cDSML\uff5cfunction_calls>",
    call='<\uff5cDSML\uff5cinvoke name="', named='">', key='<\uff5cDSML\uff5cparameter name="',
    keyed='" string="true">', keyed_json='" string="false">', value="", value_end="</\uff5cDSML\uff5cparameter>",
    call_end="</\uff5cDSML\uff5cinvoke>", is_padded=False,
)  # fmt: skip


class TagParser(CallParser):
    """A parser of one tag format. A call without the tag `open` before it must have the name of a known tool."""

    triggers = frozenset("<")

    def __init__(self, tags: Tags, known: Tools, max_calls: int | None = None) -> None:
        super().__init__(known, max_calls)
        self._tags = tags

    def _marked(self, ch: str) -> Scan:
        tags = self._tags
        mark, ch = yield from self._one_of(ch, [tag for tag in (tags.open, tags.call) if tag])
        if not mark:
            return ch
        read = self._section if mark == tags.open else partial(self._calls, must_know=True)
        return (yield from self._begun(mark, ch, read))

    def _section(self, ch: str) -> Scan:
        ch = yield from skip_space(ch)
        ch = yield from expect(ch, self._tags.call)
        return (yield from self._calls(ch))

    def _calls(self, ch: str, must_know: bool = False) -> Scan:
        """Reads the calls, beginning with the name of the first call."""
        tags = self._tags
        while True:
            ch = yield from self._call(ch, must_know)
            if not tags.close:
                return ch
            ch = yield from skip_space(ch)
            mark, ch = yield from self._one_of(ch, (tags.call, tags.close))
            if mark != tags.call:
                return ch
            self._held = [mark, ch]

    def _call(self, ch: str, must_know: bool) -> Scan:
        tags, letters = self._tags, list[str]()
        while ch in _NAME:
            letters.append(ch)
            ch = yield
        name = "".join(letters)
        if not name or (must_know and name not in self._known):
            raise NotACall
        ch = yield from expect(ch, tags.named)
        mark, ch = yield from self._next(ch)
        self.begin(name)
        before = "{"
        while mark == tags.key:
            self._held = [mark, ch]
            key: list[str] = []
            keyed, ch = yield from self._key(ch, key)
            self.arguments(f"{before}{json.dumps(''.join(key), ensure_ascii=False)}: ")
            ch = yield from self._value(ch, self._types(name, "".join(key), keyed))
            self._held, before = [ch], ", "
            mark, ch = yield from self._next(ch)
        self.arguments("{}" if before == "{" else "}")
        return ch

    def _next(self, ch: str) -> Generator[None, str, tuple[str, str]]:
        """Reads the tag before an argument or the tag after the call, which may be missing before `close`. Returns the
        tag and the next character.
        """
        tags = self._tags
        marks = [tag for tag in (tags.key, tags.call_end, tags.close) if tag]
        ch = yield from skip_space(ch)
        read, ch = yield from read_among(ch, marks)
        if read not in marks:
            raise NotACall
        return read, ch

    def _key(self, ch: str, into: list[str]) -> Generator[None, str, tuple[str, str]]:
        """Reads the name of an argument, up to its value. Returns the text after the name, and the next character."""
        while ch != END and ch not in '<>"\n':
            into.append(ch)
            ch = yield
        keyed, ch = yield from read_among(ch, [text for text in (self._tags.keyed, self._tags.keyed_json) if text])
        if keyed not in (self._tags.keyed, self._tags.keyed_json):
            raise NotACall
        if self._tags.value:
            ch = yield from skip_space(ch)
            ch = yield from expect(ch, self._tags.value)
        return keyed, ch

    def _types(self, name: str, key: str, keyed: str) -> frozenset[str]:
        """Returns the types that an argument of a function may have. `keyed` is the text after its name."""
        if self._tags.keyed_json and keyed == self._tags.keyed:
            return STRING
        root = self._known.get(name, {})
        properties = resolved(root, root).get("properties")
        types = types_of(properties.get(key) if isinstance(properties, dict) else None, root)
        return types - STRING if keyed == self._tags.keyed_json else types

    def _value(self, ch: str, types: frozenset[str]) -> Scan:
        if types != STRING:
            raw: list[str] = []
            ch = yield from self._text(ch, raw.append)
            self.arguments(json_of("".join(raw), types))
            return ch
        self.arguments('"')
        ch = yield from self._text(ch, lambda text: self.arguments(json.dumps(text, ensure_ascii=False)[1:-1]))
        self.arguments('"')
        return ch

    def _text(self, ch: str, take: Take) -> Scan:
        """Reads a value and its end tag, and passes on the text. Drops the line breaks around it if the format is
        padded.
        """
        end, line_break = self._tags.value_end, ""
        if self._tags.is_padded and ch == "\n":
            ch = yield
        while ch != END:
            read = ""
            while ch != END and end.startswith(read + ch):
                read += ch
                ch = yield
                if read == end:
                    return ch
            take(line_break + read)
            line_break = ""
            if read:
                continue
            if self._tags.is_padded and ch == "\n":
                line_break = ch
            else:
                take(ch)
            ch = yield
        raise NotACall
