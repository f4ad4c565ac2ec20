"""Chat templates of the families that support tool calls, and the call formats that they imply, for tests. The
templates are short. They contain the markers by which a family is recognized.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.tools.call_format import CallFormat
from gateway.tools.known_formats import (
    COHERE,
    DEEPSEEK_V32,
    FUNCTION_GEMMA,
    GEMMA4,
    GLM45,
    HARMONY,
    HERMES,
    HUNYUAN,
    INTERNLM,
    KIMI_K2,
    LFM2,
    LLAMA3,
    LLAMA4_PYTHONIC,
    MINIMAX_M2,
    MISTRAL,
    OLMO3,
    PYTHONIC,
    QWEN3_CODER,
    SEED_OSS,
)
from testing.gateway import tool_templates

_TEMPLATE = """\
{{%- if tools %}}{{{{- '<|system|>' }}}}{{%- for tool in tools %}}{{{{- tool | tojson }}}}{{%- endfor %}}
{{{{- {asked} }}}}{{%- endif %}}
{{%- for message in messages %}}
    {{{{- '<|' + message.role + '|>' + (message.content or '') }}}}
    {{%- if message.tool_calls %}}
        {{{{- {opening} }}}}
        {{%- for call in message.tool_calls %}}
            {{%- set name, arguments = call.function.name, call.function.arguments %}}{call}
        {{%- endfor %}}
        {{{{- {closing} }}}}
    {{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|assistant|>' }}}}{{%- endif %}}
"""


def _template(call: str, opening: str = "", closing: str = "", asked: str = "") -> str:
    """Returns a template. `call` is Jinja code that writes one call; the other arguments are text."""
    texts = {"opening": opening, "closing": closing, "asked": asked}
    return _TEMPLATE.format(call=call, **{key: repr(text) for key, text in texts.items()})


_EACH = "{%- for key, value in arguments.items() %}"
_TEXT = "(value if value is string else value | tojson)"
_PAIRS = _EACH + "{{- key ~ '=' ~ (value | tojson) }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}"
_PYTHON = "{{- name + '(' }}" + _PAIRS + "{{- ')' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}"
_LISTED = (
    "{{- '{\"name\": \"' + name + '\", \"arguments\": ' + (arguments | tojson) + '}' }}"
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}"
)
_QWEN = (
    "{{- '<function=' + name + '>\\n' }}" + _EACH + "{{- '<parameter=' + key + '>\\n' ~ " + _TEXT
    + " ~ '\\n</parameter>\\n' }}{%- endfor %}{{- '</function>' }}"
)  # fmt: skip
_GLM = (
    "{{- '\\n<tool_call>' + name + '\\n' }}" + _EACH + "{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' ~ " + _TEXT
    + " ~ '</arg_value>\\n' }}{%- endfor %}{{- '</tool_call>' }}"
)  # fmt: skip
_MINIMAX = (
    "{{- '<invoke name=\"' + name + '\">\\n' }}" + _EACH + "{{- '<parameter name=\"' + key + '\">' ~ " + _TEXT
    + " ~ '</parameter>\\n' }}{%- endfor %}{{- '</invoke>\\n' }}"
)  # fmt: skip
_KIMI = (
    "{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + (arguments | tojson)"
    " + '<|tool_call_end|>' }}"
)
_PLUGIN = (
    '{{- \'<|action_start|><|plugin|>\\n{"name": "\' + name + \'", "parameters": \' + (arguments | tojson)'
    " + '}<|action_end|>\\n' }}"
)
_ACTION = (
    '{{- \'    {"tool_call_id": "0", "tool_name": "\' + name + \'", "parameters": \' + (arguments | tojson) + \'}\' }}'
    "{%- if not loop.last %}{{- ',\\n' }}{%- endif %}"
)
_TYPED = "('true' if value is string else 'false')"
_DSML = (
    "{{- '<|DSML|invoke name=\"' + name + '\">\\n' }}" + _EACH
    + "{{- '<|DSML|parameter name=\"' + key + '\" string=\"' ~ " + _TYPED
    + " ~ '\">' ~ " + _TEXT + " ~ '</|DSML|parameter>\\n' }}{%- endfor %}{{- '</|DSML|invoke>\\n' }}"
).replace("|DSML|", "\uff5cDSML\uff5c")  # fmt: skip
_HARMONY = (
    "{{- '<|start|>assistant<|channel|>commentary to=functions.' + name + ' <|constrain|>json<|message|>'"
    " + (arguments | tojson) + '<|call|>' }}"
)


def _gemma(before: str, quote: str, after: str) -> str:
    """Returns Jinja code that writes one call in a format of Gemma. `quote` surrounds arguments that are strings."""
    return (
        f"{{{{- {before + 'call:'!r} + name + '{{' }}}}" + _EACH
        + f"{{%- set text = {quote!r} ~ value ~ {quote!r} if value is string else value | tojson %}}"
        + "{{- key ~ ':' ~ text }}{%- if not loop.last %}{{- ',' }}{%- endif %}{%- endfor %}"
        + f"{{{{- '}}' + {after!r} }}}}"
    )  # fmt: skip


TEMPLATES: Mapping[str, tuple[CallFormat, str]] = {
    "hermes": (HERMES, tool_templates.HERMES),
    "llama3": (LLAMA3, tool_templates.LLAMA3),
    "mistral": (MISTRAL, tool_templates.MISTRAL),
    "kimi_k2": (KIMI_K2, _template(_KIMI, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")),
    "qwen3_coder": (
        QWEN3_CODER, _template("{{- '\\n<tool_call>\\n' }}" + _QWEN + "{{- '\\n</tool_call>' }}"),
    ),
    "seed_oss": (
        SEED_OSS, _template("{{- '\\n<seed:tool_call>\\n' }}" + _QWEN + "{{- '\\n</seed:tool_call>' }}"),
    ),
    "glm45": (GLM45, _template(_GLM)),
    "minimax_m2": (MINIMAX_M2, _template(_MINIMAX, "\n<minimax:tool_call>\n", "</minimax:tool_call>")),
    "hunyuan_a13b": (HUNYUAN, _template(_LISTED, "<tool_calls>[", "]</tool_calls>")),
    "internlm": (INTERNLM, _template(_PLUGIN)),
    "pythonic": (PYTHONIC, _template(_PYTHON, "[", "]", "Answer [func_name1(params_name1=params_value1)]")),
    "llama4_pythonic": (
        LLAMA4_PYTHONIC, _template(_PYTHON, "[", "]", "<|header_start|>Answer [func_name1(name=value)]"),
    ),
    "openai": (HARMONY, _template(_HARMONY).replace("{{- '<|assistant|>' }}", "{{- '<|start|>assistant' }}")),
    "deepseek_v32": (
        DEEPSEEK_V32,
        _template(_DSML, "\n\n<\uff5cDSML\uff5cfunction_calls>\n", "</\uff5cDSML\uff5cfunction_calls>"),
    ),
    "cohere_command3": (COHERE, _template(_ACTION, "<|START_ACTION|>[\n", "\n]<|END_ACTION|>")),
    "gemma4": (GEMMA4, _template(_gemma("<|tool_call>", '<|"|>', "<tool_call|>"))),
    "functiongemma": (
        FUNCTION_GEMMA, _template(_gemma("<start_function_call>", "<escape>", "<end_function_call>")),
    ),
    "olmo3": (OLMO3, _template(_PYTHON, "<function_calls>", "</function_calls>")),
    "lfm2": (LFM2, _template(_PYTHON, "<|tool_call_start|>[", "]<|tool_call_end|>")),
}  # fmt: skip
"""The call format of each family, and a chat template that implies it."""
