"""Measures the gateway's CPU time per streamed token for two checkouts in turn.

    python -m bench.served.frontend_pair --other ../before --rounds 9

Both stacks (`frontend.Stack`) run all the time, each with the code of its checkout. They are measured in turn, so other
load on the machine affects both. Prints the medians of each, and the median of the rounds' ratios.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from pydantic import Field

from bench.checkout import Checkout
from bench.rounds import ratio
from common.errors import StartupError
from common.settings import Settings, settings_config

DRIVER = """
import sys
from bench.served.frontend import FrontendSettings, Measurement, Stack
settings = FrontendSettings.load(sys.argv[1:])
with Stack(settings) as stack:
    measurement = Measurement(stack, settings)
    measurement.measure_idle()
    print("ready", flush=True)
    for line in sys.stdin:
        kind, rate = line.split()
        found = measurement.served(kind, float(rate))
        print("found", found["gateway"]["us_per_token"], found["tokens_per_message"], flush=True)
"""
"""A program that runs in each checkout and imports that checkout's bench.served.frontend."""


class PairSettings(Settings):
    """The settings of a comparison of this checkout's front end with that of another checkout."""

    model_config = settings_config("LOOSELEAF_PAIR_", "bench.served.frontend_pair")

    other: Path = Field(description="directory of the other checkout, with generated protos and built extensions")
    streams: int = Field(64, ge=1, le=1024, description="concurrent streams")
    rate: float = Field(25.0, gt=0, le=2000, description="steps per second, each a token for every stream")
    full_rate: float = Field(1000.0, gt=0, le=5000, description="steps per second that no gateway keeps up with")
    seconds: float = Field(3.0, gt=0.1, description="length of one measurement")
    rounds: int = Field(9, ge=1, description="measurements of each")


def measure(checkout: Checkout, kind: str, rate: float) -> tuple[float, float]:
    """Returns (CPU time per token in us, tokens per message)."""
    us, tokens = checkout.ask(f"{kind} {rate}")
    return float(us), float(tokens)


def main(settings: PairSettings) -> None:
    works = [(kind, rate) for rate in (settings.rate, settings.full_rate) for kind in ("http", "grpc")]
    found: dict[tuple[str, float], list[tuple[float, float, float, float]]] = {work: [] for work in works}
    options = ["--streams", str(settings.streams), "--seconds", str(settings.seconds)]
    with Checkout(settings.other, DRIVER, options) as other, Checkout(Path.cwd(), DRIVER, options) as this:
        for number in range(settings.rounds):
            for work in works:
                if number % 2:
                    before, after = measure(other, *work), measure(this, *work)
                else:
                    after, before = measure(this, *work), measure(other, *work)
                found[work].append((*before, *after))
    for (kind, rate), rounds in found.items():
        before_us, before_tokens, after_us, after_tokens = map(statistics.median, zip(*rounds, strict=True))
        compared = ratio((before, after) for before, _, after, _ in rounds)
        print(
            f"{kind} {rate:g} steps/s: other {before_us:.1f} us a token ({before_tokens:.2f} tokens a message), "
            f"this {after_us:.1f} ({after_tokens:.2f}), {compared}"
        )


if __name__ == "__main__":
    try:
        main(PairSettings.load(sys.argv[1:]))
    except StartupError as error:
        print(f"bench.served.frontend_pair: {error}", file=sys.stderr)
        sys.exit(1)
