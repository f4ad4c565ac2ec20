"""Fixtures: a real browser on the page of a real system."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from looseleaf import LLM

SHOTS = Path(__file__).parents[2] / "build" / "screenshots"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium. Without it, or without playwright, the tests are skipped.

    Playwright's synchronous API runs an event loop in this thread until it is closed, and no other test of the process
    can call `asyncio.run` meanwhile. So the browser closes at the end of the module.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if (path := shutil.which("chromium")) is None:
        pytest.skip("chromium is not installed (apt-get install chromium)")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The built-in model with two workers, each with both roles."""
    with LLM(num_blocks=2048, max_model_len=512, roles="both", prefill=2, decode=2) as running:
        yield running


@pytest.fixture
def visit(browser: Any, llm: LLM) -> Iterator[Any]:
    """Returns open_page(tab, at, **options), which opens the page. At the end of the test, fails if the browser
    reported an error or a warning, or sent a request to another host.
    """
    complaints: list[str] = []
    contexts: list[Any] = []

    def check_console(message: Any) -> None:
        if message.type in ("error", "warning"):
            complaints.append(f"console: {message.text}")

    def open_page(tab: str = "chat", at: str = llm.addresses.http, **options: Any) -> Any:
        def check_host(request: Any) -> None:
            if urlsplit(request.url).netloc != at:
                complaints.append(f"a request to {request.url}")

        context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("request", check_host)
        page.on("console", check_console)
        page.on("pageerror", lambda error: complaints.append(f"page: {error}"))
        page.goto(f"http://{at}/#{tab}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints


def shoot(page: Any, name: str) -> None:
    """Stores a screenshot in build/screenshots."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png")
