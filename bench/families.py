"""Compares every model family in `testing.zoo` with transformers, and writes the table in docs/models.md
(`python -m bench.families`).

A family that has a native implementation runs natively. Uses tiny random checkpoints in fp32 on this CPU. A distance is
the largest difference between the logits of two computations, as a fraction of the logits' standard deviation, over 150
positions. Looseleaf's logits are computed in chunks of 24. "rounded" is the distance of transformers from its own
definition with every operation rounded correctly. Where this distance exceeds 2e-5, an implementation can be within
2e-5 of transformers only if most of its operations round as torch's do (`bench.family_operations`). The table also
shows whether a row has the same bits when tokens are computed one by one and in chunks, in fp32 and in bf16. Prints how
many distances are within 2e-5.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from engine.config import read_json
from engine.errors import ModelError
from engine.foreign.model import TransformersModel
from engine.model_runner import ModelRunner, RunnerSettings
from testing.against_transformers import CorrectlyRounded, by_transformers, distance, prompt
from testing.oracle import Oracle
from testing.zoo import REFUSED, ZOO, make_foreign

PAGE = Path(__file__).parents[1] / "docs/models.md"
BEGIN, END = "<!-- made by python -m bench.families -->", "<!-- end -->"
CHUNK = 24
CLOSE = 2e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PAGE)
    out: Path = parser.parse_args().out
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    before, rest = out.read_text().split(BEGIN)
    lines = list(rows())
    table = "\n".join([BEGIN, "", *lines, "", END])
    out.write_text(before + table + rest.split(END)[1])
    distances = [float(line.split("|")[5]) for line in lines if "e-0" in line]
    print(f"{sum(far <= CLOSE for far in distances)} of {len(distances)} families are within {CLOSE:g}")


def rows() -> Iterator[str]:
    """Yields the lines of the table."""
    yield f"transformers {transformers.__version__}, torch {torch.__version__}."
    yield ""
    titles = ("checkpoint", "architecture", "runs", "attention", "distance", "rounded", "float64: ours, theirs", "rows")
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for name in sorted(ZOO):
        with tempfile.TemporaryDirectory() as directory:
            yield row(name, make_foreign(directory, ZOO[name]))
    for name in sorted(REFUSED):
        with tempfile.TemporaryDirectory() as directory:
            path = make_foreign(directory, REFUSED[name])
            try:
                runner_of(path, "float32")
            except ModelError as error:
                yield f"| {name} | refused: {str(error).replace(directory, 'DIRECTORY')} | | | | | | |"
            else:
                raise AssertionError(f"{name} is no longer refused")


def row(name: str, path: Path) -> str:
    runner = runner_of(path, "float32")
    ids = prompt(runner.config.vocab_size)
    ours, theirs = Oracle(runner).logits(ids, chunk=CHUNK).double(), by_transformers(path, ids)
    with CorrectlyRounded():
        rounded = by_transformers(path, ids)
    exact = by_transformers(path, ids, torch.float64)
    bits = ["same" if steady(runner_of(path, dtype), ids) else "differ" for dtype in ("float32", "bfloat16")]
    [architecture] = read_json(path / "config.json")["architectures"]
    runs = "by transformers" if isinstance(runner.model, TransformersModel) else "natively"
    what = f"{name} | {architecture} | {runs} | {peculiar(runner)}"
    pairs = ((ours, theirs), (theirs, rounded), (ours, exact), (theirs, exact))
    far, far_rounded, *to_exact = (f"{distance(a, b):.1e}" for a, b in pairs)
    return f"| {what} | {far} | {far_rounded} | {', '.join(to_exact)} | {', '.join(bits)} |"


def steady(runner: ModelRunner, ids: list[int]) -> bool:
    oracle = Oracle(runner)
    alone = oracle.logits(ids, chunk=1)
    return all(torch.equal(oracle.logits(ids, chunk=chunk), alone) for chunk in (5, CHUNK, len(ids)))


def peculiar(runner: ModelRunner) -> str:
    """Returns a description of how the layers' attention differs from causal attention over all keys."""
    model, layers, found = runner.model, runner.config.layers, []
    if states := sum(layer.state_bytes > 0 for layer in layers):
        found.append(f"states in {states} of {len(layers)} layers")
    attending = sum(layer.attends for layer in layers)
    if windowed := sum(layer.window is not None for layer in layers):
        found.append("window" if windowed == attending else f"window in {windowed} of {attending} layers")
    if isinstance(model, TransformersModel):
        facts = list(model.layers.values())
        found += [what for what in ("softcap", "sinks") if any(getattr(layer, what) is not None for layer in facts)]
        if any(layer.key_dim != layer.value_dim for layer in facts):
            found.append("keys wider than values")
    elif runner.config.softcap is not None:
        found.append("softcap")
    return ", ".join(found) or "full"


def runner_of(path: Path, dtype: str) -> ModelRunner:
    how = {"dtype": dtype, "device": "cpu", "block_size": 16}
    return ModelRunner(RunnerSettings(path, **how))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
