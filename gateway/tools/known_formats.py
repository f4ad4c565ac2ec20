"""Lists the formats of tool calls by name, and detects the format that a model's chat template uses.

A format is recognized by text that the template contains, such as the format's markers. A template without markers that
writes calls as JSON objects has the format `json`. For other templates, no format is found, and `--tool-call-parser`
must choose one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from gateway.tools import harmony_parser as harmony
from gateway.tools.call_format import CallFormat, Spelling, short_id
from gateway.tools.call_parsers import HermesParser, JsonParser, Llama3Parser, Llama4Parser, MistralParser
from gateway.tools.gemma_parsers import FunctionGemmaParser, GemmaParser
from gateway.tools.names import CallFormatName
from gateway.tools.pythonic_parsers import Lfm2Parser, Olmo3Parser, PythonicParser
from gateway.tools.section_parsers import (
    CohereParser,
    DeepSeekParser,
    GraniteParser,
    HunyuanParser,
    InternLmParser,
    KimiParser,
    Phi4MiniParser,
)
from gateway.tools.tag_parsers import DSML_TAGS, GLM_TAGS, MINIMAX_TAGS, QWEN_TAGS, SEED_TAGS, TagParser, Tags

_FOREIGN = re.compile(r"<function|<parameter|<\|tool_call|<tool_call\|>|<\|channel\|>|<\uff5ctool|<\uff5cDSML")
"""Markers of call formats. A template that contains one, but was not recognized by the markers of a known format, has
an unknown format.
"""
_KEYS = re.compile(r"""["']?(?:parameters|arguments)["']?\s*:""")

HERMES = CallFormat("hermes", HermesParser, (HermesParser.OPEN, HermesParser.CLOSE), marker=HermesParser.OPEN)
LLAMA3 = CallFormat("llama3_json", Llama3Parser, (Llama3Parser.TAG,))
LLAMA4 = CallFormat("llama4_json", Llama4Parser, (Llama4Parser.TAG, Llama4Parser.CLOSE))
_MISTRAL_MARKS = (MistralParser.MARKER, MistralParser.ARGS, MistralParser.CALL_ID)
MISTRAL = CallFormat("mistral", MistralParser, _MISTRAL_MARKS, short_id, MistralParser.MARKER)
MISTRAL_COMPACT = CallFormat("mistral", MistralParser, _MISTRAL_MARKS, short_id, MistralParser.MARKER, compact=True)
JSON = CallFormat("json", JsonParser)

# --- sections with JSON

_DEEPSEEK = DeepSeekParser
_DEEPSEEK_MARKS = (_DEEPSEEK.OPEN, _DEEPSEEK.CLOSE, _DEEPSEEK.CALL, _DEEPSEEK.CALL_END, _DEEPSEEK.SEP)
DEEPSEEK_V3 = CallFormat(
    "deepseek_v3",
    DeepSeekParser,
    _DEEPSEEK_MARKS,
    marker=_DEEPSEEK.OPEN,
    spelling=Spelling(
        before_name=(_DEEPSEEK.CALL, _DEEPSEEK.KIND, _DEEPSEEK.SEP),
        after_name=(f"\n{_DEEPSEEK.CODE}\n",),
        after_arguments=(f"\n{_DEEPSEEK.CODE_END}", _DEEPSEEK.CALL_END),
        separator=("\n",),
        closing=(_DEEPSEEK.CLOSE,),
    ),
)
DEEPSEEK_V31 = CallFormat(
    "deepseek_v31",
    DeepSeekParser,
    _DEEPSEEK_MARKS,
    marker=_DEEPSEEK.OPEN,
    spelling=Spelling(
        before_name=(_DEEPSEEK.CALL,),
        after_name=(_DEEPSEEK.SEP,),
        after_arguments=(_DEEPSEEK.CALL_END,),
        closing=(_DEEPSEEK.CLOSE,),
    ),
)
KIMI_K2 = CallFormat(
    "kimi_k2",
    KimiParser,
    (KimiParser.OPEN, KimiParser.CLOSE, KimiParser.CALL, KimiParser.CALL_END, KimiParser.ARGUMENTS),
    marker=KimiParser.OPEN,
    spelling=Spelling(
        before_name=(KimiParser.CALL, KimiParser.PREFIX),
        after_name=(":", re.compile("[0-9]{1,3}"), KimiParser.ARGUMENTS),
        after_arguments=(KimiParser.CALL_END,),
        closing=(KimiParser.CLOSE,),
    ),
)
_LIST = Spelling(
    before_name=('{"name": "',), after_name=('", "arguments": ',), after_arguments=("}",), separator=(", ",),
    closing=("]",),
)  # fmt: skip
GRANITE = CallFormat(
    "granite",
    GraniteParser,
    (GraniteParser.MARK,),
    marker=GraniteParser.MARK,
    spelling=replace(_LIST, opening=("[",)),
)
PHI4_MINI = CallFormat("phi4_mini_json", Phi4MiniParser, marker=f"{Phi4MiniParser.MARK}[", spelling=_LIST)
HUNYUAN = CallFormat(
    "hunyuan_a13b",
    HunyuanParser,
    (HunyuanParser.MARK, HunyuanParser.CLOSE),
    marker=HunyuanParser.MARK,
    spelling=replace(_LIST, opening=("[",), closing=("]", HunyuanParser.CLOSE)),
)
INTERNLM = CallFormat(
    "internlm",
    InternLmParser,
    (InternLmParser.START, InternLmParser.PLUGIN, InternLmParser.CLOSE),
    marker=InternLmParser.START,
    spelling=Spelling(
        opening=(InternLmParser.PLUGIN, "\n"),
        before_name=('{"name": "',),
        after_name=('", "parameters": ',),
        after_arguments=("}",),
        separator=("\n",),
        closing=(InternLmParser.CLOSE,),
        is_repeated=True,
    ),
)
COHERE = CallFormat(
    "cohere_command3",
    CohereParser,
    (CohereParser.MARK, CohereParser.CLOSE),
    marker=CohereParser.MARK,
    spelling=Spelling(
        opening=("[\n",),
        before_name=('    {"tool_call_id": "', re.compile("[0-9]"), '", "tool_name": "'),
        after_name=('", "parameters": ',),
        after_arguments=("}",),
        separator=(",\n",),
        closing=("\n]", CohereParser.CLOSE),
    ),
)
HARMONY = CallFormat(
    "openai",
    harmony.HarmonyParser,
    harmony.MARKS,
    marker=harmony.CHANNEL,
    spelling=Spelling(
        opening=(f"commentary to={harmony.FUNCTIONS}",),
        after_name=(" ", harmony.CONSTRAIN, "json", harmony.MESSAGE),
    ),
    thought=(
        harmony.CHANNEL, "analysis", harmony.MESSAGE, re.compile(r"(.|\n)*"), harmony.END_MESSAGE, harmony.START,
        "assistant",
    ),
    covers_answer=True,
)  # fmt: skip

# --- text between tags


def _tagged(name: str, tags: Tags, line_break: str = "\n", *, is_repeated: bool = True) -> CallFormat:
    around = (line_break,) if line_break and tags.close else ()
    spelling = Spelling(
        opening=around,
        separator=(line_break,) if line_break else (),
        closing=(*around, tags.close) if tags.close else (),
        is_repeated=is_repeated,
    )
    return CallFormat(
        name, partial(TagParser, tags), tags.marks, marker=tags.open, spelling=spelling, tags=tags,
        line_break=line_break,
    )  # fmt: skip


QWEN3_CODER = _tagged("qwen3_coder", QWEN_TAGS)
SEED_OSS = _tagged("seed_oss", SEED_TAGS)
GLM45 = _tagged("glm45", GLM_TAGS)
GLM47 = _tagged("glm47", GLM_TAGS, "")
MINIMAX_M2 = _tagged("minimax_m2", MINIMAX_TAGS, is_repeated=False)
DEEPSEEK_V32 = _tagged("deepseek_v32", DSML_TAGS, is_repeated=False)

# --- Python

_CALLS = Spelling(opening=("[",), separator=(", ",), closing=("]",))
PYTHONIC = CallFormat("pythonic", PythonicParser, spelling=_CALLS, is_pythonic=True)
LLAMA4_PYTHONIC = replace(PYTHONIC, name="llama4_pythonic", marks=(PythonicParser.OPEN, PythonicParser.CLOSE))
LFM2 = CallFormat(
    "lfm2",
    Lfm2Parser,
    (Lfm2Parser.OPEN, Lfm2Parser.CLOSE),
    marker=Lfm2Parser.OPEN,
    spelling=replace(_CALLS, closing=("]", Lfm2Parser.CLOSE)),
    is_pythonic=True,
)
OLMO3 = CallFormat(
    "olmo3",
    Olmo3Parser,
    (Olmo3Parser.OPEN, Olmo3Parser.CLOSE),
    marker=Olmo3Parser.OPEN,
    spelling=Spelling(separator=("\n",), closing=(Olmo3Parser.CLOSE,)),
    is_pythonic=True,
)

# --- the notation of Gemma


def _quoted(name: str, parser: type[GemmaParser]) -> CallFormat:
    marks = (parser.OPEN, parser.CLOSE, parser.QUOTE)
    spelling = Spelling(closing=(parser.CLOSE,), is_repeated=True)
    return CallFormat(name, parser, marks, marker=parser.OPEN, spelling=spelling, quote=parser.QUOTE)


GEMMA4 = _quoted("gemma4", GemmaParser)
FUNCTION_GEMMA = _quoted("functiongemma", FunctionGemmaParser)

FORMATS = (
    HERMES, LLAMA3, LLAMA4, JSON, DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, GRANITE, PHI4_MINI, HUNYUAN, INTERNLM,
    QWEN3_CODER, SEED_OSS, GLM45, GLM47, MINIMAX_M2, PYTHONIC, LLAMA4_PYTHONIC, LFM2, OLMO3,
    DEEPSEEK_V32, HARMONY, COHERE, GEMMA4, FUNCTION_GEMMA,
)  # fmt: skip
_BY_NAME: Mapping[str, CallFormat] = {
    **{form.name: form for form in FORMATS}, "jamba": HUNYUAN, "qwen3_xml": QWEN3_CODER,
}  # fmt: skip


def call_format(name: CallFormatName, template: str | None) -> CallFormat | None:
    """Returns the format with this name. For "auto", returns the template's format, or None if the format is
    unknown.
    """
    template = template or ""
    if name == "mistral" or (name == "auto" and MistralParser.MARKER in template):
        return MISTRAL_COMPACT if MistralParser.ARGS in template else MISTRAL
    if name != "auto":
        return _BY_NAME[name]
    if (marked := _by_mark(template)) is not None:
        return marked
    if "[func_name" in template:
        return LLAMA4_PYTHONIC if "<|header_start|>" in template else PYTHONIC
    if _FOREIGN.search(template):
        return None
    if HermesParser.OPEN in template:
        return HERMES
    if "<|start_header_id|>" in template and (Llama3Parser.TAG in template or _KEYS.search(template)):
        return LLAMA3
    if Llama4Parser.TAG in template:
        return LLAMA4
    return JSON if _KEYS.search(template) else None


def _by_mark(template: str) -> CallFormat | None:
    """Returns the format whose own markers the template contains, or None if there are no such markers."""
    if DeepSeekParser.OPEN in template:
        return DEEPSEEK_V3 if DeepSeekParser.CODE in template else DEEPSEEK_V31
    if GraniteParser.MARK in template and "<|start_of_role|>" in template:
        return GRANITE
    if GLM_TAGS.key in template:
        return GLM45 if re.search(r"</arg_key>(\n|\\n)<arg_value>", template) else GLM47
    if QWEN_TAGS.open in template and QWEN_TAGS.call in template:
        return QWEN3_CODER
    if Lfm2Parser.OPEN in template or "<|tool_list_start|>" in template:
        return LFM2
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return HARMONY
    forms = (KIMI_K2, PHI4_MINI, HUNYUAN, INTERNLM, SEED_OSS, MINIMAX_M2, OLMO3, DEEPSEEK_V32, COHERE)
    if (found := next((form for form in forms if form.marker in template), None)) is not None:
        return found
    quoted = (GEMMA4, FUNCTION_GEMMA)
    return next((form for form in quoted if form.marker in template and form.quote in template), None)
