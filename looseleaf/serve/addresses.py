"""Checks that the gateway's ports are free, and converts addresses for clients on this machine."""

from __future__ import annotations

import socket

from common.errors import StartupError


def check_port_free(host: str, port: int) -> None:
    """Raises StartupError if the host cannot be resolved or the port cannot be bound now. Port 0 means any free
    port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise StartupError(f"host {host!r} cannot be resolved: {error.strerror}") from error
    except OSError as error:
        raise StartupError(f"port {port} on {host} cannot be used ({error.strerror}); choose another port") from error


def check_ports_free(host: str, *ports: int) -> None:
    """Raises StartupError if the host cannot be resolved or one of the ports cannot be bound now."""
    for port in ports:
        check_port_free(host, port)


def reachable(address: str) -> str:
    """Returns the `host:port` by which a client on this machine reaches a server that listens at `address`."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]", "::", "") else address
