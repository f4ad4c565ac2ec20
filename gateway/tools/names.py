"""The names of the output formats in settings. Most of the names are vLLM's."""

from __future__ import annotations

from typing import Literal

CallFormatName = Literal[
    "auto", "hermes", "llama3_json", "llama4_json", "mistral", "json", "deepseek_v3", "deepseek_v31", "granite",
    "phi4_mini_json", "kimi_k2", "qwen3_coder", "qwen3_xml", "seed_oss", "glm45", "glm47", "minimax_m2", "hunyuan_a13b",
    "jamba", "internlm", "pythonic", "llama4_pythonic", "olmo3", "lfm2", "deepseek_v32", "openai", "functiongemma",
    "gemma4", "cohere_command3",
]  # fmt: skip
ReasoningFormatName = Literal["qwen3", "deepseek_r1"]
