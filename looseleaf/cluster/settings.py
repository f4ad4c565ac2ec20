"""Settings of a deployment on Ray: a file such as cluster.yaml, or the flags of `looseleaf serve --ray`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from common.errors import StartupError
from common.settings import BlockTransport, settings_config
from looseleaf.serve import hub
from looseleaf.serve.settings import ServeSettings

_PATHS = (
    "model", "model_directory", "attention_library", "directory", "api_key_file", "public_prefix_file", "ssl_certfile",
    "ssl_keyfile", "tls_cert", "tls_key", "tls_ca", "kv_disk_dir",
)  # fmt: skip
"""Settings that are paths. They must exist on every node that needs them."""


class ClusterSettings(ServeSettings):
    """Flags of `looseleaf serve --ray`, and the fields of cluster.yaml, there with underscores. `prefill` and `decode`
    are the numbers of workers of the whole deployment. The other flags are those of `looseleaf serve`.
    """

    model_config = settings_config("LOOSELEAF_SERVE_", "looseleaf serve --ray")

    ray_address: str = Field("auto", description="address of the Ray cluster; auto: RAY_ADDRESS, or the local node's")
    name: str = Field(
        "looseleaf", pattern=r"^[a-z][a-z0-9-]{0,31}$", description="name of the deployment in the Ray cluster"
    )
    hosts: int = Field(
        1, ge=1, le=64, description="number of hosts; a host is a block store with its workers, on one node"
    )
    spread: Literal["preferred", "strict"] = Field(
        "preferred",
        description="whether two hosts may share a node; preferred: only if a node has been lost; strict: never",
    )
    transport: BlockTransport = Field(
        "bytes",
        description="how blocks travel between hosts: bytes, or nixl (RDMA; needs looseleaf[nixl] on each node)",
    )
    cpus_per_host: int | None = Field(
        None, ge=1, le=4096, description="CPUs that each host reserves; default: those that its workers need"
    )
    redis_port: int = Field(
        6390,
        ge=1,
        le=65535,
        description="port of the deployment's Redis server on Ray's head node, without --redis-url",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hosts > self.prefill + self.decode:
            raise ValueError(f"hosts: {self.hosts} is more than the {self.prefill + self.decode} workers")
        if self.roles in ("both", "adaptive"):
            raise ValueError(
                f"roles: {self.roles} is not supported on Ray, because prefill and decode are scaled separately"
            )
        if self.device == "cuda":
            raise ValueError("device: cuda is not supported on Ray")
        return self

    def on_every_node(self) -> dict[str, Any]:
        """Returns the settings that were given, as JSON values, with absolute paths."""
        given: dict[str, Any] = self.model_dump(mode="json", exclude_unset=True)
        for name in _PATHS:
            value = given.get(name)
            if value is not None and not (name.startswith("model") and hub.is_name(value)):
                given[name] = str(Path(value).expanduser().absolute())
        return given


def read_file(path: Path) -> ClusterSettings:
    """Returns the settings in a YAML file. Raises StartupError, which names the field, if the file cannot be read or a
    value is wrong.
    """
    try:
        import yaml
    except ImportError:
        raise StartupError("reading YAML needs a package: pip install 'looseleaf[ray]'") from None
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from None
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise StartupError(f"{path} must contain a mapping from settings to values")
    unknown = sorted(set(given) - set(ClusterSettings.model_fields))
    if unknown:
        known = ", ".join(sorted(ClusterSettings.model_fields))
        raise StartupError(f"{path}: unknown field {unknown[0]!r}; the fields are {known}")
    try:
        return ClusterSettings(**given)
    except ValidationError as error:
        raise StartupError("\n".join(f"{path}: {line}" for line in _lines(error.errors()))) from None


def _lines(errors: Sequence[Any]) -> list[str]:
    """Returns one line for each error. Values of secret fields are not shown."""
    lines = []
    for item in errors:
        name = ".".join(str(part) for part in item["loc"])
        is_secret = bool(name) and not ClusterSettings.model_fields[str(item["loc"][0])].repr
        got = "" if is_secret or not name else f" (got {item.get('input')!r})"
        lines.append(f"{name}: {item['msg']}{got}" if name else str(item["msg"]).removeprefix("Value error, "))
    return lines
