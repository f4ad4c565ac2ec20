"""Threads that call one of MKL's vector functions first, at the same time, get the results that later calls give."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.device import settle_vector_math

NUM_PROCESSES, NUM_THREADS = 600, 4
"""Without `settle_vector_math` (`python -m tests.engine.test_vector_math unsettled`), 10 to 50 of these processes had
wrong cosines on two cores.
"""
HIGH_ACCURACY = ctypes.c_int64(2)
"""The mode in which torch calls these functions."""
LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


def largest_error(settle: bool) -> float:
    """Returns by how much the cosines that several threads compute at the same time differ from later ones."""
    if settle:
        settle_vector_math()
    library = ctypes.CDLL(str(LIBRARY))
    angles = np.arange(65536, dtype=np.float32) / 7
    found, ready = np.empty((NUM_THREADS + 1, len(angles)), np.float32), threading.Barrier(NUM_THREADS)

    def compute(row: int) -> None:
        sizes = ctypes.c_int(len(angles)), ctypes.c_void_p(angles.ctypes.data), ctypes.c_void_p(found[row].ctypes.data)
        if row < NUM_THREADS:
            ready.wait()
        library.vmsCos(*sizes, HIGH_ACCURACY)

    threads = [threading.Thread(target=compute, args=(row,)) for row in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    compute(NUM_THREADS)
    return float(np.abs(found - found[-1]).max())


def in_new_process(settle: bool) -> float:
    """Returns `largest_error` of a copy of this process. This process must not have called a vector function yet."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, str(largest_error(settle)).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        error = float(pipe.read())
    os.wait()
    return error


def main(settle: bool) -> None:
    errors = [in_new_process(settle) for _ in range(NUM_PROCESSES)]
    print(sum(error > 0 for error in errors), "of", NUM_PROCESSES, "processes; largest error", max(errors))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(str(LIBRARY)), "vmsCos"), reason="this torch was built without MKL")
def test_first_calls_of_several_threads_are_exact() -> None:
    command = [sys.executable, "-m", "tests.engine.test_vector_math"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[2])
    assert done.stdout.startswith("0 of"), done.stdout + done.stderr


if __name__ == "__main__":
    main(settle="unsettled" not in sys.argv)
