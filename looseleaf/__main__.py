"""`python -m looseleaf` is the command `looseleaf`."""

from __future__ import annotations

import sys

from looseleaf.cli import main

sys.exit(main())
