"""Draws docs/picture.svg, which shows a story whose decode worker is killed (`python -m tools.picture`).

The picture shows a real run: the script starts the services, kills the worker and compares the texts.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from looseleaf import Client
from looseleaf.llm import Supervisor, serve_settings
from looseleaf.serve.launcher import Launcher
from testing.system import wait_for

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "picture.svg"
PROMPT = "Once upon a time"
SEED = 6
TOKENS = 83
KILL_AT = 45
WIDTH = 96


@dataclass(slots=True)
class Story:
    """A streamed story as the client received it. `before` is the text until the kill, or the whole text without a
    kill.
    """

    before: str = ""
    after: str = ""
    """The text after the kill."""
    gap_s: float = 0.0
    """The longest time between two pieces of text, in seconds."""

    @property
    def text(self) -> str:
        return self.before + self.after


def tell(client: Client, victim: int | None) -> Story:
    """Streams the story and returns it. Kills the process `victim`, if any, with SIGKILL after KILL_AT tokens."""
    story, count, last = Story(), 0, time.monotonic()
    for piece in client.generate(PROMPT, max_tokens=TOKENS, temperature=0.7, seed=SEED, stream=True):
        now = time.monotonic()
        story.gap_s, last = max(story.gap_s, now - last), now
        if victim is None or count < KILL_AT:
            story.before += piece.text
        else:
            story.after += piece.text
        if victim is not None and count < KILL_AT <= count + len(piece.token_ids):
            os.kill(victim, signal.SIGKILL)
        count += len(piece.token_ids)
    return story


def draw(undisturbed: Story, killed: Story, pid: int) -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    same = "the same text" if killed.text == undisturbed.text else "ANOTHER TEXT"
    command = Text(f'$ looseleaf complete "{PROMPT}" --seed {SEED}', "bold")
    for story in (undisturbed, killed):
        console.print(command)
        text = Text(PROMPT, "dim")
        text.append(story.before, "default")
        if story.after:
            text.append(f" [kill -9 {pid}: the decode worker] ", "bold red")
            text.append(story.after, "green")
        console.print(text)
        console.print()
    gap = f"longest pause between two tokens {killed.gap_s:.2f} s, undisturbed {undisturbed.gap_s:.2f} s; {same}"
    console.print(Text(gap, "italic"))
    PICTURE.write_text(console.export_svg(title="looseleaf: a worker dies, the story does not"))


def main() -> int:
    launcher = Launcher(serve_settings(None, {"roles": "split", "spare": 1}))
    with launcher:
        addresses = launcher.start()
        supervisor = Supervisor(launcher)
        supervisor.start()
        try:
            wait_for(lambda: launcher.spare_is_loaded, bool, 120.0, "no spare worker is loaded")
            with Client(addresses.grpc) as client:
                undisturbed = tell(client, None)
                pid = launcher.pids["decode"]
                killed = tell(client, pid)
        finally:
            supervisor.end()
    draw(undisturbed, killed, pid)
    return 0 if killed.text == undisturbed.text else 1


if __name__ == "__main__":
    sys.exit(main())
