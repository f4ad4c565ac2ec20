"""Implements an optimizer that applies Muon to matrices and Adam to other parameters. Its state is a dict of tensors.

Muon: Keller Jordan 2024, https://kellerjordan.github.io/posts/muon/. The update scale is that of Moonlight
(arXiv:2502.16982), so both optimizers can use one learning rate. Matrices of the same shape are orthogonalized in one
batch.
"""

from __future__ import annotations

import torch
from torch import nn

ADAM_SHARE = 2.0
"""The ratio of Adam's learning rate to Muon's. The embedding's values are large (0.4), so a step at full rate changes
them by about 1.5 %.
"""
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(stack: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Returns semi-orthogonal matrices close to those in `stack` [n, rows, cols], computed by Newton-Schulz iterations
    in bf16.
    """
    a, b, c = _COEFFICIENTS
    x = stack.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(stack.dtype)


class Optimizer:
    """An optimizer that applies Muon to the matrices inside the layers, and Adam to the embedding and the norms."""

    def __init__(self, model: nn.Module, lr: float, weight_decay: float) -> None:
        self.lr, self._weight_decay, self._step = lr, weight_decay, 0
        named = dict(model.named_parameters())
        self._shapes: dict[tuple[int, ...], list[str]] = {}
        self._parameters = named
        self._adam = [name for name, p in named.items() if p.dim() != 2 or "embed" in name]
        for name, parameter in named.items():
            if name not in self._adam:
                self._shapes.setdefault(tuple(parameter.shape), []).append(name)
        self.state = {f"momentum.{n}": torch.zeros_like(p) for n, p in named.items()}
        self.state |= {f"square.{n}": torch.zeros_like(named[n]) for n in self._adam}

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Makes one update from the gradients, at `scale` times the learning rate, and clears the gradients."""
        self._step += 1
        for shape, names in self._shapes.items():
            self._muon(shape, names, self.lr * scale)
        for name in self._adam:
            self._adam_step(name, self.lr * scale * ADAM_SHARE)
        for parameter in self._parameters.values():
            parameter.grad = None

    def resume(self, state: dict[str, torch.Tensor], step: int) -> None:
        for name, value in self.state.items():
            value.copy_(state[name])
        self._step = step

    def _muon(self, shape: tuple[int, ...], names: list[str], lr: float) -> None:
        updates = []
        for name in names:
            momentum, grad = self.state[f"momentum.{name}"], self._grad(name)
            momentum.lerp_(grad, 0.05)
            updates.append(grad.lerp(momentum, 0.95))
        directions = orthogonalise(torch.stack(updates))
        for name, direction in zip(names, directions, strict=True):
            parameter = self._parameters[name]
            parameter.mul_(1 - lr * self._weight_decay).add_(direction, alpha=-lr * 0.2 * max(shape) ** 0.5)

    def _adam_step(self, name: str, lr: float) -> None:
        grad, first, second = self._grad(name), self.state[f"momentum.{name}"], self.state[f"square.{name}"]
        first.lerp_(grad, 0.1)
        second.lerp_(grad.square(), 0.01)
        corrected = (second / (1 - 0.99**self._step)).sqrt_().add_(1e-10)
        self._parameters[name].addcdiv_(first, corrected, value=-lr / (1 - 0.9**self._step))

    def _grad(self, name: str) -> torch.Tensor:
        grad = self._parameters[name].grad
        assert grad is not None
        return grad.float()
