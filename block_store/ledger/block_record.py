"""Layout of the record that the ledger keeps of each block, in the packed string `blocks` (`lua/lib/state.lua`)."""

from __future__ import annotations

import struct

import numpy as np

FIELDS = (
    ("state", "B"),
    ("hashed", "B"),  # whether the block's hash is in the prefix index
    ("owner", "H"),  # number of the tenant against whose quota it counts; 0: none
    ("slot", "I"),  # the writer's slot
    ("generation", "Q"),
    ("epoch", "Q"),  # the writer's epoch
    ("hash", "32s"),
)
"""Name and type of each field, little-endian without gaps."""
RECORD = struct.Struct("<" + "".join(code for _, code in FIELDS))
"""Struct of one record."""
RECORDS = np.dtype([(name, "S32" if code == "32s" else f"<{code}") for name, code in FIELDS])
"""numpy dtype of one record, with the same bytes."""
