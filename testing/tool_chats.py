"""Runs chats with tools for each family of chat templates (`python -m testing.tool_chats --chats 200`). A tiny random
model is served with the family's chat template, from which the server derives the call format. Every chat requires a
call. A chat fails if a complete call does not match its schema, or if the same request as a stream gives other calls.
Unless the answer was cut off at its token limit, a chat also fails if there is no call, if there is content besides the
calls, or, in about every fifth chat, if the server refuses a history with a call and its result.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from tokenizers import AddedToken, Tokenizer

from engine.tiny import make_checkpoint
from looseleaf import LLM
from testing.gateway.tool_formats import TEMPLATES

CITIES = ["Paris", 'R"o {m} e', "a < b\n> c", "北京 🌧"]
_ASK = {"role": "user", "content": "How is Paris?"}
_WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}, "sure": {"type": "boolean"}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "sure"],
    "additionalProperties": False,
}
_PLACES = {
    "type": "object",
    "properties": {
        "at": {"type": "array", "items": {"enum": [1, "x", None]}, "minItems": 1, "maxItems": 3},
        "note": {"anyOf": [{"enum": ["n", "é"]}, {"type": "null"}]},
    },
    "required": ["at"],
    "additionalProperties": False,
}
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
_FUNCTIONS: dict[str, dict[str, Any]] = {"get_weather": _WEATHER, "places": _PLACES, "now": _NOTHING}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in _FUNCTIONS.items()]


def write_model(directory: Path, family: str) -> Path:
    """Writes a random model with the chat template of a family, and returns its directory. The markers of the family's
    calls are special tokens.
    """
    form, template = TEMPLATES[family]
    make_checkpoint(directory, "llama", seed=1, vocab_size=540)
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in form.marks])
    tokenizer.save(path)
    return directory


def chat(http: httpx.Client, number: int) -> str:
    """Runs one chat. Returns a description of the errors found, or an empty string if there are none."""
    names = list(_FUNCTIONS)
    named = {"type": "function", "function": {"name": names[number % 3]}}
    body = {
        "messages": [_ASK], "tools": TOOLS, "tool_choice": named if number % 2 else "required", "max_tokens": 600,
        "parallel_tool_calls": number % 4 == 0, "seed": number, "temperature": 0.5 + number % 4 / 2,
    }  # fmt: skip
    reply = http.post("/v1/chat/completions", json=body)
    if reply.status_code != 200:
        return f"chat {number}: {reply.text[:300]}"
    [choice] = reply.json()["choices"]
    calls = choice["message"].get("tool_calls", [])
    is_cut = choice["finish_reason"] == "length"
    wrong = [what for call in (calls[:-1] if is_cut else calls) if (what := _wrong(call["function"]))]
    if not is_cut and (choice["message"]["content"] is not None or not calls):  # an incomplete call is content
        wrong.append(f"content {choice['message']['content']!r:.200}")
    if not wrong and (streamed := _streamed(http, body)) != [_written(call["function"]) for call in calls]:
        wrong.append(f"the stream has {streamed!r:.200}")
    if not wrong and not is_cut and number % 5 == 0:
        wrong += _sent_back(http, choice["message"])
    return f"chat {number}: {wrong}" if wrong else ""


def _wrong(function: dict[str, str]) -> str:
    """Returns a description of how a call violates its schema, or an empty string."""
    try:
        given = json.loads(function["arguments"])
    except ValueError:
        return f"not JSON: {function['arguments']!r:.200}"
    schema = _FUNCTIONS[function["name"]]
    fits = set(schema.get("required", ())) <= set(given) <= set(schema["properties"])
    match function["name"]:
        case "get_weather":
            fits = fits and given["city"] in CITIES and type(given["sure"]) is bool
            fits = fits and (type(days := given.get("days", 0)) is int and days <= 9)
        case "places":
            fits = fits and 1 <= len(given["at"]) <= 3 and all(item in (1, "x", None) for item in given["at"])
            fits = fits and given.get("note") in ("n", "é", None)
    return "" if fits else f"{function['name']}({given!r:.200})"


def _written(function: dict[str, str]) -> tuple[str, str]:
    return function["name"], function["arguments"]


def _streamed(http: httpx.Client, body: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the names and arguments of a streamed answer's calls."""
    found: dict[int, list[str]] = {}
    with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                for part in choice["delta"].get("tool_calls") or ():
                    call = found.setdefault(part["index"], ["", ""])
                    call[0] += part["function"].get("name") or ""
                    call[1] += part["function"].get("arguments") or ""
    return [(name, arguments) for _, (name, arguments) in sorted(found.items())]


def _sent_back(http: httpx.Client, message: dict[str, Any]) -> list[str]:
    """Sends a history with a call and its result to the server. Returns the errors."""
    one = message | {"tool_calls": message["tool_calls"][:1]}  # Llama 3's template allows one call
    told = {"role": "tool", "tool_call_id": one["tool_calls"][0]["id"], "content": "sun"}
    body = {"messages": [_ASK, one, told], "tools": TOOLS, "max_tokens": 2}
    reply = http.post("/v1/chat/completions", json=body)
    return [] if reply.status_code == 200 else [f"sent back: {reply.text[:300]}"]


def run_family(family: str, num_chats: int) -> list[str]:
    """Serves a model with the template of a family and runs chats, up to eight at a time. Returns the failures."""
    with tempfile.TemporaryDirectory(prefix="ll-chats-") as scratch:
        model = write_model(Path(scratch) / family, family)
        with (
            LLM(str(model), num_blocks=2048, max_model_len=2048, roles="both") as llm,
            httpx.Client(base_url=f"http://{llm.addresses.http}", timeout=120) as http,
            ThreadPoolExecutor(8) as pool,
        ):
            return [failure for failure in pool.map(lambda n: chat(http, n), range(num_chats)) if failure]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m testing.tool_chats", description=__doc__)
    parser.add_argument("--chats", type=int, default=200, help="number of chats over all families")
    parser.add_argument("--only", nargs="*", default=list(TEMPLATES), choices=list(TEMPLATES))
    args = parser.parse_args()
    failed, each = 0, -(-args.chats // len(args.only))
    print("| family | chats | failures |\n|---|---|---|")
    for family in args.only:
        failures = run_family(family, each)
        failed += len(failures)
        print(f"| {family} | {each} | {len(failures)} |", *failures[:5], sep="\n    ", flush=True)
    print(f"{each * len(args.only)} chats, {failed} failures")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
