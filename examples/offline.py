"""Generates text without a separate server: `python examples/offline.py [MODEL]`.

`LLM` starts every service on this machine, and ends the services at the end of the `with` block.
"""

from __future__ import annotations

import sys

from looseleaf import LLM


def main(model: str | None = None) -> None:
    prompts = ["Once upon a time", "The wolf", "In a house by the sea"]
    with LLM(model) as llm:
        for prompt, done in zip(prompts, llm.generate(prompts, max_tokens=24, temperature=0.0), strict=True):
            print(f"{prompt!r} -> {done.text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
