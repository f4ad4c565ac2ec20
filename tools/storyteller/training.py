"""The training loop, with a constant learning rate followed by a linear decay that can be requested at any time.

It runs on one CPU thread or on a GPU. A checkpoint is a safetensors file with model, optimizer state and progress.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .data import Batches
from .init import Planted
from .model import Llama
from .optim import Optimizer


@dataclass(frozen=True, slots=True)
class Plan:
    """The schedule of a run. The decay starts at step `max_steps - decay_steps`, or earlier at `decay_at` or when the
    file `finish` appears.
    """

    max_steps: int = 3600
    decay_steps: int = 700
    warmup_steps: int = 60
    batch_tokens: int = 4096
    lr: float = 3e-3
    weight_decay: float = 0.05
    hold_steps: int = 700
    """The number of steps for which the copying heads stay fixed."""
    eval_every: int = 50
    save_every_s: float = 240.0
    decay_at: str | None = None
    """The latest time at which the decay starts, "HH:MM" UTC, or None for no limit."""
    end_at: str | None = None
    """The latest time at which the decay ends, "HH:MM" UTC, or None for no limit. The schedule follows the steps or the
    clock, whichever is further ahead.
    """


@dataclass(slots=True)
class Progress:
    """The progress of a run, saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    decay_start: int | None = None
    curve: list[list[float]] | None = None
    """Rows of step, tokens, training loss, and the losses of up to three held-out sets."""


class Trainer:
    def __init__(
        self, model: Llama, batches: Batches, held_out: dict[str, np.ndarray], plan: Plan, folder: Path
    ) -> None:
        self.model, self.plan, self.folder = model, plan, folder
        self.device = next(model.parameters()).device
        self.progress = Progress(curve=[])
        self._batches, self._held_out = batches, held_out
        self._optimizer = Optimizer(model, plan.lr, plan.weight_decay)
        self._loss = torch.compile(model.loss, dynamic=False)
        self._decay_clock: float | None = None

    def run(self) -> None:
        """Trains to the end of the plan, from the checkpoint in the folder if there is one."""
        self._resume()
        self._planted = Planted(self.model)
        saved, losses, scale = time.time(), list[float](), 1.0
        while scale > 0:
            start = time.time()
            losses.append(self._train_step(scale))
            self.progress.seconds += time.time() - start
            if self.progress.step % 20 == 0:
                rate = self.progress.tokens / self.progress.seconds
                _log(f"step {self.progress.step} loss {np.mean(losses[-20:]):.4f} scale {scale:.3f} tok/s {rate:.0f}")
            if self.progress.step % self.plan.eval_every == 0:
                self._record(float(np.mean(losses[-self.plan.eval_every :])))
            if time.time() - saved > self.plan.save_every_s:
                self.save()
                saved = time.time()
            scale = self._scale()
        self._record(float(np.mean(losses[-20:])))
        self.save()
        _log("finished")

    def _train_step(self, scale: float) -> float:
        rows = torch.from_numpy(self._batches.next()).long().to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self._loss(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        loss.backward()
        self._optimizer.step(scale)
        if self.progress.step < self.plan.hold_steps:
            self._planted.restore()
        self.progress.step += 1
        self.progress.tokens += rows.shape[0] * (rows.shape[1] - 1)
        return float(loss.detach())

    def _scale(self) -> float:
        """Returns the factor of the learning rate for the next step, which is 0 at the end of the run."""
        p, plan = self.progress, self.plan
        if p.decay_start is None and self._should_decay():
            p.decay_start = p.step
            _log(f"decay starts at step {p.step}")
        if p.decay_start is None:
            return min(1.0, (p.step + 1) / plan.warmup_steps)
        if self._decay_clock is None:
            self._decay_clock = time.time()
        done = (p.step - p.decay_start) / plan.decay_steps
        if plan.end_at is not None:
            span = max(_today(plan.end_at) - self._decay_clock, 1.0)
            done = max(done, (time.time() - self._decay_clock) / span)
        return max(0.0, 1.0 - done)

    def _should_decay(self) -> bool:
        late = self.plan.decay_at is not None and time.time() >= _today(self.plan.decay_at)
        return (
            late
            or self.progress.step >= self.plan.max_steps - self.plan.decay_steps
            or (self.folder / "finish").exists()
        )

    def _record(self, train_loss: float) -> None:
        losses = evaluate(self.model, self._held_out, self.device)
        assert self.progress.curve is not None
        self.progress.curve.append(
            [self.progress.step, self.progress.tokens, round(train_loss, 4), *list(losses.values())[:3]]
        )
        _log(f"held out at step {self.progress.step}: " + " ".join(f"{k} {v:.4f}" for k, v in losses.items()))

    # --- checkpoints

    def save(self) -> None:
        tensors = {f"model.{n}": p.detach().cpu() for n, p in self.model.named_parameters()}
        tensors |= {f"optimizer.{n}": t.cpu() for n, t in self._optimizer.state.items()}
        p = self.progress
        facts = {
            "step": p.step,
            "tokens": p.tokens,
            "seconds": p.seconds,
            "decay_start": p.decay_start,
            "curve": p.curve,
        }
        temporary = self.folder / "checkpoint.tmp"
        save_file(tensors, temporary, metadata={"progress": json.dumps(facts)})
        os.replace(temporary, self.folder / "checkpoint.safetensors")
        _log(f"saved at step {p.step}")

    def _resume(self) -> None:
        path = self.folder / "checkpoint.safetensors"
        if not path.exists():
            return
        tensors, self.progress = read_checkpoint(path)
        load_parameters(self.model, tensors)
        state = {n.removeprefix("optimizer."): t for n, t in tensors.items() if n.startswith("optimizer.")}
        self._optimizer.resume(state, self.progress.step)
        for _ in range(self.progress.step):  # skips the batches that have already been used
            self._batches.next()
        _log(f"resumed at step {self.progress.step}")


def read_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], Progress]:
    with safe_open(path, framework="pt") as file:
        progress = Progress(**json.loads(file.metadata()["progress"]))
        return {name: file.get_tensor(name) for name in file.keys()}, progress  # noqa: SIM118


@torch.no_grad()
def load_parameters(model: Llama, tensors: dict[str, torch.Tensor]) -> None:
    """Loads the model's parameters from a checkpoint, in which their names begin with "model."."""
    for name, parameter in model.named_parameters():
        parameter.copy_(tensors[f"model.{name}"])


@torch.no_grad()
def evaluate(model: Llama, held_out: dict[str, np.ndarray], device: torch.device) -> dict[str, float]:
    """Returns the mean loss in nats per token of each held-out set of rows [n, length + 1]."""
    losses = {}
    for name, rows in held_out.items():
        ids = torch.from_numpy(rows).long().to(device)
        with torch.autocast(device.type, torch.bfloat16):
            parts = [float(model.loss(part[:, :-1], part[:, 1:])) for part in ids.split(4)]
        losses[name] = round(float(np.mean(parts)), 4)
    return losses


def _today(clock: str) -> float:
    hour, minute = map(int, clock.split(":"))
    return datetime.now(UTC).replace(hour=hour, minute=minute, second=0, microsecond=0).timestamp()


def _log(line: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {line}", flush=True)
