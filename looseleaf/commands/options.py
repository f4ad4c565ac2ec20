"""Defines flags that several commands share: those for the connection to the gateway, and the sampling parameters."""

from __future__ import annotations

from typing import cast

from pydantic import Field

from common.settings import Settings
from looseleaf.client import DEFAULT_ADDRESS, Client
from looseleaf.options import GenerateOptions


class ConnectionSettings(Settings):
    """Flags for the connection to the gateway."""

    address: str = Field(DEFAULT_ADDRESS, description="host:port of the gateway's gRPC")
    api_key: str | None = Field(None, repr=False, description="API key (or use the variable)")
    tls_ca: str | None = Field(None, description="use TLS; the gateway has a certificate of the CA in this PEM file")
    timeout: float = Field(600.0, gt=0, description="maximum time in seconds for an answer")

    def client(self) -> Client:
        return Client(self.address, api_key=self.api_key, timeout=self.timeout, tls_ca=self.tls_ca)


class ClientSettings(ConnectionSettings):
    """Flags for the connection and the sampling parameters. If a sampling parameter is None, the default of the model
    or of the gateway applies.
    """

    temperature: float | None = Field(None, description="0 is greedy")
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    priority: int | None = Field(None, description="lower numbers go first")
    stop: list[str] = Field([], description="strings that end the text")

    def options(self, *more: str) -> GenerateOptions:
        """Returns the options for `Client.generate` that are not None. `more` names options of a subclass."""
        names = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "seed", "priority", *more)
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return cast(GenerateOptions, given | {"stop": self.stop})
