"""A worker's adapters are those of the list. Others are dropped, and a lost or damaged list changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from block_store.redis.adapter_registry import AdapterList
from common.adapters import AdapterRef, read_adapter
from common.errors import Aborted
from engine.lora import LoraAdapter, LoraModel
from engine.model_runner import ModelRunner, RunnerSettings
from engine.tiny import make_checkpoint
from testing.adapters import make_adapter
from worker.adapters import AdapterPool, pool_of


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    path = make_checkpoint(tmp_path_factory.mktemp("model"))
    yield ModelRunner(RunnerSettings(path, num_threads=1, enable_lora=True, max_loras=2))


@pytest.fixture
def pool(runner: ModelRunner) -> AdapterPool:
    return AdapterPool(runner.lora, 2)


@pytest.fixture
def refs(runner: ModelRunner, tmp_path: Path) -> list[AdapterRef]:
    model = Path(runner.settings.model)
    return [read_adapter(f"a{i}", str(make_adapter(tmp_path / str(i), model, seed=i))) for i in range(3)]


def wanted(*refs: AdapterRef, damaged: tuple[str, ...] = ()) -> AdapterList:
    return AdapterList("life", refs, damaged)


def test_an_adapter_that_fails_in_an_unknown_way_does_not_stop_the_others(
    pool: AdapterPool, refs: list[AdapterRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = LoraModel.load

    def loading(self: LoraModel, ref: AdapterRef) -> LoraAdapter:
        if ref == refs[0]:
            raise torch.OutOfMemoryError("out of memory")
        return load(self, ref)

    monkeypatch.setattr(LoraModel, "load", loading)
    pool.follow(wanted(*refs[:2]))
    assert pool.status() == {refs[0].digest: "OutOfMemoryError: out of memory", refs[1].digest: ""}


def test_exactly_the_wanted_adapters_are_loaded(pool: AdapterPool, refs: list[AdapterRef]) -> None:
    pool.follow(wanted(*refs[:2]))
    assert pool.status() == {refs[0].digest: "", refs[1].digest: ""}
    in_use = pool.get(bytes.fromhex(refs[0].digest))
    pool.follow(wanted(*refs[1:]))
    assert pool.status() == {refs[1].digest: "", refs[2].digest: ""}
    with pytest.raises(Aborted, match="not loaded"):
        pool.get(bytes.fromhex(refs[0].digest))
    assert in_use is not None and in_use.weights.num_bytes  # a sequence goes on with it
    assert pool.get(b"") is None


@pytest.mark.parametrize("lost", [None, wanted(damaged=("a0",))])
def test_a_lost_or_damaged_list_changes_nothing(
    pool: AdapterPool, refs: list[AdapterRef], lost: AdapterList | None
) -> None:
    pool.follow(wanted(refs[0]))
    pool.follow(lost)
    assert pool.status() == {refs[0].digest: ""}


def test_more_than_max_loras_are_refused_and_fit_later(pool: AdapterPool, refs: list[AdapterRef]) -> None:
    pool.follow(wanted(*refs))
    assert "--max-loras 2" in pool.status()[refs[2].digest]
    pool.follow(wanted(refs[0], refs[2]))
    assert pool.status() == {refs[0].digest: "", refs[2].digest: ""}


def test_two_runners_of_a_process_share_their_adapters(runner: ModelRunner) -> None:
    assert pool_of(ModelRunner.sharing(runner)) is pool_of(runner)
