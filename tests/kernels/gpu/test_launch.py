"""Two threads launch a kernel for the first time at once, with a stand-in for triton's driver. This happens if one
process has two roles. Triton itself must be thread-safe here (3.6 and 3.7: every launch first looks for the loaded
module).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, sys, threading
import torch
from kernels.gpu.dry import DryDriver
from kernels.gpu.silu_mul import silu_mul


class Slow(DryDriver):
    functions, other = [], None

    def launcher_cls(self, source, metadata):
        return lambda x, y, z, stream, function, *_: self.functions.append(function)

    def load_binary(self, *_):
        if self.other is None:
            self.other = threading.Thread(target=launch)
            self.other.start()
            self.other.join(2)  # until it has launched, or waits for us
        return super().load_binary()


def launch():
    silu_mul(torch.zeros(2, 128))


driver = Slow(90)
driver.install()
launch()
driver.other.join()
json.dump(driver.functions, sys.stdout)
"""


def test_a_kernel_is_launched_when_its_binary_is_there() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True, text=True, cwd=Path(__file__).parents[3], env=environment, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [1, 1]
