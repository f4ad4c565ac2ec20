"""`lm_eval` with local-completions: log-likelihoods of a task that this script creates, without a network.

The results are stored in $LOOSELEAF_SCRATCH, and tests/third_party/test_scores.py compares them with transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tried import MODEL, URL, run, works

SCRATCH = Path(os.environ["LOOSELEAF_SCRATCH"])
TOKENIZER = os.environ["LOOSELEAF_MODEL_DIRECTORY"]
QUESTIONS = (
    ("Once upon a time there was a little", [" girl", " table", " of", " wolf"], 0),
    ("The wolf ran into the", [" forest", " because", " were"], 0),
    ("The old woman said to the", [" boy", " runs", " and"], 0),
    ("They lived happily ever", [" after", " the", " cat", " so"], 0),
    ("The king had three", [" sons", " is", " quickly"], 0),
    ("It was a cold", [" day", " were", " him"], 0),
)
TASK = """\
task: tiny_stories
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
"""


@works(
    "local-completions: log-likelihoods of a multiple-choice task",
    "set add_bos_token=True; otherwise lm-eval sends prompts without BOS, and the scores differ",
)
def loglikelihood() -> None:
    tasks = SCRATCH / "tasks"
    tasks.mkdir(exist_ok=True)
    lines = [json.dumps({"question": q, "choices": choices, "answer": a}) for q, choices, a in QUESTIONS]
    (tasks / "data.jsonl").write_text("\n".join(lines) + "\n")
    (tasks / "tiny_stories.yaml").write_text(TASK.format(data=tasks / "data.jsonl"))
    model = (
        f"model={MODEL},base_url={URL}/v1/completions,tokenizer={TOKENIZER},tokenized_requests=True,add_bos_token=True"
    )
    command = [
        str(Path(sys.executable).parent / "lm_eval"), "--model", "local-completions", "--model_args", model,
        "--include_path", str(tasks), "--tasks", "tiny_stories", "--batch_size", "4", "--log_samples",
        "--output_path", str(SCRATCH / "out"),
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(SCRATCH / "hf")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    [samples] = (SCRATCH / "out").rglob("samples_*.jsonl")
    assert len(samples.read_text().splitlines()) == len(QUESTIONS)


run()
