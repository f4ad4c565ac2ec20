"""A model whose definition comes from transformers, and which runs over our blocks with our linear layers. No code from
a checkpoint is executed.

A forward pass runs transformers' code over one packed row of tokens, without a cache. `attention_hook` computes
attention, `state_hook` recurrences, and `packed_weight` products with matrices. All other operations are those of
transformers, but `steady` and `steady_rope` make elementwise functions and rotary positions independent of the other
tokens.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn

from common.digests import check_digests
from engine.checkpoint import weight_files
from engine.config import ModelConfig
from engine.errors import ModelError, UnsupportedModel
from engine.foreign import attention_hook, packed_weight, state_hook
from engine.foreign import config as foreign_config
from engine.foreign.attention_hook import LayerFacts, Pass, Recorder, StateFacts
from engine.foreign.steady import Steady
from engine.foreign.steady_rope import steady_rope
from engine.kv_groups import LayerMemory
from engine.loader import LoadFormat, Target
from engine.lora import Site
from engine.models.attention import LayerCache, StepMetadata

logger = logging.getLogger("engine")
RECORDED_TOKENS = 2


class TransformersModel:
    """A model of transformers that maps token ids [T] to logits of the requested rows [R, vocab], like `Decoder`."""

    sites: ClassVar[Sequence[Site]] = ()
    """Empty, because adapters are not supported."""

    def __init__(
        self, directory: Path, config: ModelConfig, target: Target, load_format: LoadFormat, seed: int, max_len: int
    ) -> None:
        """Builds the model. Raises ModelError if it cannot be built. The error is an UnsupportedModel if the
        architecture or a feature of the model is not supported.
        """
        import transformers

        self.is_variant = False
        """Whether a row is known to depend on the other rows of its batch (`row_check`)."""
        self._version = transformers.__version__
        attention_hook.register()
        found = foreign_config.read(directory)
        self._model = _build(directory, found, target, load_format, seed)
        steady_rope(self._model, max_len)
        matrices = packed_weight.pack(self._model, target.deterministic, target.bits)
        self.num_bytes = sum(map(_bytes, self._model.parameters())) + sum(map(_bytes, (m.raw for m in matrices)))
        state_hook.install(self._model)
        self.layers, self.states = self._recorded(config, target.device)
        """The requirements of each attention layer, and the state size of each recurrent layer."""
        for each in matrices:
            each.settle()
        self._num_layers = config.num_layers
        self._layers_at = _layers_of(self._model, config.num_layers)

    @property
    def numerics(self) -> str:
        """The settings that affect the bits, in addition to the runner's own numerics, as `name=value` pairs."""
        return f"model=transformers/{self._version}{'+variant' if self.is_variant else ''}"

    @property
    def memories(self) -> tuple[LayerMemory, ...]:
        """The memory of each layer for a sequence."""
        return tuple(
            LayerMemory(
                index in self.layers,
                self.layers[index].window if index in self.layers else None,
                self.states[index].num_bytes if index in self.states else 0,
            )
            for index in range(self._num_layers)
        )

    def forward(
        self, token_ids: torch.Tensor, step: StepMetadata, caches: Mapping[int, LayerCache], rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns logits [R, vocab] of `rows` (int64 [R], indices into the T tokens; None: all), in the model's
        dtype.
        """
        return self._run(token_ids, step.positions, rows, Pass(step, caches, self.states))

    def hidden(
        self, token_ids: torch.Tensor, step: StepMetadata, caches: Mapping[int, LayerCache], rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the last hidden states [R, h] of `rows`, which are the output of transformers' model without its
        head.
        """
        with attention_hook.answered_by(Pass(step, caches, self.states)), Steady():
            answer = self._model.base_model(
                input_ids=token_ids[None], position_ids=step.positions[None], use_cache=False
            )
        states: torch.Tensor = answer.last_hidden_state[0]
        return states if rows is None else states[rows]

    def shallow(self, num_layers: int) -> Self:
        """Returns the same model with fewer layers (see `Decoder.shallow`)."""
        other = copy.copy(self)
        path = self._layers_at.split(".")
        other._model = copy.copy(self._model)
        at: nn.Module = other._model
        for name in path[:-1]:
            at._modules = dict(at._modules)
            at._modules[name] = copy.copy(at._modules[name])
            at = at._modules[name]  # type: ignore[assignment]
        at._modules = dict(at._modules)
        at._modules[path[-1]] = at._modules[path[-1]][:num_layers]  # type: ignore[index]
        return other

    def _run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None, call: attention_hook.Call
    ) -> torch.Tensor:
        keep = 0 if rows is None else rows
        with attention_hook.answered_by(call), Steady():
            answer = self._model(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=keep
            )
        logits: torch.Tensor = answer.logits[0]
        return logits

    def _recorded(
        self, config: ModelConfig, device: torch.device
    ) -> tuple[dict[int, LayerFacts], dict[int, StateFacts]]:
        """Records and returns the requirements of each layer during a pass over RECORDED_TOKENS tokens. Raises
        UnsupportedModel if the pass fails, or if the requirements do not fit the configuration.
        """
        recorder = Recorder()
        tokens = torch.arange(RECORDED_TOKENS, device=device)
        try:
            self._run(tokens, tokens, None, recorder)
        except ModelError:
            raise
        except Exception as error:
            raise UnsupportedModel(f"{type(self._model).__name__} cannot run over blocks: {error!r}"[:500]) from error
        attending = {index for index, layer in enumerate(config.memories) if layer.attends}
        if missing := sorted(attending ^ set(recorder.layers)):
            raise UnsupportedModel(
                f"{type(self._model).__name__} does not call our attention in {len(missing)} of its "
                f"{config.num_layers} layers (the first is layer {missing[0]})"
            )
        sizes = {index: layer.state_bytes for index, layer in enumerate(config.memories) if layer.state_bytes}
        if sizes != (found := {index: facts.num_bytes for index, facts in recorder.states.items()}):
            layer = min(index for index in sizes.keys() | found if sizes.get(index) != found.get(index))
            raise UnsupportedModel(
                f"layer {layer} of {type(self._model).__name__} has a state of {found.get(layer, 0)} bytes, but "
                f"{sizes.get(layer, 0)} were expected"
            )
        for index, layer in recorder.layers.items():
            expected = (config.num_heads, config.num_kv_heads)
            if (layer.num_heads, layer.num_kv_heads) != expected or _width(layer) > config.head_dim:
                raise UnsupportedModel(
                    f"layer {index} has {layer.num_heads} heads over {layer.num_kv_heads} of {_width(layer)}, not "
                    f"{expected[0]} over {expected[1]} of {config.head_dim}: layers of several sizes are not supported"
                )
        return recorder.layers, recorder.states


def num_parameters(directory: Path) -> int:
    """Returns the number of parameters of the model that a configuration describes. Does not allocate them."""
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(foreign_config.read(directory))
    return sum(parameter.numel() for parameter in model.parameters())


def _bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def _width(layer: LayerFacts) -> int:
    return max(layer.key_dim, layer.value_dim)


def _build(directory: Path, config: Any, target: Target, load_format: LoadFormat, seed: int) -> Any:
    """Builds transformers' model with its weights, in the compute dtype, on the device."""
    import transformers

    how: dict[str, Any] = {"attn_implementation": attention_hook.NAME, "dtype": target.dtype}
    config._experts_implementation = "eager"  # the other implementations multiply the rows of all experts at once
    try:
        if load_format == "dummy":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = transformers.AutoModelForCausalLM.from_config(config, **how)
        else:
            files = weight_files(directory)
            check_digests(directory, ["config.json", "generation_config.json", *(file.path.name for file in files)])
            logger.info("loading weights of %s with transformers %s", directory, transformers.__version__)
            model, said = transformers.AutoModelForCausalLM.from_pretrained(
                directory, config=config, local_files_only=True, trust_remote_code=False, use_safetensors=True,
                output_loading_info=True, **how,
            )  # fmt: skip
            _refuse_gaps(said)
    except ModelError:
        raise
    except Exception as error:
        if error.args == (attention_hook.NAME,):  # the architecture has a list of implementations without ours
            name = (config.architectures or [config.model_type])[0]
            raise UnsupportedModel(f"architecture {name} of transformers has no attention interface") from error
        raise UnsupportedModel(f"transformers cannot load {directory}: {error!r}"[:500]) from error
    return model.to(target.device).eval().requires_grad_(False)


def _refuse_gaps(said: dict[str, Any]) -> None:
    """Raises ModelError if a tensor is missing, is unknown or has the wrong shape."""
    for what, text in (("missing_keys", "lacks tensor"), ("unexpected_keys", "has unexpected tensor")):
        if names := sorted(said.get(what) or ()):
            raise ModelError(f"the checkpoint {text} {names[0]} ({len(names)} in all)")
    if mismatched := sorted(said.get("mismatched_keys") or ()):
        raise ModelError(f"tensor {mismatched[0][0]} does not have the shape that the config requires")


def _layers_of(model: nn.Module, num_layers: int) -> str:
    """Returns the name of the model's list of layers. Raises UnsupportedModel if there is none."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return name
    raise UnsupportedModel(f"{type(model).__name__} has no list of {num_layers} layers")
