"""The record that the ledger keeps of each block, as it lies in the packed string `blocks` (`lua/lib/state.lua`)."""

from __future__ import annotations

import struct

import numpy as np

FIELDS = (
    ("state", "B"),
    ("hashed", "B"),  # whether its hash is in the prefix index
    ("owner", "H"),  # the number of the tenant that it counts for; 0: nobody
    ("slot", "I"),  # the writer's slot
    ("generation", "Q"),
    ("epoch", "Q"),  # the writer's
    ("hash", "32s"),
)
"""Name and type of each, little-endian without gaps."""
RECORD = struct.Struct("<" + "".join(code for _, code in FIELDS))
"""Of one block."""
RECORDS = np.dtype([(name, "S32" if code == "32s" else f"<{code}") for name, code in FIELDS])
"""Of whole arenas; equal bytes."""
