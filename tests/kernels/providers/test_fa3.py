"""The arguments of FA3's operator, for the schemas of vLLM's build and the upstream build. The operators in this file
have the real schemas, and compute with our reference.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention_reference import paged_prefill_reference
from kernels.providers import fa3
from kernels.providers.base import AttentionSpec, Unavailable
from kernels.providers.fa3 import Fa3Attention

VLLM = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, "
    "int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, "
    "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, "
    "Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, "
    "int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]",
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
    "int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, "
    "bool is_causal, int window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa, "
    "int sm_margin) -> Tensor",
)
UPSTREAM = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, "
    "Tensor? q_v = None, Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, "
    "int? max_seqlen_k = None, Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, "
    "Tensor? rotary_cos = None, Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, "
    "Tensor? k_descale = None, Tensor? v_descale = None, float? softmax_scale = None, bool is_causal = False, "
    "int window_size_left = -1, int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, "
    "bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, int num_splits = 0, "
    "bool? pack_gqa = None, int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)",
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
    "int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q = None, "
    "Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, "
    "Tensor? leftpad_k = None, int? page_size = None, int max_seqlen_k_new = 0, bool is_causal = False, "
    "int window_size_left = -1, int window_size_right = -1, int attention_chunk = 0, bool has_softcap = False, "
    "int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0) -> Tensor",
)
Calls = list[dict[str, Any]]


def by_name(body: Callable[[dict[str, Any]], Any], arguments: list[Any]) -> Callable[..., Any]:
    """Returns a kernel that calls `body` with its arguments by name. torch omits trailing arguments that have their
    default values.
    """
    names = [argument.name for argument in arguments]
    defaults = {argument.name: argument.default_value for argument in arguments}
    return lambda *given, **more: body(defaults | dict(zip(names, given, strict=False)) | more)


class Operators:
    """The two operators of a namespace. They record their arguments by name."""

    def __init__(self, namespace: str, schemas: tuple[str, str]) -> None:
        self.forwards: Calls = []
        self.plans: Calls = []
        self._library = torch.library.Library(namespace, "FRAGMENT")
        for schema, body in zip(schemas, (self._forward, self._plan), strict=True):
            self._library.define(schema)
            arguments = torch._C.parse_schema(f"{namespace}::{schema}").arguments
            self._library.impl(schema.split("(")[0], by_name(body, arguments), "CPU")
        self._returns_list = schemas[0].endswith("Tensor[]")

    def _forward(self, given: dict[str, Any]) -> Any:
        """Computes attention as documented for flash_attn_varlen_func: varlen, paged, causal with bottom-right
        alignment, window to the left.
        """
        self.forwards.append(given)
        assert given["is_causal"] and given["out"] is None and given["k_new"] is None and given["softcap"] == 0.0
        left = given["window_size_left"]
        assert given["window_size_right"] == (-1 if left < 0 else 0)
        assert int(given["cu_seqlens_q"].diff().max()) == given["max_seqlen_q"]
        assert int(given["seqused_k"].max()) <= given["max_seqlen_k"]
        out = paged_prefill_reference(
            given["q"], given["k"].transpose(1, 2), given["v"].transpose(1, 2), given["page_table"],
            given["seqused_k"], given["cu_seqlens_q"], softmax_scale=given["softmax_scale"],
            window=None if left < 0 else left + 1,
        )  # fmt: skip
        empty = out.new_empty(0)
        return [out, empty, empty, empty] if self._returns_list else (out, empty, empty, empty)

    def _plan(self, given: dict[str, Any]) -> Tensor:
        """Returns as many numbers as vLLM 0.26 returns for a batch. None of them is 0."""
        self.plans.append(given)
        rounded = -(-given["batch_size"] // 4) * 4
        return torch.arange(1, 2 + 4 * rounded, dtype=torch.int32) + int(given["seqused_k"].sum())


@pytest.fixture(params=["_vllm_fa3_C", "flash_attn_3"])
def operators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Operators]:
    """The operators of one build, as if `flash_attn_interface` were installed with them."""
    namespace: str = request.param
    module = ModuleType("flash_attn_interface")
    module.__version__ = "3.0.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setattr(fa3, "NAMESPACES", (namespace,))
    found = Operators(namespace, VLLM if namespace == "_vllm_fa3_C" else UPSTREAM)
    yield found
    found._library._destroy()


@pytest.mark.parametrize("window", [None, 20])
def test_prefill_and_decode_are_what_the_reference_says(
    window: int | None, operators: Operators, spec: AttentionSpec, problem: Callable[..., Any]
) -> None:
    spec = replace(spec, window=window)
    provider = Fa3Attention(spec)
    prefill, decode = problem([5, 1, 17, 33], [5, 30, 40, 33]), problem([1, 1, 1], [1, 47, 0])
    provider.prepare(prefill.batch)
    got = provider.prefill(prefill.q, prefill.keys, prefill.values, prefill.batch)
    assert torch.equal(got, prefill.expected(spec)) and not operators.plans
    provider.prepare(decode.batch)
    for _ in range(2):  # two layers, one plan
        got = provider.decode(decode.q, decode.keys, decode.values, decode.batch)
        assert torch.equal(got, decode.expected(spec))
    [plan] = operators.plans
    sizes = ("batch_size", "num_heads", "num_heads_k", "headdim", "headdim_v", "page_size", "qkv_dtype")
    assert [plan[name] for name in sizes] == [3, 8, 2, 16, 16, 16, torch.bfloat16]
    shared = ("max_seqlen_q", "max_seqlen_k", "is_causal", "window_size_left", "window_size_right", "num_splits")
    assert [plan[n] for n in shared] == [operators.forwards[-1][n] for n in shared]
    assert plan["num_splits"] == 32 and operators.forwards[-1]["scheduler_metadata"] is not None


def test_deterministic_means_one_split(operators: Operators, spec: AttentionSpec, problem: Callable[..., Any]) -> None:
    provider = Fa3Attention(replace(spec, deterministic=True))
    assert not provider.deterministic  # prefill and decode have different tiles
    for is_static in (False, True):
        step = problem([1, 1], [40, 3], is_static)
        provider.prepare(step.batch)
        provider.decode(step.q, step.keys, step.values, step.batch)
    assert [call["num_splits"] for call in operators.forwards + operators.plans] == [1, 1, 1, 1]


@pytest.mark.parametrize(("q_lens", "splits"), [([4] * 32, 32), ([64] * 4, 16), ([64] * 4 + [1], 1), ([1] * 200, 20)])
def test_partial_results_are_bounded_by_the_number_of_queries(
    q_lens: list[int], splits: int, operators: Operators, spec: AttentionSpec, problem: Callable[..., Any]
) -> None:
    provider, step = Fa3Attention(spec), problem(q_lens, [64] * len(q_lens))
    provider.prepare(step.batch)
    (provider.decode if step.batch.decode_only else provider.prefill)(step.q, step.keys, step.values, step.batch)
    assert [call["num_splits"] for call in operators.forwards] == [splits]
    assert splits * sum(q_lens) <= fa3.PARTIAL_ROWS


def test_graphs_find_their_metadata_at_one_address_with_zeros_behind(
    operators: Operators, spec: AttentionSpec, problem: Callable[..., Any]
) -> None:
    provider = Fa3Attention(spec)
    seen: dict[int, set[int]] = {}
    for size in (8, 5, 2, 8, 2):  # the largest first
        step = problem([1] * size, list(range(1, size + 1)), True)
        provider.prepare(step.batch)
        assert torch.equal(provider.decode(step.q, step.keys, step.values, step.batch), step.expected(spec))
        call = operators.forwards[-1]
        metadata = call["scheduler_metadata"]
        assert metadata.numel() == 1 + 4 * (-(-size // 4) * 4) and bool((metadata > 0).all())
        assert not provider._static[metadata.numel() :].any()
        assert call["num_splits"] == fa3.MAX_GRAPH_SPLITS > 0 and call["max_seqlen_k"] == spec.max_model_len
        seen.setdefault(size, set()).add(metadata.data_ptr())
    assert {len(addresses) for addresses in seen.values()} == {1}


def test_a_library_file_is_loaded_and_names_the_version(
    operators: Operators, spec: AttentionSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    file = tmp_path / "fa3.so"
    subprocess.run(["cc", "-shared", "-o", file, "-x", "c", "/dev/null"], check=True)
    version = Fa3Attention(spec, str(file)).version
    assert version.startswith(fa3.NAMESPACES[0] + "-") and " " not in version
    (tmp_path / "other.so").write_bytes(b"not a library")
    for name in ("other.so", "none.so"):
        with pytest.raises(Unavailable, match=f"attention provider fa3 cannot load .*{name}"):
            Fa3Attention(spec, str(tmp_path / name))


def test_an_operator_that_asks_for_more_or_lacks_an_argument_is_refused(
    spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    more = VLLM[0].replace("int sm_margin", "int sm_margin, int moon_phase")
    less = VLLM[0].replace("Tensor? page_table, ", "")
    reasons = ((more, "requires the unknown argument moon_phase"), (less, "has no argument page_table"))
    for number, (schema, reason) in enumerate(reasons):
        namespace = f"looseleaf_test_fa3_{number}"
        monkeypatch.setattr(fa3, "NAMESPACES", (namespace,))
        kept = Operators(namespace, (schema, VLLM[1]))
        with pytest.raises(Unavailable, match=reason):
            Fa3Attention(spec)
        kept._library._destroy()


def test_without_operators_or_module_the_reason_is_one_sentence(
    spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # as if it were not installed
    with pytest.raises(Unavailable, match="needs the module flash_attn_interface or --attention-library FILE"):
        Fa3Attention(spec)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    monkeypatch.setattr(fa3, "NAMESPACES", ("looseleaf_nothing",))
    with pytest.raises(Unavailable, match="finds neither of the operators"):
        Fa3Attention(spec)


def test_an_operator_without_metadata_does_without(
    spec: AttentionSpec, problem: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    monkeypatch.setattr(fa3, "NAMESPACES", ("looseleaf_test_fa3_old",))
    kept = Operators("looseleaf_test_fa3_old", (VLLM[0].replace("Tensor? scheduler_metadata, ", ""), VLLM[1]))
    provider, step = Fa3Attention(spec), problem([1, 1], [40, 3])
    provider.prepare(step.batch)
    assert torch.equal(provider.decode(step.q, step.keys, step.values, step.batch), step.expected(spec))
    kept._library._destroy()
