"""The device of a deployment. A separate process queries the driver: a stand-in, or none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from common.errors import StartupError
from looseleaf.serve import device

STAND_IN = Path(__file__).parents[1] / "block_store" / "stand_in_cuda.c"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a libcuda.so.1."""
    directory = tmp_path_factory.mktemp("driver")
    library = directory / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, STAND_IN, "-lpthread", "-lrt"], check=True)
    return directory


@pytest.fixture
def machine(driver: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with one GPU and a torch build for CUDA."""
    monkeypatch.setattr(device, "torch_cuda", lambda: "13.0")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver))
    monkeypatch.setenv("STAND_IN_CUDA", "ll-cuda-device")
    return monkeypatch


def test_a_gpu_is_taken_where_there_is_one(machine: pytest.MonkeyPatch) -> None:
    assert device.resolve_device("auto") == device.resolve_device("cuda") == "cuda"
    assert device.resolve_device("cpu") == "cpu"


def test_a_driver_without_a_gpu(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("STAND_IN_CUDA_DEVICES", "0")
    assert device.resolve_device("auto") == "cpu"
    with pytest.raises(StartupError, match=r"^--device cuda: the CUDA driver finds no usable GPU: .*NO_DEVICE"):
        device.resolve_device("cuda")


def test_no_driver(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").touch()  # found first, but not a library
    machine.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert device.resolve_device("auto") == "cpu"
    with pytest.raises(StartupError, match=r"^--device cuda: the CUDA driver libcuda.so.1 cannot be used"):
        device.resolve_device("cuda")


def test_a_torch_for_the_cpu_takes_no_gpu(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(device, "torch_cuda", lambda: None)
    assert device.resolve_device("auto") == "cpu"
    with pytest.raises(StartupError, match="not built for CUDA"):
        device.resolve_device("cuda")


def test_what_torch_was_built_for_is_read_without_importing_it() -> None:
    assert device.torch_cuda() == torch.version.cuda
