"""The files, modules, links and flags that the docs name exist. The log may name some that were removed."""

from __future__ import annotations

import re
import subprocess
import textwrap
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "bench|block_store|common|decode_svc|engine|gateway|kernels|loadtest|looseleaf|prefill_svc|protos|testing|tools"
    "|worker"
)
OTHER_NAMES = {"looseleaf.internal", "looseleaf.service", "looseleaf.attempt.end"}  # a DNS name; attributes of spans
HISTORY = ("docs/log", "docs/benchmarks/faults/mutants.md")


@cache
def tracked() -> frozenset[str]:
    """Returns the files of the repository and their folders."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\n")  # fmt: skip
    files = {name for name in listed if name and (ROOT / name).exists()}
    return frozenset(files | {str(parent) for name in files for parent in Path(name).parents})


def pages() -> list[str]:
    return sorted(name for name in tracked() if name.endswith(".md") and not name.startswith(HISTORY))


def has_module(dotted: str) -> bool:
    """Returns whether a prefix of the name is a module whose text contains the remaining parts."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        path = "/".join(parts[:length])
        file = next((f for f in (f"{path}.py", f"{path}/__init__.py") if f in tracked()), None)
        if file is not None:
            text = (ROOT / file).read_text()
            return all(re.search(rf"\b{re.escape(name)}\b", text) for name in parts[length:])
    return False


@pytest.mark.parametrize("page", pages())
def test_what_a_page_names_is_there(page: str) -> None:
    text = (ROOT / page).read_text()
    missing = []
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target and not (ROOT / page).parent.joinpath(target).exists():
            missing.append(f"link {target}")
    code = re.findall(r"`([^`\n]+)`", text)
    for quoted in code:
        for path in re.findall(rf"(?<![\w/.-])((?:{PACKAGES}|docs|tests|examples)/[\w/.-]*\w)", quoted):
            if path not in tracked() and not any(name.startswith(path) for name in tracked()):
                missing.append(path)
        for dotted in re.findall(rf"(?<![\w/.-])((?:{PACKAGES})(?:\.\w+)+)(?![\w/])", quoted):
            if not dotted.endswith((".py", ".md")) and dotted not in OTHER_NAMES and not has_module(dotted):
                missing.append(dotted)
        for name in re.findall(r"(?<![\w/.*-])(\w+\.(?:py|lua|cpp|c|h|proto))\b", quoted):
            if not any(path.endswith(f"/{name}") or path == name for path in tracked()):
                missing.append(name)
    assert not missing, f"{page} names what is not there: {missing}"


@cache
def bodies() -> dict[str, str]:
    """Returns the text of every class in the code and every message in the protos, by name."""
    found: dict[str, str] = {}
    for name in tracked():
        if name.endswith((".py", ".proto")) and not name.startswith("tests/") and "_pb2" not in name:
            for part in re.split(r"^(?=class |message |@dataclass)", (ROOT / name).read_text(), flags=re.MULTILINE):
                if (header := re.search(r"^(?:class|message) (\w+)", part, re.MULTILINE)) is not None:
                    found[header[1]] = found.get(header[1], "") + part
    return found


@pytest.mark.parametrize("page", [page for page in pages() if page.startswith("docs/") and "benchmarks" not in page])
def test_the_methods_that_a_page_names_are_there(page: str) -> None:
    code = " ".join(re.findall(r"`([^`\n]+)`", (ROOT / page).read_text()))
    named = set(re.findall(r"(?<![\w./])([A-Z][a-z]\w+)\.([a-z_]\w+)", code))
    missing = [f"{name}.{member}" for name, member in named if not re.search(rf"\b{member}\b", bodies().get(name, ""))]
    assert not missing, f"{page} names what is not there: {missing}"


def test_comments_refer_to_sections_of_the_design_that_are_there() -> None:
    headings = set(re.findall(r"^## (.+)$", (ROOT / "docs/design.md").read_text(), re.MULTILINE))
    references = []
    for name in tracked():
        if name.endswith((".py", ".lua", ".c", ".cpp", ".h")) and name != "tests/test_docs.py":
            text = " ".join((ROOT / name).read_text().split())
            references += re.findall(r"docs/design\.md, ([A-Z][\w ]*?)(?:[:).]| as )", text)
    assert len(references) > 8
    assert set(references) <= headings, set(references) - headings


def test_no_page_names_a_design_that_is_not_in_the_repository() -> None:
    naming = [page for page in pages() if re.search(r"\bDESIGN\b", (ROOT / page).read_text())]
    assert not naming


def test_the_core_that_the_architecture_quotes_is_the_gateways() -> None:
    quoted = re.findall(r"```python\n(.*?)```", (ROOT / "docs/architecture.md").read_text(), re.DOTALL)
    assert len(quoted) == 1
    core = textwrap.dedent(quoted[0].rstrip(" "))
    assert core.count("\n") <= 9
    assert textwrap.indent(core, " " * 8) in (ROOT / "gateway/request/request_runner.py").read_text()
