"""The model that a deployment serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import StartupError
from looseleaf.serve import model_source
from looseleaf.serve.model_source import resolve, tiny_checkpoint


def test_a_directory_that_is_missing_or_no_model(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="does not exist"):
        resolve(str(tmp_path / "nowhere"))
    with pytest.raises(StartupError, match=r"config\.json"):
        resolve(str(tmp_path))


def test_without_a_model_a_random_one_is_made_once_and_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "BUILT_IN", tmp_path / "none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = resolve(None)
    assert source.is_tiny and source.notice is not None and "random weights" in source.notice
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {p.name for p in source.directory.iterdir()}
    before = (source.directory / "model.safetensors").stat().st_mtime_ns
    assert tiny_checkpoint(tmp_path / "looseleaf") == source.directory
    assert (source.directory / "model.safetensors").stat().st_mtime_ns == before
    assert list((tmp_path / "looseleaf").iterdir()) == [source.directory]


def test_the_built_in_model_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "BUILT_IN", tmp_path)
    assert resolve(None) == model_source.ModelSource(tmp_path)


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="cannot write"):
        tiny_checkpoint(tmp_path / "file" / "cache")


def test_a_config_alone_is_enough_for_dummy_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "config.json").write_text("{}")
    source = resolve(str(shape), dummy=True)
    assert source.directory.name == "shape" and source.notice is not None
    assert (source.directory / "config.json").read_text() == "{}"
    assert (source.directory / "tokenizer.json").is_file()
    assert resolve(str(shape)).directory == shape
