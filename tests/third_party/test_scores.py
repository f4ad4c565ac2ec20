"""The log-likelihoods of lm-eval through the server equal those of transformers, both in fp32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from looseleaf import LLM
from tests.third_party.conftest import STORYTELLER
from tests.third_party.install import CLIENTS, NotInstalled, install
from tests.third_party.page import Row
from tests.third_party.test_clients import run

pytestmark = [pytest.mark.third_party, pytest.mark.timeout(1500)]
MOST_DIFFERENCE = 1e-3
BOS = 1


@pytest.fixture(scope="module")
def in_fp32() -> Iterator[LLM]:
    with LLM(num_blocks=2048, dtype="float32") as running:
        yield running


def score(model: Any, tokenizer: Tokenizer, context: str, continuation: str) -> tuple[float, bool]:
    """Returns the log-likelihood of a continuation, and whether greedy decoding would produce it."""
    whole = tokenizer.encode(context + continuation, add_special_tokens=False).ids
    first = len(tokenizer.encode(context, add_special_tokens=False).ids)
    with torch.no_grad():
        rows = model(torch.tensor([[BOS, *whole]])).logits[0].log_softmax(-1)[first:-1]
    wanted = torch.tensor(whole[first:])
    return float(rows.gather(1, wanted[:, None]).sum()), bool((rows.argmax(-1) == wanted).all())


def test_lm_eval_scores_as_transformers_do(in_fp32: LLM, rows: dict[str, Row], tmp_path: Path) -> None:
    [client] = [client for client in CLIENTS if client.name == "lm-eval"]
    try:
        install(client)
    except NotInstalled as reason:
        pytest.skip(f"not installed: {reason}")
    url = f"http://{in_fp32.addresses.http}"
    done = run(client, {"LOOSELEAF_URL": url, "LOOSELEAF_TOOLS_URL": url, "LOOSELEAF_SCRATCH": str(tmp_path)})
    assert '"error": null' in done.stdout, done.stdout + done.stderr
    [file] = (tmp_path / "out").rglob("samples_*.jsonl")
    model = AutoModelForCausalLM.from_pretrained(STORYTELLER, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(STORYTELLER / "tokenizer.json"))
    differences = []
    for line in file.read_text().splitlines():
        sample = json.loads(line)
        for number, [[found, is_greedy]] in enumerate(sample["resps"]):
            asked = sample["arguments"][f"gen_args_{number}"]
            expected, greedy = score(model, tokenizer, asked["arg_0"], asked["arg_1"])
            assert (str(is_greedy) == "True") == greedy, asked
            differences.append(abs(float(found) - expected))
    assert len(differences) > 15
    wrong = f"{max(differences)} apart" if max(differences) > MOST_DIFFERENCE else None
    if client.name in rows:
        what = f"{len(differences)} log-likelihoods in fp32 within {MOST_DIFFERENCE} of those of transformers"
        rows[client.name].note(what, wrong)
    assert wrong is None, wrong
