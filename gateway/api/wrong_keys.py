"""Limits how many wrong API keys an address may try, with a token bucket for each IPv4 address or IPv6 /64 network. The
number of buckets is bounded. This module does no I/O.
"""

from __future__ import annotations

import hashlib
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import ResourceExhausted

MAX_ADDRESSES = 4096
MAX_KNOWN = 4096


@dataclass(slots=True)
class _Bucket:
    tries: float
    """The number of tries left."""
    at: float


class WrongKeys:
    """A counter of wrong keys per address. When an address has used up its tries, only keys that have been accepted
    from the address before are still accepted.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`per_minute` is also the number of tries in a burst. 0 means no limit."""
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._known: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def check(self, address: str, key: bytes) -> None:
        """Checks whether an address may try a key; must be called before the key is compared. Raises ResourceExhausted
        if the address has no tries left and has not used this key successfully.
        """
        bucket = self._buckets.get(_network(address)) if self._buckets else None
        if bucket is None or self._tries(bucket) >= 1 or _known(address, key) in self._known:
            return
        raise ResourceExhausted(
            f"too many wrong API keys from this address: the limit is {self._per_minute} a minute",
            retry_after_s=60 * (1 - self._tries(bucket)) / self._per_minute,
        )

    def wrong(self, address: str) -> None:
        if not self._per_minute:
            return
        network = _network(address)
        bucket = self._buckets.pop(network, None) or _Bucket(self._per_minute, self._clock())
        bucket.tries, bucket.at = self._tries(bucket) - 1, self._clock()
        self._buckets[network] = bucket
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)

    def right(self, address: str, key: bytes) -> None:
        known = _known(address, key)
        self._known.pop(known, None)
        self._known[known] = None
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _tries(self, bucket: _Bucket) -> float:
        since = self._clock() - bucket.at
        return min(self._per_minute, bucket.tries + since * self._per_minute / 60)


def _known(address: str, key: bytes) -> tuple[str, bytes]:
    return _network(address), hashlib.sha256(key).digest()


def _network(address: str) -> str:
    """Returns the /64 network of an IPv6 address, which usually belongs to one client. Returns at most 64 characters of
    any other text.
    """
    if ":" not in address:
        return address[:64]
    try:
        return str(ipaddress.ip_network((address, 64), strict=False))
    except ValueError:
        return address[:64]
