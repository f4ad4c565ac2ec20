"""The comparison with peers: its computations, and runs with a stand-in for the harness."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from bench.served import peers_gap
from bench.served.peers_load import Load
from bench.served.peers_report import BOTH, SPLIT, Goal, absolute, disturbed, figure, medians, repetitions, table
from bench.served.peers_rounds import Rounds
from bench.served.peers_servers import Harness, Target, await_health, check, commands, end, peer_server
from bench.served.startup import Served, memory, weights_bytes
from common.errors import StartupError
from engine.tiny import make_checkpoint
from testing.system import wait_for


def row(peer: str, test: str = "decode8", model: str = "M-bfloat16", **values: float) -> dict[str, object]:
    return {"peer": peer, "test": test, "model": model, **values}


def test_medians_are_of_each_model_test_and_peer() -> None:
    rows = [row(BOTH, tok_s=value) for value in (3.0, 1.0, 2.0)]
    found = medians(repetitions([*rows, row(BOTH, model="S-bfloat16", tok_s=9.0), row("vllm", tok_s=5.0)]))
    assert found["M", "decode8", BOTH] == {"tok_s": 2.0, "reps": 3}
    assert found["S", "decode8", BOTH]["tok_s"] == 9.0
    assert found["M", "decode8", "vllm"]["tok_s"] == 5.0


@pytest.mark.parametrize(("ours", "holds"), [(13.0, True), (12.9, False)])
def test_ours_is_held_against_the_best_peer(ours: float, holds: bool) -> None:
    rates = {BOTH: ours, "vllm": 10.0, "llamacpp": 4.0}
    rows = [row(peer, tok_s=rate) for peer, rate in rates.items()]
    found = figure(Goal("", "decode8", "tok_s", 1.3), repetitions(rows))
    assert (found.peer, found.ratio, found.holds) == ("vllm", ours / 10, holds)


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    """The machine is three times as fast in the second round: the medians' ratio would be 2, and holds in one round."""
    ours, theirs = (20.0, 39.0, 13.0), (10.0, 30.0, 10.0)
    rows = [row(BOTH, tok_s=rate, round=at) for at, rate in enumerate(ours)]
    rows += [row("vllm", tok_s=rate, round=at) for at, rate in enumerate(theirs)]
    goal = Goal("", "decode8", "tok_s", 1.4)
    found = figure(goal, repetitions(rows))
    assert (found.ours, found.theirs, found.ratio, found.holds) == (20.0, 10.0, 1.3, False)
    # Without its last round, the peer was not measured in the same rounds.
    assert figure(goal, repetitions(rows[:-1])).ratio == 1.0


def test_the_least_favourable_peer_counts() -> None:
    rows = [row(BOTH, tok_s=rate, round=at) for at, rate in enumerate((10.0, 20.0, 30.0))]
    rows += [row("vllm", tok_s=rate, round=at) for at, rate in enumerate((10.0, 10.0, 60.0))]
    rows += [row("llamacpp", tok_s=rate, round=at) for at, rate in enumerate((9.0, 18.0, 27.0))]
    found = figure(Goal("", "decode8", "tok_s", 1.3), repetitions(rows))
    assert (found.peer, found.theirs, found.ratio) == ("vllm", 10.0, 1.0)


def test_less_is_better_for_waits() -> None:
    goal = Goal("", "gap", "worst_ms", 0.5, "most", ours=SPLIT, others=("vllm", "llamacpp"))
    rows = [row(SPLIT, "gap", worst_ms=40.0), row("vllm", "gap", worst_ms=90.0), row("llamacpp", "gap", worst_ms=70.0)]
    found = figure(goal, repetitions(rows))
    assert (found.peer, found.ratio, found.holds) == ("llamacpp", 0.571, False)


def test_what_was_not_measured_is_no_success() -> None:
    goal = Goal("decode", "decode8", "tok_s", 1.3)
    for rows in ([], [row(BOTH, tok_s=5.0)], [row("vllm", tok_s=5.0)]):
        assert figure(goal, repetitions(rows)).holds is None
    alone = figure(goal, repetitions([row(BOTH, tok_s=5.0)]))
    lines = table([alone, absolute("first token", 6.1, 5.0, "s")]).splitlines()
    assert lines[2] == "| decode | 5 | not measured |  | >= 1.3 | ? |"
    assert lines[3] == "| first token | 6.1 |  |  | <= 5 s | **no** |"


def test_repetitions_beside_others_are_counted() -> None:
    assert disturbed([{"other_cores": [0.1, 0.5, None]}, {"other_cores": [0.21]}, {}]) == (2, 3)


def test_a_gap_counts_if_the_prompt_was_there_in_it() -> None:
    stamps = [[0.0, 1.0, 2.0, 5.0, 5.1], [0.0, 0.5, 2.5, 2.6, 9.0]]
    found = peers_gap.summarise(stamps, sent=2.0, first=2.4)
    # 2.6 -> 9.0 begins shortly after the first token; 5.0 -> 5.1 begins long after it
    assert (found.worst_ms, found.usual_ms, found.ttft_ms) == (6400.0, 1000.0, 400.0)
    assert peers_gap.summarise(stamps, sent=2.0, first=2.2).worst_ms == 3000.0


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    """Scripts with the harness's interface: servers, and a client that prints its arguments."""
    scripts, root = tmp_path / "scripts", tmp_path / "root"
    for folder in (scripts, root / "base" / "bin", root / "models" / "M-bfloat16"):
        folder.mkdir(parents=True)
    (root / "base" / "bin" / "python").symlink_to(sys.executable)
    (scripts / "client.py").write_text(
        "import json, sys\n"
        "given = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "if given['--peer'] == 'vllm': sys.exit('no such thing')\n"
        "for test in given['--tests'].split(','):\n"
        "    print(json.dumps({'peer': given['--peer'], 'model': given['--model-tag'], 'test': test,"
        " 'tok_s': float(given['--seed'])}))\n"
    )
    (scripts / "run_peer.py").write_text(
        "import sys\n"
        "def serve(a, env):\n"
        "    return [sys.executable, '-m', 'http.server', str(a.port), '--bind', '127.0.0.1', '-d', str(a.root)], 'm'\n"
        "def broken(a, env):\n"
        "    return [sys.executable, '-c', 'raise SystemExit(\"cannot serve here\")'], 'm'\n"
        "SERVERS = {'vllm': serve, 'llamacpp': broken}\n"
        "sys.exit('this script runs when it is imported')\n"
    )
    (root / "health").touch()
    return Harness(scripts, root)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def await_stop(pid: int) -> None:
    """Waits until the process is suspended. SIGSTOP takes effect when the process is next scheduled."""
    wait_for(lambda: state(pid), lambda now: now == "T", 60.0, "not stopped")


def test_a_peer_runs_only_while_it_is_measured(harness: Harness, tmp_path: Path) -> None:
    assert set(commands(harness)) == {"vllm", "llamacpp"}
    with peer_server(harness, "vllm", tmp_path / "log") as target:
        await_stop(target.pid)
        with target.awake():
            assert state(target.pid) != "T"
            process = target.process
            assert process is not None
            await_health(target.url, process, 60.0, tmp_path / "log")
        await_stop(target.pid)
    assert process.returncode is not None


def test_llamacpp_with_4_bits_is_the_harness_command_with_another_file(harness: Harness) -> None:
    table = "def serve(a, env):\n    return ['llama-server', '-m', f'{a.root}/gguf/M-q8_0.gguf'], 'm'\n"
    (harness.scripts / "run_peer.py").write_text(table + "SERVERS = {'llamacpp-q8': serve}\n")
    command, model = commands(harness)["llamacpp-q4"](Namespace(root=harness.root), {})
    assert (command, model) == (["llama-server", "-m", f"{harness.root}/gguf/M-q4_0.gguf"], "m")
    assert str(harness.missing("llamacpp-q4")).endswith("llama-server")


def test_a_peer_that_does_not_start_says_why(harness: Harness, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="ended with status 1; its last output: cannot serve here"):
        peer_server(harness, "llamacpp", tmp_path / "log").__enter__()


def test_what_is_missing_is_named(harness: Harness, tmp_path: Path) -> None:
    check(harness)
    assert "ov/bin/python" in str(harness.missing("openvino"))
    with pytest.raises(StartupError, match="PEERS= names the peers' harness"):
        check(Harness(tmp_path, harness.root))


def test_rounds_take_turns_and_drop_what_fails(harness: Harness) -> None:
    rounds = Rounds(harness, Load(), deadline=time.monotonic() + 600)
    targets = [Target("llamacpp", "http://x"), Target("transformers", "http://x"), Target("vllm", "http://x")]
    assert rounds.run(targets, 2, ("prefill",)) == 2
    told = [(found["peer"], found["test"], found["tok_s"]) for found in rounds.rows]
    first, second = [(peer, test) for peer, test, _ in told[:4]], [(peer, test) for peer, test, _ in told[4:]]
    assert first == [(p, t) for p in ("llamacpp", "transformers") for t in ("prefill1", "prefill8")]
    assert second == [(p, t) for p in ("transformers", "llamacpp") for t in ("prefill1", "prefill8")]
    assert {seed for *_, seed in told[:4]} != {seed for *_, seed in told[4:]}  # each round has different prompts
    assert rounds.failures == {"vllm M prefill1,prefill8": "no such thing"}


def test_no_round_begins_that_would_end_late(harness: Harness) -> None:
    rounds = Rounds(harness, Load(), deadline=time.monotonic())
    assert rounds.run([Target("llamacpp", "http://x")], 3, ("served",)) == 1


def test_end_reaches_a_stopped_group() -> None:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    os.killpg(process.pid, signal.SIGSTOP)
    end(process)
    assert process.returncode is not None


def test_our_server_answers_and_is_accounted_for(tmp_path: Path) -> None:
    # Many layers, so that decodes last longer than a pause of this process on a busy machine.
    model = make_checkpoint(
        tmp_path / "tiny", dtype=torch.bfloat16, num_hidden_layers=48, max_position_embeddings=16384
    )
    with Served(str(model), ["--num-blocks", "2048", "--roles", "both"], tmp_path / "log") as served:
        assert served.first_token_cpu_s > 0
        found = peers_gap.measure(served.url, streams=3, prompt_len=300, seed=1, most_tokens=8000)
        assert 0 < found.usual_ms <= found.worst_ms
        used = memory(served.pid, weights_bytes(str(model)))
    assert 0 < used.arena < used.total
    assert used.row()["beyond"] == pytest.approx(used.total - used.arena - used.weights, abs=0.1)


def test_the_script_for_transformers_needs_nothing_of_ours() -> None:
    script = Path(peers_gap.__file__).with_name("peers_transformers.py")
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(script), "--help"], capture_output=True, text=True, check=True
    )
    assert "{alone,static}" in done.stdout
