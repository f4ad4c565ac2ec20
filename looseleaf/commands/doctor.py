"""`looseleaf doctor [MODEL]`: checks the requirements of `serve` on this machine. Prints one line per requirement, with
advice for problems.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic_settings import CliPositionalArg

from common.cores import usable_cores
from common.errors import StartupError
from common.rpc import host_port, open_blocking_channel
from common.settings import Settings, settings_config
from looseleaf.commands.health import state_of
from looseleaf.serve import hub
from looseleaf.serve.addresses import check_port_free
from looseleaf.serve.device import torch_cuda, why_no_gpu
from looseleaf.serve.model_source import BUILT_IN
from looseleaf.serve.shm import ROOT, SharedDirectory

_LEAST_SHARED_BYTES = 256 << 20


class DoctorSettings(Settings):
    """Flags of `looseleaf doctor`, which checks torch, kernels, GPU, Redis, shared memory, ports and a model on this
    machine. Its exit status is 1 if there is a problem.
    """

    model_config = settings_config("LOOSELEAF_DOCTOR_", "looseleaf doctor")

    model: CliPositionalArg[str | None] = Field(None, description="model directory to check")
    redis_url: str | None = Field(None, description="the Redis server to check; default: tries to start a private one")
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535, description="HTTP port to check")
    grpc_port: int = Field(50051, ge=0, le=65535, description="gRPC port to check")


class Problem(Exception):
    """The error of a failed check. Its text describes the problem and the solution."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check with its name in the report. `look` returns a description of the finding, or raises an error."""

    name: str
    look: Callable[[], str]


def run(argv: Sequence[str]) -> int:
    settings = DoctorSettings.load(argv)
    checks = (
        Check("python", python),
        Check("torch", torch_build),
        Check("kernels", cpu_kernels),
        Check("gpu", gpu),
        Check("triton", triton),
        Check("attention", attention),
        Check("redis", lambda: redis(settings.redis_url)),
        Check("shared memory", shared_memory),
        Check("http port", lambda: port(settings.host, settings.port, http_answers)),
        Check("grpc port", lambda: port(settings.host, settings.grpc_port, grpc_answers)),
        Check("model", lambda: model(settings.model)),
    )
    results = [report(check) for check in checks]
    return 0 if all(results) else 1


def report(check: Check) -> bool:
    """Runs a check, prints its line, and returns whether it passed. An unexpected exception counts as a problem."""
    try:
        state, text = "ok     ", check.look()
    except (Problem, StartupError) as error:
        state, text = "problem", str(error)
    except Exception as error:  # the doctor reports every kind of failure
        state, text = "problem", f"{type(error).__name__}: {error}"
    print(f"{state}  {check.name:<14} {text}")
    return state != "problem"


def python() -> str:
    return f"{platform.python_version()} on {platform.machine()}, {usable_cores()} cores"


def torch_build() -> str:
    if importlib.util.find_spec("torch") is None:
        raise Problem("not installed; `pip install torch==2.13.0` first, then `pip install 'looseleaf[engine]'`")
    torch = importlib.import_module("torch")
    cuda = f"CUDA {torch.version.cuda}" if torch.cuda.is_available() else "CPU"
    return f"{torch.__version__}, runs on {cuda} ({torch.backends.cpu.get_cpu_capability()})"


def cpu_kernels() -> str:
    kernels = importlib.import_module("kernels")
    directory = Path(str(kernels.__file__)).parent
    if not hasattr(kernels, "__version__") or not (directory / "paged_attention.py").exists():
        raise Problem(f"{directory} is a different package with that name; uninstall Hugging Face's `kernels` here")
    cpu: Any = importlib.import_module("kernels.cpu")
    library = cpu.load()
    if library is None:
        raise Problem(
            "the C++ kernels are not built, and torch's are slower; run `pip install -e .` with a C++ compiler"
        )
    return f"C++, {getattr(library, 'isa', 'built')}"


def gpu() -> str:
    """Returns the GPUs that torch can use, or the reason why there are none. Raises Problem if the driver sees a GPU
    that torch cannot use.
    """
    if (obstacle := why_no_gpu()) is not None:
        return f"none, the CPU computes: {obstacle}"
    cuda: Any = importlib.import_module("torch").cuda
    if not cuda.is_available():
        raise Problem(
            f"the driver sees a GPU but torch, built for CUDA {torch_cuda()}, does not; the driver may be too old"
        )
    found = map(cuda.get_device_properties, range(cuda.device_count()))
    devices = ", ".join(f"{p.name} sm_{p.major}{p.minor} {p.total_memory / 2**30:.0f} GiB" for p in found)
    return f"{devices}; `serve` takes the first, prefill and decode in one process"


def triton() -> str:
    needed = why_no_gpu() is None
    try:
        return f"{importlib.metadata.version('triton')}" + ("" if needed else ", used on a GPU only")
    except importlib.metadata.PackageNotFoundError:
        if needed:
            raise Problem("not installed; our GPU kernels need it: `pip install triton`") from None
        return "not installed; needed on a GPU only"


def attention() -> str:
    """Returns the attention providers that are available for the shape of Llama-3-8B and, on a GPU, the reasons why
    others are not.
    """
    torch = importlib.import_module("torch")
    base: Any = importlib.import_module("kernels.providers.base")
    choice: Any = importlib.import_module("kernels.providers.choice")
    on_gpu = why_no_gpu() is None and torch.cuda.is_available()
    spec = base.AttentionSpec(
        device=torch.device("cuda" if on_gpu else "cpu"),
        compute_capability=torch.cuda.get_device_capability() if on_gpu else None,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        block_size=16,
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        softmax_scale=128**-0.5,
        window=None,
        max_model_len=8192,
        deterministic=False,
    )
    found: dict[str, str] = choice.available(spec)
    kept = {name: text for name, text in found.items() if on_gpu or " " not in text}  # a version has no spaces
    return "; ".join(f"{name} {text.removeprefix(f'attention provider {name} ')}" for name, text in kept.items())


def redis(url: str | None) -> str:
    server: Any = importlib.import_module("block_store.redis.redis_server")
    private: Any = importlib.import_module("block_store.redis.private_redis")
    errors: Any = importlib.import_module("block_store.errors")
    with tempfile.TemporaryDirectory(prefix="looseleaf-doctor-") as directory:
        try:
            handle = server.connect(url, directory)
        except errors.RedisUnusable as error:
            raise Problem(str(error)) from error
        handle.close()
    return f"{handle.version}, " + ("at the given URL" if url else f"private, {private.find_server()[0]}")


def shared_memory() -> str:
    directory = SharedDirectory(ROOT)
    directory.close()
    stat = os.statvfs(ROOT)
    free = stat.f_bavail * stat.f_frsize
    if free < _LEAST_SHARED_BYTES:
        raise Problem(f"{ROOT} has {free >> 20} MiB free; give it 256 MiB or more (docker: --shm-size)")
    return f"{ROOT}, {free / 2**30:.1f} GiB free"


def port(host: str, number: int, answers: Callable[[str, int], bool]) -> str:
    try:
        check_port_free(host, number)
    except StartupError:
        if answers(host, number):
            return f"{number}, a Looseleaf gateway answers there"
        raise
    return f"{number} is free on {host}"


def http_answers(host: str, number: int) -> bool:
    """Returns whether a server at this address answers /health with status 200, as a ready gateway does."""
    connection = HTTPConnection(host, number, timeout=1.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def grpc_answers(host: str, number: int) -> bool:
    """Returns whether a ready service answers at this address."""
    with open_blocking_channel(host_port(host, number)) as channel:
        return state_of(channel, "", 1.0) == "SERVING"


def model(given: str | None) -> str:
    if given is None and not BUILT_IN.is_dir():
        return "none given: `serve` makes a small one with random weights"
    directory = BUILT_IN if given is None else (hub.is_name(given) and hub.cached(given)) or Path(given)
    config: Any = importlib.import_module("engine.config")
    errors: Any = importlib.import_module("engine.errors")
    try:
        found = config.ModelConfig.from_directory(directory)
    except errors.ModelError as error:
        raise Problem(str(error)) from error
    return f"{directory}, up to {found.max_model_len} tokens"
