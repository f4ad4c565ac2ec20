"""Tests of trace files, cost files and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import StartupError
from loadtest.as_trace import as_trace
from loadtest.workload import AZURE_TRACE, Workload
from looseleaf.cli import main
from looseleaf.simulation import costs, trace
from looseleaf.simulation.costs import Costs

LINES = (
    '{"timestamp": 0, "input_length": 1024, "output_length": 64, "hash_ids": [0, 1]}',
    '{"timestamp": 2000, "input_length": 1200, "output_length": 32, "hash_ids": [0, 1, 2]}',
)
COSTS = Costs("m", 4096, ((1.0, 0.01), (512.0, 0.1)), 1e-8, ((1.0, 0.01), (32.0, 0.03)), 1e-7)


def write(directory: Path, *lines: str) -> Path:
    path = directory / "trace"
    path.write_text("\n".join(lines))
    return path


def test_prompts_of_a_mooncake_trace_share_tokens_and_blocks_where_they_share_ids(tmp_path: Path) -> None:
    first, second = trace.read(write(tmp_path, *LINES), divisor=32)
    assert (first.prompt_len, first.output_len, second.prompt_len, second.at_s) == (32, 2, 38, 2.0)
    assert first.block_keys(16) == second.block_keys(16)[:2] == [(0, 0), (1, 1)]
    assert first.token_ids(1000) == second.token_ids(1000)[:32]
    assert first.block_keys(24) == [(1, 0)]


def test_azure_prompts_share_nothing_and_keep_their_order() -> None:
    found = trace.read(AZURE_TRACE, count=50, rate=5.0)
    assert [request.at_s for request in found] == sorted(request.at_s for request in found)
    assert found[0].prompt_len == 374 and found[-1].at_s == pytest.approx(49 / 5.0)
    assert len({key for request in found for key in request.block_keys(16)}) == sum(r.prompt_len // 16 for r in found)


def test_a_line_in_mooncakes_format_is_read_back(tmp_path: Path) -> None:
    request = trace.TraceRequest(0.0, ((3, 64), (9, 20)), 7)
    assert trace.read(write(tmp_path, trace.mooncake_line(request))) == [request]


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (
            ('{"timestamp": 0, "input_length": 0, "output_length": 1}',),
            "line 1: input_length must be at least 1, got 0",
        ),
        (('{"timestamp": 0, "output_length": 1}',), "line 1: input_length must be a number of at least 1, got None"),
        ((LINES[0], "{"), "line 2 is not JSON"),
        (('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [-1]}',), "hash_ids must be a list of"),
        (("TIMESTAMP,ContextTokens", "x,1"), "neither JSON lines nor a CSV with the column GeneratedTokens"),
        (("TIMESTAMP,ContextTokens,GeneratedTokens", "x,1,1"), "line 2: TIMESTAMP must be a date and time, got 'x'"),
        ((), "has no requests"),
    ],
)
def test_a_bad_trace_is_refused_with_line_and_field(tmp_path: Path, lines: tuple[str, ...], text: str) -> None:
    with pytest.raises(StartupError, match=text):
        trace.read(write(tmp_path, *lines))


def test_costs_are_read_back_and_a_bad_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    COSTS.save(path)
    assert costs.load(path) == COSTS
    path.write_text(json.dumps({**json.loads(path.read_text()), "decode": [[2, 0.1], [1, 0.1]]}))
    with pytest.raises(StartupError, match="decode must be pairs"):
        costs.load(path)


def test_times_between_and_beyond_points_lie_on_lines() -> None:
    points = ((1.0, 1.0), (3.0, 2.0), (5.0, 6.0))
    assert [costs.at(points, x) for x in (1, 2, 3, 4, 6)] == [1.0, 1.5, 2.0, 4.0, 8.0]


def test_the_command_predicts_and_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    COSTS.save(tmp_path / "costs.json")
    words = ["simulate", str(AZURE_TRACE), "--costs", str(tmp_path / "costs.json"), "--requests", "60", "--rate", "8"]
    words += ["--divide", "4", "--json-output"]
    assert main(words) == 0
    [trial] = json.loads(capsys.readouterr().out)["trials"]
    assert trial["workers"] == "1p1d" and trial["ttft_p50_s"] > 0.01
    assert main([*words, "--workers", "3b"]) == 0
    [trial] = json.loads(capsys.readouterr().out)["trials"]
    assert trial["workers"] == "3b" and trial["refused"] == 0
    assert main([*words, "--disaggregation", "never"]) == 1
    assert "--disaggregation never needs processes with both roles" in capsys.readouterr().err
    assert main([*words, "--workers", "auto", "--slo-ttft", "0.0001", "--max-workers", "2"]) == 1
    assert main([*words, "--workers", "auto", "--slo-ttft", "60"]) == 0
    capsys.readouterr()
    assert main([*words, "--workers", "auto"]) == 1
    assert "--workers auto needs --slo-ttft or --slo-tpot" in capsys.readouterr().err
    assert main([*words, "--model", "other"]) == 1
    assert "measured m, not --model other" in capsys.readouterr().err


def test_a_figure_of_no_values_is_null_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    COSTS.save(tmp_path / "costs.json")
    (tmp_path / "trace").write_text('{"timestamp": 0, "input_length": 100, "output_length": 1, "hash_ids": []}')
    assert main(["simulate", str(tmp_path / "trace"), "--costs", str(tmp_path / "costs.json"), "--json-output"]) == 0
    printed = capsys.readouterr().out
    assert "NaN" not in printed and json.loads(printed)["best"]["itl_p50_s"] is None


def test_the_load_tests_workload_as_a_trace_has_its_lengths_and_prefixes(tmp_path: Path) -> None:
    workload = Workload(3, vocab_size=500, max_model_len=1024)
    path = write(tmp_path, *map(trace.mooncake_line, as_trace(workload, 40, rate=5.0)))
    found = trace.read(path)
    wanted = [workload.request(number) for number in range(40)]
    assert [request.prompt_len for request in found] == [len(request.prompt_ids) for request in wanted]
    firsts = [request.runs[0] for request in found if request.prompt_len > workload.prefix_len]
    begins = [request.prompt_ids[:64] for request in wanted if len(request.prompt_ids) > workload.prefix_len]
    assert len(set(firsts)) == len(set(begins)) < len(firsts)
