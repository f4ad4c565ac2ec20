"""Makes Redis clients from URLs, and reports unusable URLs without the passwords that they may contain."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import redis

from block_store.errors import RedisUnusable

FORMS = "redis://HOST:PORT, rediss://HOST:PORT or unix://PATH"
NO_CLUSTER = (
    "Redis Cluster is not supported. Use one server per host (on the gateway, separate the URLs with commas) to spread "
    "the load"
)
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


def client_of(url: str, **options: Any) -> redis.Redis:
    """Returns a client of the server at `url`, without opening a connection. `options` are keyword arguments of
    `redis.Redis`; the URL's query parameters override them.

    Raises RedisUnusable if the URL is malformed, if it has a parameter that redis-py does not accept for its scheme, or
    if it names a file that does not exist.
    """
    if re.match(r"rediss?\+cluster://", url):
        raise RedisUnusable(NO_CLUSTER)
    try:
        client = redis.Redis.from_url(url, **options)
    except ValueError:  # its message may contain a part of a password
        raise RedisUnusable(f"a Redis URL must be {FORMS}") from None
    pool = client.connection_pool
    try:
        pool.connection_class(**pool.connection_kwargs)
    except TypeError as error:  # "... got an unexpected keyword argument 'NAME'"
        raise RedisUnusable(f"a Redis URL of this scheme cannot have the parameter {str(error).split()[-1]}") from None
    for name in _FILES:
        if (file := pool.connection_kwargs.get(name)) is not None and not Path(file).is_file():
            raise RedisUnusable(f"the Redis URL's {name} names no file: {file}")
    return client


def without_passwords(url: str) -> str:
    """Returns `url` with its user, its password and the passwords among its query parameters replaced by `***`."""
    scheme, _, rest = url.partition("://")
    _, at, place = rest.rpartition("@")
    return f"{scheme}://{'***' + at if at else ''}" + re.sub(r"(password=)[^&]*", r"\1***", place)
