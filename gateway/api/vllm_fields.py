"""Lists vLLM's request fields that this server recognizes but does not support, each with its neutral value. A field in
this table is refused unless it has its neutral value, which has no effect. The field is not ignored like an unknown
field, because it could change the answer. If a body supports a field, this table does not apply to the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNSUPPORTED: Mapping[str, Any] = {
    # which tokens may be drawn; completions and chats support the first two
    "allowed_token_ids": None,
    "bad_words": [],
    "logits_processors": [],
    "repetition_detection": None,
    "structural_tag": None,
    "guided_whitespace_pattern": None,
    # prompts
    "chat_template": None,
    "chat_template_kwargs": {},
    "add_generation_prompt": True,
    "continue_final_message": False,
    "documents": [],
    "prompt_embeds": None,
    "mm_processor_kwargs": {},
    "media_io_kwargs": {},
    # the form of answers
    "spaces_between_special_tokens": True,
    "return_tokens_as_token_ids": False,
    "include_reasoning": True,
    "thinking_token_budget": None,
    # between servers
    "kv_transfer_params": None,
    "vllm_xargs": {},
}
