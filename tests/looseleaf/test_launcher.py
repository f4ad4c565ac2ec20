"""The processes of a launch and their flags. Every flag exists in its service."""

from __future__ import annotations

from pathlib import Path

import pytest

from block_store.settings import BlockStoreSettings
from common.errors import StartupError
from common.settings import Settings
from decode_svc.settings import DecodeSettings
from gateway.settings import GatewaySettings
from looseleaf.both_roles.settings import BothSettings
from looseleaf.both_roles.spare import SpareSettings
from looseleaf.serve import device
from looseleaf.serve.model_source import ModelSource
from looseleaf.serve.placement import settled
from looseleaf.serve.service_flags import (
    flags_of,
    gateway_flags,
    gateway_secrets,
    role_flags,
    store_flags,
    store_secrets,
    worker_flags,
)
from looseleaf.serve.settings import ServeSettings
from prefill_svc.settings import PrefillSettings

SOURCE = ModelSource(Path("/models/m"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which torch can use a GPU."""
    monkeypatch.setattr(device, "why_no_gpu", lambda: None)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "why_no_gpu", lambda: "the CUDA driver sees no GPU")


def test_flags() -> None:
    values = {"max_queue": 5, "seed": None, "enforce_eager": True, "deterministic": False}
    assert flags_of(values) == ["--max-queue", "5", "--enforce-eager"]


@pytest.mark.parametrize("service", [PrefillSettings, DecodeSettings, BothSettings, SpareSettings])
def test_workers_take_what_a_launch_gives_them(gpu: None, service: type[Settings]) -> None:
    given: dict[str, object] = {
        "device": "cuda", "dtype": "float16", "attention_backend": "fa3", "attention_library": "/lib/fa3.so",
        "deterministic": True, "enforce_eager": True, "kv_cache_dtype": "fp8_e4m3", "gpu_memory_utilization": 0.5,
        "load_format": "dummy", "max_model_len": 99, "block_size": 32, "max_num_seqs": 7, "max_num_batched_tokens": 77,
        "seed": 3, "model_impl": "native", "allow_variant_numerics": True, "max_itl": 50.0,
    }  # fmt: skip
    taken = service.load(worker_flags(settled(ServeSettings(**given)), SOURCE, "127.0.0.1:1", "decode_svc"))  # type: ignore[arg-type]
    assert {name: getattr(taken, name) for name in given} == given
    assert (taken.model, taken.block_store) == ("/models/m", "127.0.0.1:1")  # type: ignore[attr-defined]


def test_all_workers_have_the_parts_that_the_one_with_the_most_ranks_needs() -> None:
    settings = ServeSettings(roles="split", prefill_tensor_parallel_size=2)
    assert role_flags(settings, "prefill_svc") == ["--tensor-parallel-size", "2", "--reduction-parts", "4"]
    assert role_flags(settings, "decode_svc") == ["--tensor-parallel-size", "1", "--reduction-parts", "4"]
    assert settled(settings.model_copy(update={"roles": "auto"})).roles == "split"
    assert role_flags(ServeSettings(), "decode_svc") == []
    stages = ServeSettings(roles="split", decode_pipeline_parallel_size=2)
    assert role_flags(stages, "decode_svc") == ["--pipeline-parallel-size", "2"]
    assert role_flags(stages, "prefill_svc") == []
    with pytest.raises(StartupError, match="parallel sizes"):
        settled(settings.model_copy(update={"roles": "both"}))
    with pytest.raises(StartupError, match="--spare 1 does not support workers with 2 ranks"):
        settled(settings.model_copy(update={"spare": 1}))


@pytest.mark.parametrize("service", [DecodeSettings, BothSettings, SpareSettings])
def test_workers_that_decode_take_what_is_said_of_preemption(service: type[DecodeSettings]) -> None:
    flags = worker_flags(ServeSettings(), SOURCE, "127.0.0.1:1", "decode_svc")
    taken = service.load([*flags, *role_flags(ServeSettings(preemption="give-back", swap_space=0.5), "decode_svc")])
    assert (taken.preemption, taken.swap_space) == ("give-back", 0.5)
    by_default = service.load([*flags, *role_flags(ServeSettings(), "decode_svc")])
    assert (by_default.preemption, by_default.swap_space) == ("auto", 1.0)


def test_block_store_and_gateway_take_what_a_launch_gives_them(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settled(ServeSettings(gpu_memory_utilization=0.5, num_blocks=64, max_queue=9))
    url = "redis://:password@127.0.0.1:2"
    for name, value in (store_secrets(url) | gateway_secrets(settings, url, "saltsecret")).items():
        monkeypatch.setenv(name, value)
    store = BlockStoreSettings.load(store_flags(settings, Path("/dev/shm/x"), SOURCE))
    assert store.redis_url == url
    assert (store.device, store.gpu_memory_utilization) == ("cuda", 0.5)
    assert (store.num_blocks, store.expect_workers, store.directory) == (64, 2, "/dev/shm/x")
    assert not store.pull_blocks
    store = BlockStoreSettings.load(store_flags(settings, Path("/dev/shm/x"), SOURCE, transport="nixl"))
    assert (store.pull_blocks, store.transport) == (True, "nixl")
    gateway = GatewaySettings.load(gateway_flags(settings, SOURCE, "127.0.0.1:1"))
    assert (gateway.redis_url, gateway.salt_secret) == (url, "saltsecret")
    assert (gateway.max_queue, gateway.block_store, gateway.served_model_name) == (9, "127.0.0.1:1", "m")
