"""The second half of a decoder layer, which is either a gated MLP or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.config import Activation, ExpertsConfig, ModelConfig
from engine.loader import Weights
from engine.models.attention import Projection
from kernels.experts import route
from kernels.gelu_mul import gelu_mul
from kernels.linear import PackedLinear
from kernels.silu_mul import silu_mul

Product = Callable[[Projection, torch.Tensor], torch.Tensor]
"""A function that computes a linear layer for the rows of a step (`StepMetadata.linear`)."""
GATED: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {"silu": silu_mul, "gelu_tanh": gelu_mul}


@dataclass(frozen=True, slots=True)
class Mlp:
    """A gated MLP, down(activation(gate) * up), with hidden size h and intermediate size i."""

    gate_up: PackedLinear  # h -> 2 i
    down: Projection  # i -> h
    activation: Activation

    @classmethod
    def load(cls, c: ModelConfig, weights: Weights, at: str) -> Mlp:
        """Loads the layers of an MLP. `at` is the prefix of their tensors in the checkpoint."""
        h, i = c.hidden_size, c.intermediate_size
        names, sizes = [f"{at}gate_proj", f"{at}up_proj"], [[i], [i]]
        if c.fused_projections:
            names, sizes = [f"{at}gate_up_proj"], [[i, i]]
        return cls(
            weights.columns(names, sizes, h, bias=c.mlp_bias),
            weights.rows(f"{at}down_proj", h, i, bias=c.mlp_bias),
            c.activation,
        )

    @property
    def linears(self) -> Sequence[Projection]:
        return self.gate_up, self.down

    def __call__(self, x: torch.Tensor, product: Product) -> torch.Tensor:
        """Maps [T, h] to [T, h]."""
        return product(self.down, GATED[self.activation](product(self.gate_up, x)))


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts. It computes, for each token, a weighted sum of the outputs of the chosen experts. Results
    are added in the order of the experts' numbers, so that a token's bits do not depend on other tokens.
    """

    router: PackedLinear  # h -> experts
    experts: Sequence[Mlp]
    how: ExpertsConfig

    @classmethod
    def load(cls, c: ModelConfig, how: ExpertsConfig, weights: Weights, at: str) -> Mixture:
        """Loads the router and the experts of a layer. `at` is the prefix of the layer's tensors in the checkpoint."""
        h, i = c.hidden_size, how.intermediate_size
        router, experts, gate, up, down = how.names

        def expert(number: int) -> Mlp:
            own = f"{at}{experts}.{number}."
            gate_up = weights.linear([f"{own}{gate}", f"{own}{up}"], [i, i], h)
            return Mlp(gate_up, weights.linear([f"{own}{down}"], [h], i), c.activation)

        scores = weights.linear([f"{at}{router}"], [how.count], h, is_router=True)
        return cls(scores, [expert(number) for number in range(how.count)], how)

    @property
    def linears(self) -> Sequence[Projection]:
        return self.router, *(linear for expert in self.experts for linear in expert.linears)

    def __call__(self, x: torch.Tensor, product: Product) -> torch.Tensor:
        """Maps [T, h] to [T, h]. `product` is ignored, because adapters do not change routers and experts."""
        how = self.how
        weights, chosen = route(
            self.router(x), how.per_token, renormalize=how.renormalize, round_weights=how.round_weights
        )
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows, places = (chosen == number).nonzero(as_tuple=True)
            answer = self.experts[number](x[rows], PackedLinear.__call__)
            out[rows] += (answer.float() * weights[rows, places, None]).to(x.dtype)
        return out
