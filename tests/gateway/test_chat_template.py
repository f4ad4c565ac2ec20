"""Chat templates follow Hugging Face's conventions and run in a sandbox."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from common.errors import InvalidArgument, StartupError
from gateway.intake.assets import load_assets
from gateway.intake.chat_template import ChatTemplate
from testing.gateway.parts import CHAT_TEMPLATE, make_tokenizer

USER = [{"role": "user", "content": "hi"}]


def test_messages_and_special_tokens_are_rendered() -> None:
    template = ChatTemplate("{{ bos_token }}" + CHAT_TEMPLATE, {"bos_token": "<s>"})
    assert template.render(USER) == "<s><user>hi\n<assistant>"


def test_blocks_are_trimmed_and_the_usual_helpers_are_there() -> None:
    body = "  {% if true %}\n{{ m | tojson }}{{ strftime_now('%Y')[:2] }}{% break %}\n  {% endif %}\n"
    source = "{% for m in messages %}\n" + body + "{% endfor %}"
    assert ChatTemplate(source, {}).render([{"role": "u", "content": "<é>"}]) == '{"role": "u", "content": "<é>"}20'


def test_a_template_can_refuse_messages_with_a_sentence() -> None:
    with pytest.raises(InvalidArgument, match="no tools here"):
        ChatTemplate(CHAT_TEMPLATE, {}).render([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ 1 / 0 }}",
        "{{ messages[99].content.x }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(InvalidArgument):
        ChatTemplate(source, {}).render(USER)


def test_a_template_that_runs_long_is_stopped() -> None:
    loop = "{% for i in range(90000) %}{% for j in range(90000) %}x{% endfor %}{% endfor %}"
    began = time.thread_time()
    with pytest.raises(InvalidArgument, match="100 ms"):
        ChatTemplate(loop, {}).render(USER)
    assert time.thread_time() - began < 0.5


def test_a_template_that_is_no_jinja_stops_the_start() -> None:
    with pytest.raises(StartupError, match="chat template"):
        ChatTemplate("{% for %}", {})


def write_model(directory: Path, **files: object) -> Path:
    make_tokenizer().save(str(directory / "tokenizer.json"))
    content = {"config": {"vocab_size": 400, "max_position_embeddings": 128, "eos_token_id": 2}, **files}
    for name, value in content.items():
        (directory / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return directory


def test_assets_are_read_from_a_directory(tmp_path: Path) -> None:
    write_model(
        tmp_path,
        generation_config={"temperature": 0.7, "eos_token_id": [2, 5], "do_sample": True},
        tokenizer_config={"chat_template": [{"name": "default", "template": "X"}], "bos_token": {"content": "<s>"}},
    )
    assets = load_assets(str(tmp_path))
    assert (assets.name, assets.vocab_size, assets.max_position) == (tmp_path.name, 400, 128)
    assert assets.eos_token_ids == (2, 5) and assets.defaults.temperature == 0.7 and assets.defaults.top_p == 1.0
    assert assets.chat_template == "X" and assets.special_tokens == {"bos_token": "<s>"}
    (tmp_path / "chat_template.jinja").write_text("Y")
    assert load_assets(str(tmp_path), "name").chat_template == "Y"


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("config", "{", "config.json"),
        ("config", "[]", "config.json"),
        ("config", {"max_position_embeddings": 5}, "vocab_size"),
        ("config", {"vocab_size": 400, "max_position_embeddings": 0}, "max_position_embeddings"),
        ("generation_config", {"temperature": "hot"}, "temperature"),
        ("tokenizer", "{}", "tokenizer.json"),
    ],
)
def test_what_is_wrong_with_a_model_directory_is_named(tmp_path: Path, name: str, content: object, named: str) -> None:
    write_model(tmp_path, **{name: content})
    with pytest.raises(StartupError, match=named):
        load_assets(str(tmp_path))


def test_a_missing_file_or_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="not a directory"):
        load_assets(str(tmp_path / "none"))
    with pytest.raises(StartupError, match=r"config\.json is missing"):
        load_assets(str(tmp_path))
    write_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(StartupError, match=r"tokenizer\.json is missing"):
        load_assets(str(tmp_path))
