"""Replaces the functions in which transformers' recurrent layers combine positions, and determines the sizes of their
states.

These layers call functions of their own Python module for the causal convolution and for the recurrence. `install`
replaces these functions in the modules of a model's layers. Outside Looseleaf's forward passes, the original functions
run.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import UnsupportedModel
from engine.foreign.attention_hook import HARMLESS, StateFacts, running
from engine.foreign.steady import steady
from kernels.recurrence import Recurrence

IGNORED = {"chunk_size", "use_mambapy", "use_associative_scan"}
"""Arguments that affect only how a result is computed."""
_STATE_ARGUMENTS = ("output_final_state", "return_final_states", "return_last_state")


def mixers_of(model: nn.Module) -> dict[int, nn.Module]:
    """Returns the modules with a recurrent state, by the index of their layer. They are recognized by their
    convolution. Raises UnsupportedModel if such a module does not belong to exactly one layer.
    """
    found: dict[int, nn.Module] = {}
    for module in model.modules():
        if convolution_of(module) is not None:
            layer = getattr(module, "layer_idx", None)
            if not isinstance(layer, int) or layer in found:
                raise UnsupportedModel(f"{type(module).__name__} does not belong to exactly one layer")
            found[layer] = module
    return found


def convolution_of(module: nn.Module) -> nn.Conv1d | None:
    return next((child for child in module.children() if isinstance(child, nn.Conv1d)), None)


def facts_of(mixer: nn.Module) -> StateFacts:
    """Returns the size of a recurrent layer's state, computed from the layer's attributes."""
    convolution = convolution_of(mixer)
    assert convolution is not None
    kept = (convolution.kernel_size[0] - 1) * convolution.out_channels
    for names in (
        ("num_v_heads", "head_k_dim", "head_v_dim"),
        ("num_heads", "head_dim", "ssm_state_size"),
        ("intermediate_size", "ssm_state_size"),
    ):
        if all(hasattr(mixer, name) for name in names):
            return StateFacts(kept, math.prod(getattr(mixer, name) for name in names))
    return StateFacts(kept)


def install(model: nn.Module) -> None:
    """Replaces the functions that the model's recurrent layers call. Replacements are not replaced again."""
    for layer, mixer in mixers_of(model).items():
        mixer.register_forward_pre_hook(functools.partial(_enter, layer))
        module = sys.modules[type(mixer).__module__]
        for name, answer in _ANSWERS.items():
            original = getattr(module, name, None)
            if original is not None and not hasattr(original, "looseleaf"):
                setattr(module, name, _answered(original, answer))


def _enter(layer: int, mixer: nn.Module, args: Any) -> None:
    if (call := running()) is not None:
        call.layer = layer


def _answered(original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if running() is None:
            return original(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # a torch function mode costs microseconds per call
            return answer(*args, **kwargs)

    replaced.looseleaf = True  # type: ignore[attr-defined]
    return replaced


def _refuse_unknown(function: str, asked: dict[str, Any]) -> None:
    """Raises UnsupportedModel if an argument is not known to be harmless, or if the final state is requested."""
    allowed = {*HARMLESS, *IGNORED, *_STATE_ARGUMENTS}
    if unknown := sorted(name for name, value in asked.items() if value is not None and name not in allowed):
        raise UnsupportedModel(f"{function} has unsupported arguments: {', '.join(unknown)}")
    if any(asked.get(name) for name in _STATE_ARGUMENTS):
        raise UnsupportedModel(f"{function} requests the final state, which is not supported")


def _recur(inputs: Recurrence) -> Tensor:
    """Returns the outputs fp32 [T, H, P] of the current layer's recurrence."""
    call = running()
    assert call is not None
    return call.recur(call.layer, inputs)


def _convolve(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **asked: Any
) -> Tensor:
    """Replaces `causal_conv1d_fn`. Maps [1, C, T] to [1, C, T]; `weight` is [C, taps]."""
    _refuse_unknown("causal_conv1d_fn", asked)
    if activation not in (None, "silu", "swish"):
        raise UnsupportedModel(f"causal_conv1d_fn takes activation {activation}")
    call = running()
    assert call is not None
    out = call.convolve(call.layer, hidden_states[0].T, weight, bias, activation is not None)
    return out.T[None]


def _mamba2(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")),
    **asked: Any,
) -> Tensor:  # fmt: skip
    """Replaces `mamba2_chunk_scan`. Maps [1, T, H, P] to fp32 of the same shape. dt: [1, T, H]; A: [H]; B, C: [1, T, G,
    N].
    """
    _refuse_unknown("mamba2_chunk_scan", asked)
    steps = _time_steps(dt[0], dt_bias, dt_softplus).clamp(*dt_limit)
    x = hidden_states[0].float()
    decay = steady(torch.exp, A.float() * steps)
    out = _recur(Recurrence(x * steps[..., None], B[0].float(), C[0].float(), decay))
    return (out if D is None else out + D.float()[:, None] * x)[None]


def _mamba(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False, **asked: Any,
) -> Tensor:  # fmt: skip
    """Replaces `mamba_selective_scan`. Maps [1, P, T] to fp32 of the same shape. dt, z: [1, P, T]; A: [P, N]; B, C: [1,
    N, T].
    """
    _refuse_unknown("mamba_selective_scan", asked)
    x, steps = hidden_states[0].T.float(), _time_steps(dt[0].T, delta_bias, delta_softplus)
    keys, queries = B[0].T.float()[:, None], C[0].T.float()[:, None]
    out = _recur(Recurrence((x * steps)[:, None], keys, queries, steps[:, None], rates=A.float().T[None]))[:, 0]
    out = out if D is None else out + D.float() * x
    return (out if z is None else out * steady(F.silu, z[0].T.float())).T[None]


def _time_steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Returns the step sizes of a discretized state space, in fp32."""
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return steady(F.softplus, dt) if softplus else dt


def _gated_delta(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: None = None,
    use_qk_l2norm_in_kernel: bool = False, **asked: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Replaces `torch_chunk_gated_delta_rule`. Maps value [1, T, H, P] to the same shape. query, key: [1, T, G, N]; g,
    beta: [1, T, H].
    """
    _refuse_unknown("torch_chunk_gated_delta_rule", asked)
    queries, keys = query[0].float(), key[0].float()
    if use_qk_l2norm_in_kernel:
        queries, keys = _normalized(queries), _normalized(keys)
    queries = queries * queries.shape[-1] ** -0.5
    decay = steady(torch.exp, g[0].float())
    out = _recur(Recurrence(value[0].float(), keys, queries, decay, beta=beta[0].float()))
    return out.to(query.dtype)[None], None


def _normalized(x: Tensor) -> Tensor:
    """Normalizes vectors to length 1, as transformers' `l2norm` does."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


_ANSWERS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba,
    "torch_chunk_gated_delta_rule": _gated_delta,
}
