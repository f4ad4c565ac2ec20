"""`make bench`: the stored results, and the page that is generated from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.served import cpu, machine
from bench.served.cpu_served import llama_bytes
from bench.served.startup import mappings
from common.errors import StartupError
from looseleaf.serve.model_source import REPOSITORY

CASE = {"name": "rms_norm", "threads": 2, "best_ms": 0.5, "rate": 9.0, "unit": "GB/s", "share": 0.5}
WAITS = {"out_tok_s": 1.0, "ttft_p50_ms": 2.0, "ttft_p99_ms": 3.0, "itl_p50_ms": 4.0, "itl_p99_ms": 5.0}
SERVED = {"first_token_s": 4.0, "memory_mib": {"beyond": 600.0}, "served": WAITS, "prefix": WAITS}
RESULT = {
    "kernels": {"cases": [CASE]},
    "engine": {"decode": [{"batch": 8, "context": 512, "ms": 9.0, "tokens_per_s": 70.0, "of_floor": 0.7}]},
    "served": {"both": SERVED, "split": SERVED},
    "batching": {},
    "latency": {},
}


def test_a_machine_has_a_name_for_files() -> None:
    assert machine.machine_slug("AMD EPYC 7B13 64-Core Processor", 2) == "amd-epyc-7b13-2c"
    assert machine.machine_slug("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", 4) == "intel-xeon-platinum-8481c-4c"


def test_origin_names_commit_and_machine() -> None:
    origin = machine.provenance()
    assert origin["cores"] >= 1 and origin["memory_gib"] >= 1 and origin["commit"]


def test_every_part_has_a_row(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before\n{cpu.BEGIN}\n\n### AVX512-BF16\n\nold\n\n### AVX2\n\nkept\n\n{cpu.END}\nafter\n")
    origin = machine.provenance() | {"date": "2026-01-02", "commit": "abc", "cpu": "EPYC", "cores": 2}
    path = cpu.keep(RESULT, {**origin, "isa": ["avx2", "avx512f", "avx512_bf16"]}, page)
    assert path.name == "2026-01-02-epyc-2c-avx512-bf16-abc-bench.json"
    assert json.loads(path.read_text())["kernels"] == RESULT["kernels"]
    text = page.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "old" not in text
    assert text.index("### AVX2\n\nkept\n\n### AVX512-BF16\n\n2026-01-02, ")
    for cells in (
        "| rms_norm | 2 | 0.500 | 9 GB/s | 50% |",
        "| 8 | 512 | 9.0 | 70.0 | 70% |",
        "| split, prefix | 1.0 | 2.0, ",
    ):
        assert cells in text
    cpu.keep(RESULT, {**origin, "isa": [*machine._FEATURES]}, page)
    assert page.read_text().count("2026-01-02, ") == 2 and "\n\n### AMX\n\n" in page.read_text()


def test_a_cpu_has_a_class() -> None:
    classes = [machine.class_of({"isa": [*machine._FEATURES][:count]}) for count in range(5)]
    assert classes == ["no AVX2", "AVX2", "AVX-512", "AVX512-BF16", "AMX"]


def test_a_part_alone_leaves_the_page(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("as it was")
    cpu.keep({"kernels": RESULT["kernels"]}, machine.provenance(), page)
    assert page.read_text() == "as it was"


def test_the_page_here_can_take_a_section() -> None:
    page = (REPOSITORY / "docs/benchmarks/cpu/README.md").read_text()
    assert "\n\n### no AVX2\n\nnew\n\n### AVX2\n\n" in cpu.with_section(page, "no AVX2", "new")
    with pytest.raises(ValueError, match="lacks"):
        cpu.with_section("nothing", "AVX2", "new")


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(StartupError, match="must be one of kernels, engine"):
        cpu.chosen(["kernel"])


def test_size_of_the_benchmarks_model() -> None:
    config = json.loads((REPOSITORY / "models/configs/llama-125m/config.json").read_text())
    assert llama_bytes(config) == 2 * 124_668_672  # the number of parameters, as transformers counts them


def test_memory_is_told_by_mapping() -> None:
    smaps = (
        "7f00-7f10 rw-s 00000000 00:19 4 /dev/shm/ll/arena\nSize: 9 kB\nPss:    7 kB\nPss_Dirty: 3 kB\n"
        "7f10-7f20 rw-p 00000000 00:00 0 \nPss:    5 kB\n"
    )
    assert list(mappings(smaps)) == [("/dev/shm/ll/arena", 7), ("", 5)]
