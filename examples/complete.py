"""Streams a completion, then prints how much of its prompt was cached: `python examples/complete.py [GRPC_ADDRESS]`.

Run it twice: the second run finds the full blocks of the prompt in the prefix cache.
"""

from __future__ import annotations

import sys

from looseleaf import Client

PROMPT = (
    "Once upon a time there was an old mill by the river. The miller had three sons, and the youngest of them was "
    "called Hans. One day"
)


def main(address: str = "127.0.0.1:50051") -> None:
    with Client(address) as client:
        usage = None
        for delta in client.generate(PROMPT, max_tokens=48, temperature=0.8, seed=7, stream=True):
            print(delta.text, end="", flush=True)
            usage = delta.usage or usage
    assert usage is not None
    print(f"\n\n{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached; only full blocks are cached")


if __name__ == "__main__":
    main(*sys.argv[1:])
