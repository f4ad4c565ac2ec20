"""Makes Redis clients from URLs, and reports unusable URLs without the passwords that they may contain.

The URL of a master behind Sentinels has the form that other Python projects use:
redis+sentinel://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]...]/MASTER[/DB][?PARAMETERS], or rediss+sentinel:// for TLS to
the Sentinels and the master. The parameters sentinel_username and sentinel_password are for the Sentinels.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.connection import parse_url
from redis.sentinel import MasterNotFoundError, Sentinel

from block_store.errors import RedisUnusable

_FORMS = "redis://HOST:PORT, rediss://HOST:PORT, unix://PATH or redis+sentinel://HOST:PORT,HOST:PORT/MASTER"
NO_CLUSTER = (
    "Redis Cluster is not supported. Use Redis Sentinel for failover, and one server per host to spread the load"
)
_SENTINELS = re.compile(
    r"(?P<scheme>rediss?)\+sentinel://(?P<user>(?:[^/?#]*@)?)(?P<hosts>[^/?#@]+)/(?P<master>[^/?#]+)"
    r"(?P<rest>(?:/\d+)?(?:\?.*)?)"
)
_SENTINEL_PORT = 26379
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


class _Sentinels(Sentinel):
    """A client of Sentinels. Unlike those of redis-py, its errors say why a Sentinel did not answer, and contain no
    password in any version.
    """

    def discover_master(self, service_name: str) -> tuple[str, int]:
        reasons = []
        sentinel: Any
        for sentinel in self.sentinels:
            try:
                state = sentinel.sentinel_masters().get(service_name)
            except (redis.ConnectionError, redis.TimeoutError) as error:
                reasons.append(str(error))
                continue
            if state and self.check_master_state(state, service_name):  # type: ignore[no-untyped-call]
                self.sentinels = [sentinel, *(each for each in self.sentinels if each is not sentinel)]
                return state["ip"], state["port"]
        raise MasterNotFoundError("; ".join([f"no Sentinel names a master {service_name!r} that is up", *reasons]))


def client_of(url: str, **options: Any) -> redis.Redis:
    """Returns a client of the server at `url`, without opening a connection. `options` are keyword arguments of
    `redis.Redis`; the URL's query parameters override them. Behind Sentinels, the client asks them for the master's
    address before it opens a connection.

    Raises RedisUnusable if the URL is malformed, if it has a parameter that redis-py does not accept for its scheme, or
    if it names a file that does not exist.
    """
    if re.match(r"rediss?\+cluster://", url):
        raise RedisUnusable(NO_CLUSTER)
    try:
        found = _SENTINELS.fullmatch(url)
        client = redis.Redis.from_url(url, **options) if found is None else _behind_sentinels(found, options)
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)  # raises TypeError if it does not take one of them
    except ValueError:  # its message may contain a part of a password
        raise RedisUnusable(f"a Redis URL must be {_FORMS}") from None
    except TypeError as error:  # "... got an unexpected keyword argument 'NAME'"
        raise RedisUnusable(f"a Redis URL of this scheme cannot have the parameter {str(error).split()[-1]}") from None
    for name in _FILES:
        if (file := pool.connection_kwargs.get(name)) is not None and not Path(file).is_file():
            raise RedisUnusable(f"the Redis URL's {name} names no file: {file}")
    return client


def _behind_sentinels(url: re.Match[str], options: dict[str, Any]) -> redis.Redis:
    """Returns a client of the master that the Sentinels name. Raises ValueError if the URL is malformed."""
    of_master = parse_url(f"{url['scheme']}://{url['user']}host{url['rest']}")  # type: ignore[no-untyped-call]
    del of_master["host"]
    of_master["ssl"] = of_master.pop("connection_class", None) is not None
    login = {name: of_master.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    of_sentinels = {name: value for name, value in of_master.items() if name.startswith("ssl")}
    of_sentinels |= {name: value for name, value in options.items() if name != "redis_connect_func"}
    hosts = [urlsplit(f"//{host}") for host in url["hosts"].split(",")]
    if not all(host.hostname for host in hosts):
        raise ValueError("a host is missing")
    addresses = [(host.hostname, host.port or _SENTINEL_PORT) for host in hosts]
    sentinels: Any = _Sentinels(addresses, sentinel_kwargs={**of_sentinels, **login})  # type: ignore[no-untyped-call]
    client: redis.Redis = sentinels.master_for(url["master"], **{**options, **of_master})
    return client


def without_passwords(url: str) -> str:
    """Returns `url` with its user, its password and the passwords among its query parameters replaced by `***`."""
    scheme, _, rest = url.partition("://")
    _, at, place = rest.rpartition("@")
    return f"{scheme}://{'***' + at if at else ''}" + re.sub(r"(password=)[^&]*", r"\1***", place)
