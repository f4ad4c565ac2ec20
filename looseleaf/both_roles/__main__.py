"""Starts both roles in one process: `python -m looseleaf.both_roles --model DIR --block-store HOST:PORT`.

The weights are loaded once. Each role has a runner, a step thread and an attachment; one gRPC server serves both. Other
services see a prefill worker and a decode worker at the same address.

By default, the roles step independently on a GPU, each on a separate stream. On a CPU, the roles take turns, and each
uses all cores, because two thread pools at the same time have a lower throughput (docs/log).
"""

from __future__ import annotations

from common.service_main import run_service
from looseleaf.both_roles.roles import Loaded, join_both, serve
from looseleaf.both_roles.settings import BothSettings


async def main(settings: BothSettings) -> None:
    await serve(settings, lambda: join_both(Loaded.of(settings, both=True), settings))


if __name__ == "__main__":
    run_service("looseleaf.both_roles", BothSettings, main)
