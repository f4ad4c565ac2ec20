"""Starts a system, sends mostly invalid input to its HTTP and gRPC ports, and checks that the system keeps working
(`make fuzz`). No process may end, no status may be UNKNOWN, INTERNAL or an HTTP error of the server (500, 502 to 504),
every call must end, and every block must be released. After the first fifth of the inputs, no process may grow by more
than 64 MiB. Internal services receive inputs with and without the deployment's secret.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from smg_grpc_proto import vllm_engine_pb2

from looseleaf import LLM
from protos.v1 import block_store_pb2, decode_pb2, inference_pb2, prefill_pb2
from testing.fuzz.senders import GrpcSender, Metadata, Method, methods_of, send_http
from testing.gateway.tool_formats import TEMPLATES
from testing.system import assert_nothing_held, prompts, trust_at
from testing.tool_chats import write_model

_SERVICES = {
    "gateway": inference_pb2, "prefill": prefill_pb2, "decode": decode_pb2, "block_store": block_store_pb2,
}  # fmt: skip
FORBIDDEN = ("UNKNOWN", "INTERNAL", "HANG", "500", "502", "503", "504")
MAX_GROWTH_BYTES = 64 << 20
"""The limit for the growth of a process's resident memory after the first fifth of the inputs."""


@dataclass(slots=True)
class Outcome:
    """The results of a run."""

    num_inputs: int = 0
    seconds: float = 0.0
    statuses: dict[str, Counter[str]] = field(default_factory=dict)
    """The counts of statuses, by target."""
    growth_mib: dict[str, float] = field(default_factory=dict)
    """The growth of resident memory in MiB, by service."""
    faults: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.num_inputs / self.seconds


class Fuzzer:
    """A run of the fuzzer against one system."""

    def __init__(self, llm: LLM, seed: int, only: str = "") -> None:
        """Prepares the run. Inputs are sent only to targets whose names begin with `only`."""
        self._llm, self._seed, self._grpc = llm, seed, GrpcSender()
        secret = trust_at(llm.addresses.block_store).metadata
        self._targets: list[tuple[str, Method | None]] = [("http", None)] * 4
        for name, address in llm.addresses.services.items():
            module = _SERVICES.get(name.split("-")[0])
            for service in module.DESCRIPTOR.services_by_name.values() if module else ():  # type: ignore[attr-defined]
                for metadata in (secret, ()) if name != "gateway" else ((),):
                    label = "" if name == "gateway" else ", with the secret" if metadata else ", without"
                    self._add(address, service, metadata, label)
        for role, address in zip(("regular", "prefill", "decode"), llm.addresses.vllm_grpc, strict=True):
            service = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
            self._add(address, service, (), f", {role}")
        self._targets = [target for target in self._targets if target[0].startswith(only)]
        self.outcome = Outcome()
        self._began = time.monotonic()

    def _add(self, address: str, service: ServiceDescriptor, metadata: Metadata, label: str) -> None:
        found = methods_of(address, service, metadata)
        self._targets += [(f"{service.name}.{m.descriptor.name}{label}", m) for m in found]

    async def run(self, num_inputs: int, num_at_once: int) -> None:
        """Sends all inputs, `num_at_once` at a time, and then checks the system. Measures memory after a fifth of the
        inputs, and at the end.
        """
        pids, queue = dict(self._llm.pids), iter(range(num_inputs))
        before: dict[str, int] = {}

        async def one_after_another() -> None:
            for number in queue:
                if number == num_inputs // 5:
                    before.update({name: _resident(pid) for name, pid in pids.items()})
                if number % 50_000 == 0:
                    print(f"input {number:,}, {time.monotonic() - self._began:.0f} s", file=sys.stderr, flush=True)
                await self._send(number)

        await asyncio.gather(*(one_after_another() for _ in range(num_at_once)))
        self.outcome.num_inputs, self.outcome.seconds = num_inputs, time.monotonic() - self._began
        await self._grpc.close()
        await asyncio.to_thread(self._check, pids, before)

    async def _send(self, number: int) -> None:
        draw = random.Random(f"{self._seed} {number}")
        name, method = draw.choice(self._targets)
        if method is None:
            status = await send_http(draw, self._llm.addresses.http)
        else:
            status = await self._grpc.send(draw, method)
        self.outcome.statuses.setdefault(name, Counter())[status.split(":")[0]] += 1
        if status.split(":")[0] in FORBIDDEN and len(self.outcome.faults) < 20:
            self.outcome.faults.append(f"input {number} of seed {self._seed}: {name} answered {status}")

    def _check(self, pids: dict[str, int], before: dict[str, int]) -> None:
        outcome = self.outcome
        if self._llm.pids != pids:
            outcome.faults.append(f"processes ended: {pids} before, {self._llm.pids} now")
            return
        try:
            assert_nothing_held(self._llm.addresses.block_store, within_s=30.0)
        except AssertionError as error:
            outcome.faults.append(f"blocks: {error}")
        growth = {name: _resident(pid) - before[name] for name, pid in pids.items()}
        outcome.growth_mib = {name: round(size / 2**20, 1) for name, size in growth.items()}
        outcome.faults += [
            f"{name} grew by {size >> 20} MiB" for name, size in growth.items() if size > MAX_GROWTH_BYTES
        ]
        [prompt] = prompts(1, seed=1, lengths=(20, 20))
        if len(self._llm.client.generate(prompt, max_tokens=5, ignore_eos=True).token_ids) != 5:
            outcome.faults.append("the gateway no longer answers correctly")


def _resident(pid: int) -> int:
    """Returns the resident memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def fuzz(num_inputs: int, seed: int, num_at_once: int = 64, only: str = "", family: str = "hermes") -> Outcome:
    """Runs the fuzzer against a system with one worker of each role and a tiny model, whose tool calls have the format
    of `family`.
    """
    with tempfile.TemporaryDirectory(prefix="ll-fuzz-") as directory:
        model = write_model(Path(directory) / "tiny", family)
        settings: dict[str, Any] = {"num_blocks": 512, "max_model_len": 512, "roles": "split", "vllm_grpc": True}
        with LLM(str(model), **settings) as llm:
            fuzzer = Fuzzer(llm, seed, only)
            asyncio.run(fuzzer.run(num_inputs, num_at_once))
            return fuzzer.outcome


def lines_of(outcome: Outcome) -> Iterable[str]:
    """Yields the results as lines of Markdown."""
    yield f"{outcome.num_inputs:,} inputs in {outcome.seconds:.0f} s, {outcome.rate:.0f} a second."
    yield ""
    yield "| target | inputs | statuses |"
    yield "|---|---|---|"
    for name, counts in sorted(outcome.statuses.items()):
        yield f"| {name} | {counts.total():,} | {', '.join(f'{status} {n:,}' for status, n in counts.most_common())} |"
    yield ""
    yield f"Growth of memory after the first fifth, MiB: {outcome.growth_mib}. Faults: {outcome.faults or 'none'}."


def main() -> None:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--only", default="", help="only targets whose names begin with this, such as http")
    parser.add_argument("--family", default="hermes", choices=list(TEMPLATES), help="the format of tool calls")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    outcome = fuzz(args.inputs, args.seed, args.at_once, args.only, args.family)
    print("\n".join(lines_of(outcome)))
    if args.json:
        outcome.statuses = {name: dict(counts) for name, counts in outcome.statuses.items()}  # type: ignore[misc]
        args.json.write_text(json.dumps(asdict(outcome), indent=1) + "\n")
    sys.exit(bool(outcome.faults))


if __name__ == "__main__":
    main()
