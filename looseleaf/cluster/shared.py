"""The settings and secrets that all groups of a deployment share."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from looseleaf.cluster.settings import ClusterSettings
from looseleaf.serve.service_flags import salt_secret


@dataclass(frozen=True, slots=True)
class Shared:
    """The settings and the secrets of a deployment. Ray carries them to the actors of the groups."""

    given: dict[str, Any] = field(repr=False)
    """The settings that were given, from `ClusterSettings.on_every_node`."""
    threads: int
    """The number of threads of each worker."""
    head: str
    """The address of Ray's head node, on which the gateway and Redis run."""
    secret: str = field(repr=False)
    """The deployment's secret, which every internal call carries."""
    redis_password: str = field(repr=False)
    salt: str = field(repr=False)
    """The secret of the cache salts."""

    def settings(self) -> ClusterSettings:
        return ClusterSettings(**self.given)

    @property
    def redis_url(self) -> str:
        settings = self.settings()
        return settings.redis_url or f"redis://:{self.redis_password}@{self.head}:{settings.redis_port}"


def new_shared(settings: ClusterSettings, threads: int, head: str) -> Shared:
    """Returns a deployment's settings with new secrets."""
    secret, password = (secrets.token_hex(32) for _ in range(2))
    return Shared(settings.on_every_node(), threads, head, secret, password, salt_secret(settings))
