"""Generates samples and beams for one prompt: `python examples/samples_and_beams.py [GRPC_ADDRESS]`.

The four samples together need one prefill and one hand-over, and so does the beam search. For a given seed, sample `i`
does not depend on `n`.
"""

from __future__ import annotations

import sys

from looseleaf import Client


def main(address: str = "127.0.0.1:50051") -> None:
    with Client(address) as client:
        done = client.generate("The wolf", n=4, max_tokens=16, temperature=1.0, seed=7)
        for number, sample in enumerate(done.samples):
            print(f"sample {number}: {sample.text!r}")
        best = client.generate("The wolf", beam_width=4, n=2, max_tokens=16)
        for beam in best.samples:
            print(f"beam {beam.beam_score:.3f}: {beam.text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
