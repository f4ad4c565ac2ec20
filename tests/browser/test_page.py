"""The page in a real browser, with real workers."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from engine.tiny import make_checkpoint
from looseleaf import LLM, Client
from testing.system import wait_for
from testing.two_hosts import TwoHosts
from tests.browser.conftest import shoot

STORY = "Tell me a story about a wolf, a mill and a girl who was not afraid of the dark forest behind the river"

HAS_LINE = """(canvas) => {
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const found = copy.getImageData(0, 0, canvas.width, canvas.height).data;
  const isBlue = (i) => found[i + 3] > 200 && found[i + 2] > found[i] + 60;
  return found.some((_, i) => i % 4 === 0 && isBlue(i));
}"""
"""Whether a plot has the blue line of the cached blocks."""

WATCH_LENGTHS = """() => {
  window.lengths = new Set();
  const add = () => document.querySelectorAll(".said.assistant.busy").forEach((s) => lengths.add(s.textContent.length));
  new MutationObserver(add).observe(document.body, { subtree: true, childList: true, characterData: true });
}"""
"""Records the lengths of answers that are not complete."""

LONG = {"max_tokens": 450, "n": 4, "temperature": 1.0, "ignore_eos": True}


def say(page: Any, text: str, **settings: str) -> None:
    for field, value in settings.items():
        page.fill(f"#{field.replace('_', '-')}", value)
    page.fill("#message", text)
    page.press("#message", "Enter")


def answered(page: Any, count: int) -> None:
    """Waits until this number of answers are complete and explained."""
    page.locator(".facts button").nth(count - 1).wait_for()


def test_chat_streams_an_answer_and_explains_it_with_the_keyboard_alone(visit: Any) -> None:
    page = visit()
    page.locator("#model").get_by_text("storyteller").wait_for()
    page.evaluate(WATCH_LENGTHS)
    say(page, STORY, max_tokens="120", seed="3")
    answered(page, 1)
    assert page.evaluate("lengths.size") > 2, "the answer grew"
    say(page, "And then?", samples="3", max_tokens="60")
    answered(page, 2)
    assert page.locator(".turn").nth(1).locator(".said").count() == 3
    facts = page.locator(".facts").nth(1).inner_text()
    assert "cached" in facts and "first after" in facts and ".decode" in facts
    assert " 0 cached" not in facts, "the first turn is found in the cache"
    shoot(page, "chat")
    page.locator(".facts button").nth(1).focus()
    page.keyboard.press("Enter")
    details = page.locator(".details").inner_text()
    assert "prefill" in details and "copy-on-write" in details and "predicted until decode begins" in details
    shoot(page, "requests")
    page.focus("#tab-requests")
    page.keyboard.press("ArrowRight")
    assert page.locator("#blocks").is_visible() and page.locator("#tab-blocks").get_attribute("aria-selected") == "true"


def test_reasoning_is_shown_and_the_conversation_goes_on(visit: Any) -> None:
    with LLM(num_blocks=512, max_model_len=512, roles="both", reasoning_parser="deepseek_r1") as reasoner:
        page, bodies = visit(at=reasoner.addresses.http), []
        page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
        say(page, STORY, max_tokens="20")
        answered(page, 1)
        reasoning = page.locator(".turn .reasoning").text_content()
        say(page, "And then?")
        answered(page, 2)
    first, answer, second = bodies[-1]["messages"]
    assert (first["content"], second["content"]) == (STORY, "And then?")
    assert reasoning and answer == {"role": "assistant", "content": "", "reasoning_content": reasoning}


def test_stop_ends_an_answer(visit: Any, llm: LLM) -> None:
    page = visit()
    page.locator("#model").get_by_text("storyteller").wait_for()
    workers = [pid for name, pid in llm.pids.items() if name.startswith("worker")]
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)  # the answer cannot end by itself
    try:
        say(page, STORY, max_tokens="100")
        asked = page.locator(".turn[data-request]").get_attribute("data-request")
        wait_for(lambda: {one.request_id for one in llm.client.explain()}, lambda ids: asked in ids, 20, "late")
        page.click("#stop")
        page.locator("#stop").wait_for(state="hidden")
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
    answered(page, 1)
    page.click("#tab-requests")
    page.locator(".request .name").filter(has_text="abort").first.wait_for()
    page.click("#tab-chat")
    say(page, STORY, max_tokens="20")
    answered(page, 2)
    assert page.locator(".said.user").count() == 2


def test_a_shared_prefix_is_seen_as_shared_blocks(visit: Any, llm: LLM) -> None:
    prompt = list(range(100, 180))  # five full blocks
    page = visit("blocks")
    for end in (7, 8):
        llm.client.generate([*prompt, end], max_tokens=20, request_id=f"shared-{end}")
    for end in (7, 8):
        button = page.locator(f"[data-request=shared-{end}]")
        button.filter(has_text="5 shared").wait_for()
        assert "6 blocks" in button.inner_text()
    page.click("[data-request=shared-8]")
    page.locator("[data-request=shared-8][aria-pressed=true]").wait_for()
    page.focus("#map")

    def described() -> str:
        page.keyboard.press("End")
        page.keyboard.press("Home")
        page.wait_for_timeout(500)
        return str(page.locator("#block").inner_text())

    # A ticket of the request that was stopped before may still be on its way back.
    wait_for(described, lambda text: "generation" in text and "no holder" in text, 20, "still held")
    shoot(page, "blocks")


def test_a_killed_worker_is_seen_as_a_second_attempt(visit: Any, llm: LLM) -> None:
    page = visit("requests")
    sent = threading.Thread(
        target=llm.client.generate, args=([7, 8, 9],), kwargs={"request_id": "killed", **LONG}, daemon=True
    )
    sent.start()
    worker = wait_for(lambda: decode_worker_of(llm, "killed"), lambda name: name != "", 60, "decode has not begun")
    os.kill(llm.pids[worker.removesuffix(".decode")], signal.SIGKILL)
    sent.join()
    row = page.locator(".request").filter(has_text="killed (length)")
    row.locator("button").click()
    details = row.locator(".details").inner_text()
    assert "Attempt 1: session_lost" in details and "Attempt 2: " in details and ": done" in details
    assert "retry after a lost worker" in details
    shoot(page, "killed")


def test_a_preemption_and_a_copy_on_write_are_seen(visit: Any) -> None:
    settings = {"num_blocks": 96, "max_model_len": 384, "max_num_seqs": 16, "roles": "both", "preemption": "swap"}
    with LLM(**settings) as crowded:
        page = visit("requests", at=crowded.addresses.http)
        options = {**LONG, "max_tokens": 105}
        sent = [
            threading.Thread(
                target=crowded.client.generate, args=(list(range(20)),), kwargs={"request_id": f"crowd-{i}", **options}
            )
            for i in range(4)
        ]
        for thread in sent:
            thread.start()
        for thread in sent:
            thread.join()
        swapped = page.locator(".request").filter(has=page.locator(".bar .of-swapped")).first
        swapped.filter(has_text="(length)").locator("button").click()
        details = swapped.locator(".details").inner_text()
        assert "swapped out" in details and "copied back" in details
        assert re.search(r"copy-on-write\s+[1-9]", details), "the last block of the prompt is copied for each sample"
        shoot(page, "preempted")
        page.click("#tab-workers")
        page.locator("#plots .u-legend").nth(1).filter(has_text="cached").wait_for()
        wait_for(lambda: page.locator("#plots canvas").last.evaluate(HAS_LINE), bool, 60, "no line is drawn")
        shoot(page, "plots")
        page.close()


def test_each_hosts_blocks_can_be_chosen(visit: Any, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "tiny", "llama", seed=1)
    with TwoHosts(tmp_path / "tiny", namespaces=False) as hosts, Client(hosts.grpc) as client:
        client.generate(list(range(100)), max_tokens=2)
        page = visit("blocks", at=hosts.http)
        seen = set()
        for place in range(2):
            page.select_option("#arena-choice", index=place)
            page.locator("#count-cached").get_by_text(re.compile("^[1-9]")).wait_for()
            page.focus("#map")
            page.keyboard.press("Home")
            page.locator("#block").filter(has_text="generation").wait_for()
            page.click("#tab-workers")
            page.click("#tab-blocks")
            assert page.locator("#arena-choice").evaluate("select => select.selectedIndex") == place
            seen.add(page.locator("#arena-choice option:checked").inner_text())
        assert len(seen) == 2
        page.close()


def decode_worker_of(llm: LLM, request_id: str) -> str:
    """Returns the worker that decodes a request, or "" if none does yet."""
    running = [told for told in llm.client.explain() if told.request_id == request_id and told.attempts]
    return running[0].attempts[-1].decode_worker if running else ""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_tab_has_a_serious_accessibility_finding(visit: Any, llm: LLM, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.base", reason="axe-playwright-python is not installed")
    script = Path(axe.__file__).with_name("axe.min.js").read_text()
    llm.client.generate([1, 2, 3], max_tokens=2)
    page = visit("workers", color_scheme=theme)
    page.locator(".card").first.wait_for()
    page.evaluate(script)
    for tab in ("workers", "chat", "requests", "blocks"):
        page.click(f"#tab-{tab}")
        if tab == "requests":
            page.click(".request button >> nth=0")
            page.locator(".details").wait_for()
        found = page.evaluate("axe.run()")["violations"]
        serious = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
        assert not serious, tab
    shoot(page, f"blocks-{theme}")


def test_a_phone_needs_no_horizontal_scrolling(visit: Any) -> None:
    page = visit("chat", color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 780})
    page.locator("#model").get_by_text("storyteller").wait_for()
    say(page, STORY, max_tokens="60")
    answered(page, 1)
    for tab in ("requests", "blocks", "workers", "chat"):
        page.click(f"#tab-{tab}")
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390, tab
    shoot(page, "phone")


def test_a_map_of_200_000_blocks_is_drawn(visit: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the script time of a frame: with 2,000 changed blocks, and of the whole map."""
    page = visit("blocks")
    page.locator("#arena").get_by_text("blocks of").wait_for()
    changed_ms, whole_ms, colours = page.evaluate(
        """async () => {
          const { BlockMap } = await import("/ui/block_map.js");
          const canvas = document.createElement("canvas");
          const frame = document.querySelector("#map").parentElement;
          const other = frame.cloneNode();
          other.append(canvas);
          frame.after(other);
          const map = new BlockMap(canvas, () => {});
          map.setAll(Uint8Array.from({ length: 200000 }, (_, cell) => 1 + cell % 5));
          const spent = (act) => {
            const took = Array.from({ length: 9 }, (_, round) => {
              const begin = performance.now();
              act(round);
              return performance.now() - begin;
            });
            return took.sort((a, b) => a - b)[4];
          };
          const cells = Array.from({ length: 2000 }, (_, i) => i * 97);
          const changed = spent((round) => map.change(cells, cells.map((cell) => 1 + (cell + round) % 5)));
          const whole = spent(() => map.drawAll());
          const { width, height } = canvas;
          const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, width, height).data.buffer);
          return [changed, whole, new Set(pixels).size];
        }"""
    )
    assert colours >= 5, "every state has its own colour"
    with capsys.disabled():
        print(f"\n200,000 blocks: {changed_ms:.1f} ms for 2,000 changes, {whole_ms:.1f} ms for all")
