"""S1: data from the network, from Redis or from a model directory is never executed or unpickled. One test reads our
sources. Another test audits the interpreters of a whole deployment while it serves.
"""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from engine.tiny import make_checkpoint
from looseleaf import LLM

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("common", "kernels", "engine", "block_store", "gateway", "prefill_svc", "decode_svc", "looseleaf", "protos")
MODULES = {"pickle", "cPickle", "marshal", "dill", "cloudpickle", "shelve", "yaml", "jsonpickle", "joblib"}
SAFE_YAML = {"yaml.safe_load", "yaml.YAMLError"}
"""The names of yaml that may be used. Its other loaders can construct Python objects."""
CALLS = {"eval", "exec", "torch.load", "np.load", "numpy.load", "pickle.loads", "os.system", "os.popen"}
LISTENER = """
import os, sys
_OUT = os.environ["AUDIT_FILE"]
def _listen(event, args):
    if event in ("pickle.find_class", "os.system"):
        with open(_OUT, "a") as file:
            file.write(f"{sys.argv[:3]} {event} {args}\\n")
sys.addaudithook(_listen)
with open(_OUT + ".listeners", "a") as file:
    file.write(f"{os.getpid()}\\n")
"""


def named(node: ast.expr) -> str:
    """Returns "torch.load" for the expression torch.load, and an empty string for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := named(node.value)):
        return f"{head}.{node.attr}"
    return ""


def findings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (
                a.name for a in node.names if a.name.split(".")[0] in MODULES and (a.name, a.asname) != ("yaml", None)
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Attribute) and (name := named(node)).startswith("yaml.") and name not in SAFE_YAML:
            yield name
        elif isinstance(node, ast.Call):
            if named(node.func) in CALLS:
                yield named(node.func)
            for keyword in node.keywords:
                constant = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if keyword.arg in ("shell", "allow_pickle", "trust_remote_code") and constant is True:
                    yield f"{named(node.func)}({keyword.arg}=True)"


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from yaml import load", "import yaml as y", "import yaml\nyaml.load(x)", "torch.load(x)"],
)
def test_what_may_run_code_is_found(source: str) -> None:
    assert list(findings(source))


def test_yaml_without_objects_is_not_found() -> None:
    assert not list(findings("import yaml\ntry:\n    yaml.safe_load(x)\nexcept yaml.YAMLError:\n    pass"))


def test_our_sources_read_no_code_from_data() -> None:
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py") if "bench" not in file.parts]
    assert len(files) > 200
    found = {str(file.relative_to(ROOT)): list(findings(file.read_text())) for file in files}
    assert {file: what for file, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "torch.load(f)",
        "eval(x)",
        "run(c, shell=True)",
        "import yaml as y",
    ],
)
def test_the_reader_finds_what_it_should(source: str) -> None:
    assert list(findings(source))


def test_a_launch_that_serves_unpickles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every interpreter of the deployment has an audit hook, which is installed before the first import of our code."""
    heard, hooks = tmp_path / "heard", tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(LISTENER)
    monkeypatch.setenv("AUDIT_FILE", str(heard))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(hooks), os.environ.get("PYTHONPATH")])))
    model = make_checkpoint(tmp_path / "model", "llama")
    with LLM(str(model), num_blocks=256, max_model_len=512, roles="split") as llm:
        listening = {int(line) for line in (tmp_path / "heard.listeners").read_text().split()}
        assert set(llm.pids.values()) <= listening
        llm.client.generate("the mill", max_tokens=4, n=2)
        base = f"http://{llm.addresses.http}/v1"
        assert httpx.post(f"{base}/completions", json={"prompt": "a", "max_tokens": 2}, timeout=30).status_code == 200
        for raw in (b"\x80\x04cos\nsystem\n(S'true'\ntR.", b"!!python/object/apply:os.system ['true']"):
            assert httpx.post(f"{base}/completions", content=raw, timeout=30).status_code == 400
    assert not heard.exists(), heard.read_text()


def test_the_listener_would_hear_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LISTENER)
    code = "import pickle, fractions; pickle.loads(pickle.dumps(fractions.Fraction(1, 2)))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "AUDIT_FILE": str(tmp_path / "heard")}
    subprocess.run(["python3", "-c", code], env=environment, check=True)
    assert "pickle.find_class" in (tmp_path / "heard").read_text()
