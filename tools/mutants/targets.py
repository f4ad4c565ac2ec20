"""Lists the files that are mutated, and the tests that should detect the mutants. The fastest and most sensitive tests
come first.
"""

from __future__ import annotations

from dataclasses import dataclass

_MACHINE = ("tests/equality/test_stale_in_step.py", "tests/equality/test_machine.py")

_SERVED = ("tests/e2e/test_step_failures.py", "tests/e2e/test_tenants.py")


@dataclass(frozen=True, slots=True)
class Target:
    """An area of the code and its tests."""

    name: str
    files: tuple[str, ...]
    tests: tuple[str, ...]


def _in(package: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{package}/{name}.py" for name in names)


TARGETS = (
    Target(
        "decode_svc",
        _in("decode_svc", "running_blocks", "copy_on_write", "claims", "worker", "swap", "preemption", "sampling_step",
            "scheduler", "outputs"),
        (
            *_in("tests/decode_svc", "test_scheduler", "test_groups", "test_swap", "test_preemption", "test_claims",
                  "test_outputs", "test_room"),
            *_MACHINE, *_in("tests/decode_svc", "test_beams", "test_submits"), *_SERVED,
        ),
    ),
    Target(
        "prefill_svc",
        _in("prefill_svc", "group_blocks", "job", "scheduler", "worker", "first_tokens"),
        (
            *_in("tests/prefill_svc", "test_scheduler", "test_groups", "test_requests", "test_cancels"),
            *_MACHINE, *_SERVED,
        ),
    ),
    Target(
        "block_store client",
        (*_in("block_store/holder", "held_blocks", "outage", "reserve", "rejoin"),
         *_in("block_store/ledger", "client", "lane", "lease", "breaker", "prefix_hash", "codec")),
        (*_in("tests/block_store", "test_prefix_hash", "test_codec", "test_held_blocks", "test_client", "test_breaker",
              "test_rebuild",
              "test_lost_claims", "test_ledger"), *_MACHINE),
    ),
    Target(
        "gateway retry",
        (*_in("gateway/fleet", "worker_lost", "prefill_client", "decode_client"),
         *_in("gateway/request", "request_runner", "attempt", "retry", "state", "outlet", "isolation"),
         *_in("gateway/intake", "group_limits")),
        _in("tests/gateway", "test_isolation", "test_group_limits", "test_prefill_client", "test_requests",
            "test_samples", "test_outlet", "test_grpc"),
    ),
    Target(
        "block_store transfer",
        _in("block_store/transfer", "block_source", "byte_channel", "byte_server", "byte_transport", "frames",
            "pulled_blocks", "puller", "source_client", "transport"),
        _in("tests/block_store", "test_byte_channel", "test_transport", "test_pull", "test_service"),
    ),
    Target(
        "block_store rebuild",
        _in("block_store/ledger", "rebuild", "reaper"),
        _in("tests/block_store", "test_rebuild", "test_rebuild_large", "test_client", "test_breaker", "test_service"),
    ),
)  # fmt: skip
