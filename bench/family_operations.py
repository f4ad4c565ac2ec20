"""Shows which operations move a family's fp32 logits away from those of transformers
(`python -m bench.family_operations mixtral gpt-oss`).

Runs transformers' model of a tiny random checkpoint, in which our operations replace torch's: first one of them, then
all but this one. Replaces linear layers, attention and, in families with a native implementation, norms, silu and the
router's softmax. A number is the largest difference from transformers in the output of a layer, or in the logits, as a
fraction of the standard deviation, over 150 positions (`bench.families`). The last row, "Looseleaf", is the engine
itself. It differs from the row "all of ours" if the engine differs from transformers in other operations, too.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from bench.families import CHUNK, runner_of
from engine.config import ExpertsConfig
from engine.foreign import packed_weight
from engine.foreign.model import TransformersModel
from kernels.experts import route
from kernels.paged_prefill import paged_prefill
from kernels.rms_norm import rms_norm
from kernels.silu_mul import silu_mul
from testing.against_transformers import distance, prompt
from testing.oracle import Oracle
from testing.zoo import ZOO, make_foreign

ATTENTION, BLOCK = "looseleaf-alone", 16
LINEARS = {
    "router's product": r"\.(gate|router)\.weight$",
    "lm_head": r"lm_head\.weight$",
    "linear layers of attention": r"\.(self_attn|attention)\.",
    "other linear layers": "",
}
"""Kinds of linear layers, and patterns for the names of their weights. The first pattern that fits counts."""
ELEMENTWISE = ("norms", "silu", "router's softmax")
"""Operations that only a native implementation computes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="+", choices=sorted(ZOO))
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights (default: %(default)s)")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    AttentionInterface.register(ATTENTION, attention)  # type: ignore[no-untyped-call]
    AttentionMaskInterface.register(ATTENTION, eager_mask)  # type: ignore[no-untyped-call]
    for family in arguments.families:
        with tempfile.TemporaryDirectory() as directory:
            print("\n".join(table(family, make_foreign(directory, ZOO[family], seed=arguments.seed))))


def table(family: str, path: Path) -> Iterator[str]:
    """Yields the lines of a family's table."""
    runner = runner_of(path, "float32")
    tokens = prompt(runner.config.vocab_size)
    is_native = not isinstance(runner.model, TransformersModel)
    experts = runner.config.experts if is_native else None
    every = {*LINEARS, "attention", *(ELEMENTWISE if is_native else ())}

    def outputs(ours: Set[str]) -> list[Tensor]:
        return outputs_of(model_with(path, ours, experts), tokens)

    theirs = outputs(set())
    layers = " | ".join(f"layer {number}" for number in range(len(theirs) - 1))
    yield f"\n| {family}, {'native' if is_native else 'by transformers'} | {layers} | logits | all but this: logits |"
    yield "|---" * (len(theirs) + 2) + "|"
    for operation in (*LINEARS, "attention", *ELEMENTWISE):
        if operation in every:
            alone, rest = distances(outputs({operation}), theirs), distances(outputs(every - {operation}), theirs)
            yield f"| {operation} | {' | '.join(alone)} | {rest[-1]} |"
    yield f"| all of ours | {' | '.join(distances(outputs(every), theirs))} | |"
    engine = Oracle(runner).logits(tokens, chunk=CHUNK)
    yield f"| Looseleaf | {'| ' * (len(theirs) - 1)}{distance(engine, theirs[-1]):.1e} | |"


def distances(ours: list[Tensor], theirs: list[Tensor]) -> list[str]:
    return [f"{distance(a, b):.1e}" for a, b in zip(ours, theirs, strict=True)]


def outputs_of(model: Any, tokens: list[int]) -> list[Tensor]:
    """Returns the outputs of the model's layers, and its logits, as float64 [T, width]."""
    found: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        found.append((output if isinstance(output, Tensor) else output[0])[0].double())

    for layer in model.model.layers:
        layer.register_forward_hook(keep)
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0].double()
    return [*found, logits]


def model_with(path: Path, ours: Set[str], experts: ExpertsConfig | None) -> Any:
    """Returns transformers' model of a checkpoint, in which the operations `ours` are replaced by our own."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=ATTENTION if "attention" in ours else "eager",
        experts_implementation="eager",
    )  # fmt: skip
    model.eval().requires_grad_(False)
    all_matrices = packed_weight._matrices_of

    def chosen(of: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
        return (each for each in all_matrices(of) if kind_of(f"{each[0]}.{each[2]}") in ours)

    with mock.patch.object(packed_weight, "_matrices_of", chosen):
        packed_weight.pack(model, deterministic=True)
    for name, module in model.named_modules():
        if "norms" in ours and hasattr(module, "variance_epsilon"):
            module.forward = _norm(module)
        if "silu" in ours and hasattr(module, "act_fn"):
            module.act_fn = Silu()
        if "router's softmax" in ours and experts is not None and name.endswith(".gate"):
            module.forward = _router(module, experts)
    return model


def kind_of(weight: str) -> str:
    return next(kind for kind, pattern in LINEARS.items() if re.search(pattern, weight))


class Silu(nn.Module):
    def forward(self, gate: Tensor) -> Tensor:
        return silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=-1))


def _norm(module: Any) -> Any:
    return lambda x: rms_norm(x.contiguous(), module.weight, module.variance_epsilon)


def _router(module: Any, how: ExpertsConfig) -> Any:
    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = F.linear(x.reshape(-1, x.shape[-1]), module.weight)
        return scores, *route(scores, how.per_token, renormalize=how.renormalize, round_weights=False)

    return forward


def attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **more: Any
) -> tuple[Tensor, None]:
    """Maps q [1, H, T, D], k and v [1, KVH, T, D] to [1, T, H, D] with our kernel, as transformers' interface asks."""
    tokens = q.shape[2]
    blocks, lens = -(-tokens // BLOCK), torch.tensor([tokens], dtype=torch.int32)
    keys, values = (
        F.pad(x[0], (0, 0, 0, blocks * BLOCK - tokens)).unflatten(1, (blocks, BLOCK)).transpose(0, 1) for x in (k, v)
    )
    out = paged_prefill(
        q[0].transpose(0, 1), keys, values, torch.arange(blocks, dtype=torch.int32)[None], lens,
        torch.tensor([0, tokens], dtype=torch.int32), softmax_scale=scaling, window=more.get("sliding_window"),
        softcap=more.get("softcap"), sinks=more.get("s_aux"),
    )  # fmt: skip
    return out[None], None


if __name__ == "__main__":
    main()
