"""Whether a launch computes on a GPU or on the CPU. Asks the driver and torch's version file; does not import torch."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path
from typing import Literal

from block_store.cuda import Cuda, CudaUnavailable
from common.errors import StartupError

Device = Literal["cpu", "cuda"]


def resolve_device(asked: Literal["auto", "cpu", "cuda"]) -> Device:
    """`auto` is cuda where torch was built for it and the driver sees a GPU, as it is for a worker.

    StartupError: cuda was asked for and is not to be had.
    """
    if asked == "cpu":
        return "cpu"
    obstacle = why_no_gpu()
    if obstacle is None:
        return "cuda"
    if asked == "cuda":
        raise StartupError(f"--device cuda: {obstacle}")
    return "cpu"


def why_no_gpu() -> str | None:
    """One sentence; None: there is a GPU that torch can use."""
    if torch_cuda() is None:
        return "the torch that is installed here was not built for CUDA"
    try:
        return None if Cuda().num_devices else "the CUDA driver sees no GPU"
    except CudaUnavailable as error:
        return str(error)


def torch_cuda() -> str | None:
    """The CUDA version that the installed torch was built for; None: for the CPU, or there is no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return version["cuda"] if isinstance(version.get("cuda"), str) else None
