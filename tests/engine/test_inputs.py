"""The arrays of a step in one buffer are aligned, do not overlap, and are equal on both sides."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.inputs import ALIGNMENT, StepBuffer

WIDE, NARROW = np.dtype(np.int64), np.dtype(np.int32)
SHAPES = [(WIDE, (3,)), (NARROW, (5,)), (NARROW, (2, 7)), (WIDE, (0,))]


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def test_arrays_arrive(device: torch.device) -> None:
    buffer = StepBuffer(StepBuffer.bytes_of(SHAPES), device)
    places = buffer.place(SHAPES)
    for number, place in enumerate(places):
        place.host[...] = number + 1
    places[2].host[1, 3] = 77
    buffer.send(buffer.num_bytes)
    buffer.wait()
    for number, ((dtype, shape), place) in enumerate(zip(SHAPES, places, strict=True)):
        expected = np.full(shape, number + 1, dtype)
        if number == 2:
            expected[1, 3] = 77
        got = place.device.cpu().numpy()
        assert place.device.device.type == device.type
        assert np.array_equal(got, expected) and got.dtype == dtype
        assert place.device.data_ptr() % ALIGNMENT == 0 or not place.device.numel()


def test_more_than_fits_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="128 bytes do not fit into a buffer of 64"):
        StepBuffer(64, device).place(SHAPES)
