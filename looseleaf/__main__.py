"""Runs the command `looseleaf` as `python -m looseleaf`."""

from __future__ import annotations

import sys

from looseleaf.cli import main

sys.exit(main())
