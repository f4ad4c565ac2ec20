"""Reports the unknown fields of request bodies to the client in a warning, and logs each name at most once."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from starlette.types import Scope

from gateway.api.http_frame import warn

logger = logging.getLogger("http")
MAX_LOGGED = 256
"""The maximum number of names that are logged."""
MAX_SHOWN = 8
"""The maximum number of names in a warning."""
MAX_NAME_CHARS = 40


class UnknownFields:
    """A reporter of unknown fields. It remembers which names it has logged."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def note(self, scope: Scope, names: Sequence[str]) -> None:
        """Warns the client that the fields `names` were ignored. Logs the names in the warning that have not been
        logged before, up to `MAX_LOGGED` names in all.
        """
        if not names:
            return
        shown = [name[:MAX_NAME_CHARS] for name in names[:MAX_SHOWN]]
        more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
        warn(scope, f"fields that are not known were ignored: {', '.join(shown)}{more}")
        for name in shown:
            if name not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(name)
                logger.warning("field %r is not known and was ignored (--strict-fields refuses it)", name)
