"""Streams a completion, then prints how much of its prompt was cached: `python examples/complete.py [GRPC_ADDRESS]`."""

from __future__ import annotations

import sys

from looseleaf import Client


def main(address: str = "127.0.0.1:50051") -> None:
    with Client(address) as client:
        usage = None
        for delta in client.generate("Once upon a time", max_tokens=48, temperature=0.8, seed=7, stream=True):
            print(delta.text, end="", flush=True)
            usage = delta.usage or usage
    assert usage is not None
    print(f"\n\n{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached; only full blocks are cached")


if __name__ == "__main__":
    main(*sys.argv[1:])
