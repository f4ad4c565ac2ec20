"""Measures the time to lay out a decode step, in microseconds (`python -m bench.step_layout`).

The sequences have 500 tokens in blocks of 16, and their tables do not change between steps. For each batch size, prints
the shortest of all measured times, which other load on the machine affects least. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time

from common.types import BlockRef, SamplingParams, StoppingParams
from engine.block_table import BlockTable
from engine.rows import DecodeRows
from engine.sequence import Sequence

BLOCK_SIZE, LENGTH, BLOCKS = 16, 500, 64


def sequence(number: int) -> Sequence:
    """Returns a sequence in the middle of decoding."""
    table = BlockTable(BlockRef(number * BLOCKS + block, 9) for block in range(BLOCKS))
    made = Sequence([5] * LENGTH, [7], SamplingParams(), StoppingParams(max_tokens=9999), table=table)
    made.num_computed = LENGTH
    return made


def least_us(batch: int, tries: int) -> float:
    """Returns the shortest time to lay out a step of `batch` sequences, in microseconds."""
    rows, sequences, least = DecodeRows(BLOCK_SIZE), [sequence(number) for number in range(batch)], float("inf")
    for _ in range(tries):
        began = time.perf_counter()
        rows.lay_out(sequences)
        least = min(least, time.perf_counter() - began)
    return round(least * 1e6, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tries", type=int, default=4000)
    args = parser.parse_args()
    found = {batch: least_us(batch, args.tries) for batch in args.batches}
    for batch, microseconds in found.items():
        print(f"batch {batch:3}: {microseconds:6.2f} us")
    print(json.dumps({"bench": "step_layout", "us": found}))


if __name__ == "__main__":
    main()
