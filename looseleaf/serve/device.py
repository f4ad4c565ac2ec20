"""Decides whether a launch runs the model on a GPU or on the CPU. Reads torch's version file and asks the driver; does
not import torch.
"""

from __future__ import annotations

import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Literal

from block_store.arena.cuda import Cuda, CudaUnavailable
from common.errors import StartupError
from looseleaf.serve.model_source import REPOSITORY

Device = Literal["cpu", "cuda"]


def resolve_device(asked: Literal["auto", "cpu", "cuda"]) -> Device:
    """Returns the device that a worker would choose. `auto` means cuda if torch was built for CUDA and the driver sees
    a GPU. Raises StartupError if cuda was requested and is unavailable.
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
    """Returns the reason why torch cannot use a GPU, in one sentence. Returns None if torch was built for CUDA and the
    driver sees a GPU.
    """
    if torch_cuda() is None:
        return "the torch that is installed here was not built for CUDA"
    # In a separate process, because a process that has called the driver cannot fork processes that use the driver, and
    # the process that uses `LLM` may fork.
    command = [sys.executable, "-m", "looseleaf.serve.device"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return f"the CUDA driver could not be asked: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    return done.stdout.strip() or None


def driver_obstacle() -> str | None:
    """Returns the reason why the driver provides no GPU, or None if it provides one."""
    try:
        return None if Cuda().num_devices else "the CUDA driver sees no GPU"
    except CudaUnavailable as error:
        return str(error)


def torch_cuda() -> str | None:
    """Returns the CUDA version that the installed torch was built for, or None if torch is a CPU build or is not
    installed.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return version["cuda"] if isinstance(version.get("cuda"), str) else None


if __name__ == "__main__":
    print(driver_obstacle() or "")
