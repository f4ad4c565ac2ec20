"""`looseleaf top [ADDRESS]`: shows recent requests, workers and blocks, as a running gateway reports them, and
refreshes them in the terminal.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from pydantic import Field
from pydantic_settings import CliPositionalArg

from common.errors import StartupError, Unavailable
from common.settings import Settings, settings_config
from looseleaf import metrics_page

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

TIMEOUT_S = 10.0
_BAR_CHARS = 24
_BLOCK_CHARS = 24
_COLOURS = {
    "prefill": "blue", "decode": "green", "pull": "magenta", "hand_over": "bright_magenta", "swapped": "red",
    "come_back": "bright_red", "retry": "bright_red", "gate": "yellow", "worker": "yellow", "prefill_queue": "yellow",
    "decode_queue": "bright_yellow",
}  # fmt: skip
"""Colours of the phases of a request. The other phases are grey."""
_STATES = {"sealed": "green", "reserved": "yellow", "cached": "blue", "quarantine": "red", "free": "bright_black"}


class TopSettings(Settings):
    """Flags of `looseleaf top`, which shows recent requests, workers and blocks."""

    model_config = settings_config("LOOSELEAF_TOP_", "looseleaf top")

    address: CliPositionalArg[str] = Field("127.0.0.1:8000", description="host:port of the gateway's HTTP")
    api_key: str | None = Field(None, repr=False, description="API key (or use the variable)")
    tls_ca: Path | None = Field(None, description="use TLS; the gateway has a certificate of the CA in this PEM file")
    interval: float = Field(1.0, ge=0.1, le=60, description="seconds between two refreshes")
    requests: int = Field(12, ge=1, le=1000, description="maximum number of requests to show")
    once: bool = Field(False, description="print the state once, without control characters, and exit")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state that a gateway reported at one time."""

    at_s: float
    """The time at which the state was read, from `time.monotonic`."""
    model: str
    workers: list[dict[str, Any]]
    arenas: list[dict[str, Any]]
    requests: list[dict[str, Any]]
    """Explanations, newest first."""
    prompt_tokens: float
    """The number of prompt tokens since the gateway's start."""
    output_tokens: float


def run(argv: Sequence[str]) -> int:
    settings = TopSettings.load(argv)
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        raise StartupError("looseleaf top needs rich: pip install rich") from None
    with _client(settings) as client:
        before = now = read(client, settings.requests)
        if settings.once:
            Console(highlight=False).print(screen(now, now))
            return 0
        with Live(screen(now, now), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(settings.interval)
                trouble = ""
                try:
                    before, now = now, read(client, settings.requests)
                except Unavailable as error:  # perhaps the gateway is being restarted
                    trouble = error.message
                live.update(screen(before, now, trouble), refresh=True)


def _client(settings: TopSettings) -> httpx.Client:
    headers = {} if settings.api_key is None else {"authorization": f"Bearer {settings.api_key}"}
    if settings.tls_ca is None:
        return httpx.Client(base_url=f"http://{settings.address}", headers=headers, timeout=TIMEOUT_S)
    try:
        trusted = ssl.create_default_context(cafile=settings.tls_ca)
    except OSError as error:  # or a subclass, SSLError
        raise StartupError(f"--tls-ca {settings.tls_ca} cannot be used: {error}") from error
    return httpx.Client(base_url=f"https://{settings.address}", headers=headers, verify=trusted, timeout=TIMEOUT_S)


def read(client: httpx.Client, most_requests: int) -> Snapshot:
    """Returns the gateway's state. Raises Unavailable if the gateway does not answer or refuses a request, or if the
    answers are not those of a gateway.
    """
    try:
        return _read(client, most_requests)
    except (LookupError, TypeError, ValueError):
        raise Unavailable(f"what answers at {client.base_url} is not a Looseleaf gateway") from None


def _read(client: httpx.Client, most_requests: int) -> Snapshot:
    model = _get(client, "/v1/models").json()["data"][0]["id"]
    fleet = _get(client, "/v1/workers").json()
    found = _get(client, f"/v1/explain?limit={most_requests}").json()["data"]
    samples = metrics_page.parse(_get(client, "/metrics").text)
    prompt, output = (
        metrics_page.total(samples, f"looseleaf_{kind}_tokens_total") for kind in ("prompt", "generation")
    )
    arenas = [arena for arena in fleet["arenas"] if arena["arena_id"]]
    return Snapshot(time.monotonic(), model, fleet["workers"], arenas, found, prompt, output)


def _get(client: httpx.Client, path: str) -> httpx.Response:
    try:
        reply = client.get(path)
    except httpx.HTTPError as error:
        raise Unavailable(f"the gateway at {client.base_url} does not answer: {error}") from None
    if reply.status_code != 200:
        is_json = reply.headers.get("content-type", "").startswith("application/json")
        raise Unavailable(
            f"the gateway refuses {path}: {reply.json()['error']['message'] if is_json else reply.reason_phrase}"
        )
    return reply


def screen(before: Snapshot, now: Snapshot, trouble: str = "") -> Group:
    """Returns the screen for the snapshot `now`. Rates are averages since `before`, and are omitted if the two are the
    same snapshot. `trouble` is the reason why there is no newer snapshot, if it is not empty.
    """
    from rich.console import Group
    from rich.text import Text

    headline = Text(_headline(before, now)) if not trouble else Text(trouble, style="red")
    return Group(headline, "", _workers(now), "", _arenas(now), "", _requests(now))


def _headline(before: Snapshot, now: Snapshot) -> str:
    running = sum(worker["num_running"] for worker in now.workers)
    waiting = sum(worker["num_waiting"] for worker in now.workers)
    parts = [now.model, f"{running} sequences run, {waiting} wait"]
    if (elapsed_s := now.at_s - before.at_s) > 0:
        prompt = (now.prompt_tokens - before.prompt_tokens) / elapsed_s
        output = (now.output_tokens - before.output_tokens) / elapsed_s
        parts.append(f"{prompt:.0f} prompt and {output:.0f} output tokens/s")
    return " · ".join(parts)


def _table(*columns: str) -> Table:
    """Returns an empty table. The first two columns are left-aligned, and the others are right-aligned."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place < 2 else "right", no_wrap=True)
    return table


def _add(table: Table, *cells: str | Text) -> None:
    """Adds a row. Names of workers and requests can contain what rich would take for markup."""
    from rich.text import Text

    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def _workers(now: Snapshot) -> Table:
    table = _table("worker", "state", "running", "waiting", "swapped", "prompt tokens waiting")
    for worker in sorted(now.workers, key=lambda worker: (worker["role"], worker["worker_id"])):
        state = "draining" if worker["draining"] else "avoided" if worker["avoided"] else "ready"
        counts = ["", "", ""]
        if is_decode := worker["role"] == "decode":
            counts = [f"{worker['num_running']}/{worker['max_num_seqs']}"]
            counts += [str(worker[name]) for name in ("num_waiting", "num_preempted")]
        _add(table, worker["worker_id"], state, *counts, "" if is_decode else str(worker["waiting_tokens"]))
    return table


def _arenas(now: Snapshot) -> Table:
    table = _table("arena", "blocks", *_STATES)
    for arena in now.arenas:
        counts = [arena["counts"][state] for state in _STATES]
        bar = _bar(list(zip(_STATES.values(), counts, strict=True)), _BLOCK_CHARS)
        _add(table, arena["arena_id"][:8], bar, *map(str, counts))
    return table


def _requests(now: Snapshot) -> Table:
    table = _table("request", "phases", "outcome", "ms", "prompt", "cached", "output")
    longest = max((told["total_ns"] for told in now.requests), default=1)
    for told in now.requests:
        phases = [(_COLOURS.get(phase["kind"], "bright_black"), phase["duration_ns"]) for phase in told["phases"]]
        chars = max(1, round(_BAR_CHARS * told["total_ns"] / max(longest, 1)))
        tokens = ["", "", ""]
        if usage := told.get("usage"):
            counts = (usage["prompt_tokens"], usage["sources"]["cached_tokens"], usage["completion_tokens"])
            tokens = [str(count) for count in counts]
        _add(
            table,
            told["request_id"][:40],
            _bar(phases, chars),
            told["outcome"],
            f"{told['total_ns'] / 1e6:.0f}",
            *tokens,
        )
    return table


def _bar(parts: Sequence[tuple[str, int]], chars: int) -> Text:
    """Returns a bar of coloured parts, each as wide as its share."""
    from rich.text import Text

    total = sum(amount for _, amount in parts)
    bar, done, drawn = Text(), 0, 0
    for colour, amount in parts:
        done += amount
        end = round(chars * done / total) if total else 0
        bar.append("█" * (end - drawn), style=colour)
        drawn = end
    return bar
