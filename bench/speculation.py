"""Compares decoding with and without speculation, on repeated text and on stories: `python -m bench.speculation`.

Runs a real decode worker with a real arena and a private Redis, but without RPC, over the built-in model. Runs with and
without drafts alternate, on the same runner, and their tokens must be equal.

Drafts come from n-grams or, with `--draft-layers N`, from a draft model of the model's first N layers, which nobody has
trained. With `--weak-layers F`, the model is random, and what its other layers add is multiplied by F, so that the
first N layers predict many of its tokens: then the bench shows what a good draft model of this size would gain.

The built-in model is too small to copy a text by itself. A grammar therefore prescribes the repeated texts: a copy of a
story in the prompt (copy), the story with a different name (edit), and further records like those in the prompt (json).
The grammar's masks are computed in both kinds of runs. Stories are sampled without a grammar.

`ratio` is the median, over the rounds, of the tokens per second with drafts divided by those without. `cpu_ratio` is
the same for tokens per second of CPU time. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from block_store.redis import redis_server
from common.types import SamplingParams, StoppingParams, StructuredOutput
from decode_svc.draft_policy import DraftLimits, DraftPolicy
from decode_svc.model_speculation import ModelSpeculation
from decode_svc.ngram import NgramDrafter
from decode_svc.speculation import Speculation
from engine.draft_model import DraftModel, load_draft_model, num_draft_blocks
from engine.model_runner import ModelRunner, RunnerSettings
from testing.decode import DecodeBench
from testing.first_layers import first_layers, with_weak_layers
from worker.grammars import Grammars

MODEL = Path(__file__).resolve().parents[1] / "models" / "storyteller"
RUNS = ("copy:1", "edit:1", "json:1", "story:1", "story:8", "story:32", "copy:8")
STORY = (
    "Once upon a time, there was a little fox named {0}. {0} lived in a green forest near a river. One day, {0} found "
    "a shiny stone under a tree. {0} wanted to show the stone to a friend. The friend was happy and said thank you. "
    "They played together until the sun went down, and then {0} went home to sleep. "
)
RECORD = '{{"name": "{0}", "animal": "fox", "home": "forest", "likes": ["stones", "trees", "rivers"]}},\n'
NAMES = ("Tim", "Lily", "Max", "Anna", "Tom", "Mia", "Ben", "Lucy")


class Run(NamedTuple):
    """The result of one run."""

    tokens_per_s: float
    tokens_per_cpu_s: float
    tokens: dict[int, list[int]]
    num_drafted: int
    num_accepted: int


class Task(NamedTuple):
    """A prompt, and the text that must follow it, or None for any text."""

    prompt: str
    answer: str | None


def tasks_of(kind: str, batch: int) -> list[Task]:
    """Returns a task for each sequence of a batch."""
    found = []
    for number in range(batch):
        name, other = NAMES[number % len(NAMES)], NAMES[(number + 3) % len(NAMES)]
        found.append(
            {
                "copy": Task(STORY.format(name), STORY.format(name)),
                "edit": Task(STORY.format(name), STORY.format(other)),
                "json": Task(RECORD.format(name) * 3, RECORD.format(name) + RECORD.format(other) * 2),
                "story": Task(f"Once upon a time, there was a boy named {name}. One day in spring {number}, he", None),
            }[kind]
        )
    return found


class Subject:
    """The model, and workers with and without drafts over the same runner."""

    def __init__(self, directory: Path, client: Any, args: argparse.Namespace) -> None:
        settings = RunnerSettings(
            args.model, num_threads=args.num_threads, device="cpu", max_model_len=768, load_format=args.load_format
        )
        self.runner, self._directory, self._client, self._args = ModelRunner(settings), directory, client, args
        self._tokenizer: Any = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        self._grammars = Grammars(str(MODEL), self.runner.config.vocab_size)
        limits = DraftLimits(args.num_speculative_tokens, 64, self.runner.layout.block_size, 768)
        self._speculation: DraftPolicy
        if args.draft_layers is None:
            self._speculation = Speculation(NgramDrafter(args.prompt_lookup_max, args.prompt_lookup_min), limits)
        else:
            draft = first_layers(args.model, directory / "draft", args.draft_layers)
            runner = load_draft_model(str(draft), self.runner)
            self._speculation = ModelSpeculation(DraftModel(runner, num_draft_blocks(runner, 64, 1 << 29)), limits)
        self._num_runs = 0

    def run(self, tasks: list[Task], *, drafts: bool) -> Run:
        """Decodes all tasks at the same time, to their end."""
        self._num_runs += 1
        before = self._speculation.counts
        num_blocks = 32 + len(tasks) * (self.runner.max_blocks + 1)
        bench = DecodeBench(
            self.runner, self._directory / str(self._num_runs), self._client, num_blocks=num_blocks, reserve=16,
            speculation=self._speculation if drafts else None,
        )  # fmt: skip
        for handle, task in enumerate(tasks):
            self._submit(bench, handle, task)
        began, cpu_began = time.perf_counter(), time.process_time()
        bench.run(100_000)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        tokens = {handle: bench.inbox.ids(handle)[0] for handle in range(len(tasks))}
        bench.held.give_up_reserve()
        bench.close()
        now = self._speculation.counts
        accepted = sum(now.accepted_by_position) - sum(before.accepted_by_position)
        num_tokens = sum(map(len, tokens.values()))
        return Run(
            num_tokens / seconds, num_tokens / cpu_s, tokens, now.num_draft_tokens - before.num_draft_tokens, accepted
        )

    def _submit(self, bench: DecodeBench, handle: int, task: Task) -> None:
        """Prefills a task, and prescribes the text that follows its first token."""
        prompt = self._tokenizer.encode(task.prompt).ids
        sampling = SamplingParams(temperature=self._args.temperature if task.answer is None else 0.0, seed=handle)
        made = bench.prefilled(handle, prompt, sampling, StoppingParams(max_tokens=self._args.max_tokens))
        if task.answer is not None:
            [sequence] = made.group.sequences
            text = self._tokenizer.decode(sequence.output_ids) + task.answer
            sequence.sampling = replace(sampling, structured=StructuredOutput("choice", options=(text,)))
            self._grammars.attach([sequence])
        bench.worker.submit(bench.inbox.session, *made)


def compare(subject: Subject, kind: str, batch: int, rounds: int) -> dict[str, Any]:
    """Returns the figures of one kind of text at one batch size."""
    tasks = tasks_of(kind, batch)
    plain, drafted, ratios, cpu_ratios = [], [], [], []
    for number in range(rounds + 1):  # the first round warms up
        order = (False, True) if number % 2 else (True, False)
        runs = {drafts: subject.run(tasks, drafts=drafts) for drafts in order}
        assert runs[True].tokens == runs[False].tokens, "drafts changed a token"
        if number:
            plain.append(runs[False].tokens_per_s)
            drafted.append(runs[True].tokens_per_s)
            ratios.append(drafted[-1] / plain[-1])
            cpu_ratios.append(runs[True].tokens_per_cpu_s / runs[False].tokens_per_cpu_s)
    return {
        "text": kind, "batch": batch, "plain": round(statistics.median(plain)),
        "drafts": round(statistics.median(drafted)), "ratio": round(statistics.median(ratios), 3),
        "lowest": round(min(ratios), 3), "cpu_ratio": round(statistics.median(cpu_ratios), 3),
        "drafted": runs[True].num_drafted, "accepted": runs[True].num_accepted,
    }  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="a different model, for stories only")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--runs", nargs="+", default=RUNS, help="kinds of text and batch sizes: copy:1 story:32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--temperature", type=float, default=0.8, help="of stories")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--num-speculative-tokens", type=int, default=7)
    parser.add_argument("--draft-layers", type=int, help="number of layers of a draft model")
    parser.add_argument("--weak-layers", type=float, help="factor of the other layers of a random model; see above")
    parser.add_argument("--prompt-lookup-max", type=int, default=4)
    parser.add_argument("--prompt-lookup-min", type=int, default=3)
    args = parser.parse_args()
    if args.model != MODEL and any(not run.startswith("story:") for run in args.runs):
        parser.error("--model: repeated texts need the built-in model's tokens; choose --runs story:1")
    if args.weak_layers is not None and (args.draft_layers is None or args.load_format == "dummy"):
        parser.error("--weak-layers needs --draft-layers, and writes weights, so there is no --load-format dummy")
    return args


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory(prefix="ll-bench-", dir="/dev/shm") as name:
        redis = redis_server.connect(None, Path(name))
        if args.weak_layers is not None:
            args.model = with_weak_layers(args.model, Path(name) / "model", args.draft_layers, args.weak_layers)
        subject = Subject(Path(name), redis.client, args)
        gc.freeze()  # as the services do
        runs = []
        for kind, _, batch in (run.partition(":") for run in args.runs):
            runs.append(compare(subject, kind, int(batch), args.rounds))
            print("  ".join(f"{key} {value}" for key, value in runs[-1].items()), flush=True)
        redis.close()
    what = {
        "model": args.model.name,
        "draft_layers": args.draft_layers,
        "weak_layers": args.weak_layers,
        "temperature": args.temperature,
    }
    print(json.dumps({"bench": "speculation", **what, "runs": runs}))


if __name__ == "__main__":
    main()
