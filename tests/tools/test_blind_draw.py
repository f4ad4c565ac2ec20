"""The blind draw of docstrings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.blind_draw import draw, main

CODE = '''
def short():
    """Returns four."""


class {name}:
    """A class whose docstring has enough words to be drawn by the tool."""

    def method(self):
        """Returns the number of words that the docstring of this method has."""
        return 13
'''


@pytest.fixture
def trees(tmp_path: Path) -> list[tuple[str, Path]]:
    for name in ("first", "second"):
        for place in (name, f"{name}/tests", f"{name}/.hidden"):
            (tmp_path / place).mkdir()
            (tmp_path / place / "code.py").write_text(CODE.format(name=place.replace("/", "_").replace(".", "")))
        (tmp_path / name / "broken.py").write_text("def (")
    return [(name, tmp_path / name) for name in ("first", "second")]


def test_a_draw_takes_as_many_of_each_tree_and_says_nothing_of_their_origin(trees: list[tuple[str, Path]]) -> None:
    drawn = draw(trees, 2, seed=1)
    assert sorted(name for name, _ in drawn) == ["first", "first", "second", "second"]
    assert {item.splitlines()[0].strip() for _, item in drawn} == {"class first:", "class second:", "def method(self):"}
    assert drawn == draw(trees, 2, seed=1)
    with pytest.raises(ValueError, match="larger than population"):
        draw(trees, 3, seed=1)


def test_verdicts_are_counted_by_tree(
    trees: list[tuple[str, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*(f"{name}={root}" for name, root in trees), "--count", "2", "--seed", "1", "--out", str(tmp_path)]
    assert main(arguments) == 0
    key = (tmp_path / "key.txt").read_text().split()
    assert (tmp_path / "items.txt").read_text().count("=== ") == 4
    verdicts = [f"{number} {'PASS' if name == 'first' else 'FAIL unclear'}" for number, name in enumerate(key, 1)]
    (tmp_path / "verdicts").write_text("\n".join(verdicts))
    assert main([*arguments, "--verdicts", str(tmp_path / "verdicts")]) == 0
    assert capsys.readouterr().out == "first: 2 of 2\nsecond: 0 of 2\n"
