"""cluster.yaml, and what the commands say without Ray."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from common.errors import StartupError
from looseleaf.cli import main
from looseleaf.cluster.settings import ClusterSettings, read_file


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    return file


def test_a_file_has_the_settings_of_serve_and_those_of_the_cluster(tmp_path: Path) -> None:
    found = read_file(
        write(tmp_path, "hosts: 2\nprefill: 2\ntensor_parallel_size: 2\nmemory_budget: 4GiB\nui: false\n")
    )
    assert (found.hosts, found.prefill, found.decode, found.tensor_parallel_size) == (2, 2, 1, 2)
    assert found.memory_budget == 4 << 30 and not found.ui
    again = ClusterSettings(**found.on_every_node())
    assert again == found and again.model_fields_set == found.model_fields_set
    assert read_file(write(tmp_path, "")) == ClusterSettings()


@pytest.mark.parametrize(
    "text,reason",
    [
        ("hosts: 0", r"hosts: Input should be greater than or equal to 1 \(got 0\)"),
        ("hosts: 65\nprefill: 64\ndecode: 64", "hosts: Input should be less than or equal to 64"),
        ("hosts: two", r"hosts: Input should be a valid integer.*\(got 'two'\)"),
        ("spread: never", "spread: Input should be 'preferred' or 'strict'"),
        ("transport: tcp", "transport: Input should be 'bytes' or 'nixl'"),
        ("hosts: 3", "hosts: 3 is more than the 2 workers"),
        ("roles: both", "roles: both is not supported on Ray"),
        ("device: cuda", "device: cuda is not supported on Ray"),
        ("name: My.Model", "name: String should match pattern"),
        ("tensor-parallel-size: 2", "unknown field 'tensor-parallel-size'; the fields are allow_runtime"),
        ("- hosts", "must contain a mapping from settings to values"),
        ("hosts: [", "cannot be read"),
        ("api_key: [secret-word]", r"api_key: Input should be a valid string$"),
    ],
)
def test_a_mistake_names_the_field_and_the_limit(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(StartupError, match=reason) as refused:
        read_file(write(tmp_path, text))
    assert "cluster.yaml" in str(refused.value) and "secret-word" not in str(refused.value)


def test_nodes_get_absolute_paths_and_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    given = ClusterSettings(model="llama", api_key_file="keys").on_every_node()
    assert given == {"model": str(tmp_path / "llama"), "api_key_file": str(tmp_path / "keys")}
    assert ClusterSettings(model="meta/llama").on_every_node() == {"model": "meta/llama"}


@pytest.mark.parametrize("words", [["up"], ["status"], ["scale", "decode=2"], ["down"], ["serve", "--ray"]])
def test_without_ray_a_command_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # an import raises ImportError
    file = [str(write(tmp_path, "hosts: 1"))] if words == ["up"] else []
    assert main([*words, *file]) == 1
    assert "this command needs Ray: pip install 'looseleaf[ray]'" in capsys.readouterr().err
