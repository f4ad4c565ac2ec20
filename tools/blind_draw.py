"""Draws docstrings of several source trees into one anonymous list, so that an editor judges the English of all of
them by the same standard (`python -m tools.blind_draw --seed 78 --out /tmp/draw stdlib=/usr/lib/python3.11 ours=.`).

Writes items.txt, numbered classes and functions without their origin, and key.txt, the tree of each item. With
`--verdicts FILE`, lines such as "17 FAIL reason", prints how many items of each tree passed.
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

LEAST_WORDS, MOST_WORDS, MOST_LINES = 8, 60, 35
_SKIPPED = {"tests", "site-packages", "build"}


def documented(root: Path) -> Iterator[str]:
    """Yields the first lines of each class and function that has a docstring of LEAST_WORDS to MOST_WORDS words. Skips
    hidden directories, tests, installed packages and files that do not parse.
    """
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        if any(part in _SKIPPED or part.startswith(".") for part in parts) or "_pb2" in file.name:
            continue
        try:
            source = file.read_text()
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                words = (ast.get_docstring(node) or "").split()
                if LEAST_WORDS <= len(words) <= MOST_WORDS:
                    last = min(node.end_lineno or node.lineno, node.lineno + MOST_LINES - 1)
                    yield "\n".join(lines[node.lineno - 1 : last])


def draw(trees: Sequence[tuple[str, Path]], count: int, seed: int) -> list[tuple[str, str]]:
    """Returns `count` items of each tree in random order, each with the name of its tree. Raises ValueError if a tree
    has fewer items.
    """
    rng = random.Random(seed)
    drawn = [(name, item) for name, root in trees for item in rng.sample(list(documented(root)), count)]
    rng.shuffle(drawn)
    return drawn


def tally(key: Sequence[str], verdicts: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Returns for each tree how many items passed, and how many have a verdict."""
    judged: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    for line in verdicts:
        number, verdict, *_ = line.split(maxsplit=2)
        judged[name := key[int(number) - 1]] += 1
        passed[name] += verdict == "PASS"
    return {name: (passed[name], judged[name]) for name in sorted(judged)}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.blind_draw")
    parser.add_argument("trees", nargs="+", help="NAME=DIRECTORY")
    parser.add_argument("--count", type=int, default=30, help="items of each tree")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--verdicts", type=Path)
    options = parser.parse_args(argv)
    trees = [(name, Path(root)) for name, _, root in (tree.partition("=") for tree in options.trees)]
    drawn = draw(trees, options.count, options.seed)
    if options.verdicts is not None:
        key = [name for name, _ in drawn]
        for name, (passed, judged) in tally(key, options.verdicts.read_text().splitlines()).items():
            print(f"{name}: {passed} of {judged}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    listed = (f"=== {number}\n{item}\n" for number, (_, item) in enumerate(drawn, 1))
    (options.out / "items.txt").write_text("\n".join(listed))
    (options.out / "key.txt").write_text("".join(f"{name}\n" for name, _ in drawn))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
