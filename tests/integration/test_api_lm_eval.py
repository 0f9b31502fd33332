"""lm-eval, unmodified, scores a task file against real workers (where it is installed)."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.tokenizer import load_tokenizer
from tests.integration.service import Service

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

MODEL = "smollm2-135m-instruct"
TASKS = Path(__file__).parent / "lm_eval_tasks"
# lm-eval brings a hundred packages; its interpreter may be one of another environment.
PYTHON = os.environ.get("LM_EVAL_PYTHON", sys.executable)


@pytest.fixture(scope="module")
def service(packaged_model: Path) -> Iterator[Service]:
    found = subprocess.run([PYTHON, "-c", "import lm_eval"], capture_output=True, check=False)
    if found.returncode:
        pytest.skip("lm-eval is not installed (set LM_EVAL_PYTHON)")
    with Service(packaged_model, model_name=MODEL) as running:
        yield running
        running.assert_idle()


def evaluate(folder: Path, model: str, url: str, task: str, *more: str) -> dict[str, Any]:
    """Run the command line; the task's metrics."""
    for path in TASKS.glob("*.yaml"):
        text = path.read_text().replace("CAPITALS_JSONL", str(TASKS / "capitals.jsonl"))
        (folder / path.name).write_text(text)
    arguments = f"model={MODEL},base_url={url},num_concurrent=4,max_retries=1"
    command = [PYTHON, "-m", "lm_eval", "--model", model, "--tasks", task]
    command += ["--include_path", str(folder), "--output_path", str(folder / "out")]
    command += ["--model_args", arguments + "".join(f",{m}" for m in more)]
    if model == "local-chat-completions":
        command.append("--apply_chat_template")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        command,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (result,) = (folder / "out").rglob("results_*.json")
    metrics: dict[str, Any] = json.loads(result.read_text())["results"][task]
    return metrics


def test_local_completions_scores_by_logprobs(
    service: Service, packaged_model: Path, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    load_tokenizer(packaged_model)._backend.save(str(tokenizer / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
    for tokenized in ("True", "False"):
        folder = tmp_path / tokenized
        folder.mkdir()
        metrics = evaluate(
            folder,
            "local-completions",
            f"{service.url}/v1/completions",
            "capitals",
            f"tokenizer={tokenizer}",
            f"tokenized_requests={tokenized}",
        )
        assert metrics["acc,none"] >= 0.75


def test_local_chat_completions_scores_by_generation(service: Service, tmp_path: Path) -> None:
    url = f"{service.url}/v1/chat/completions"
    metrics = evaluate(tmp_path, "local-chat-completions", url, "answers")
    assert metrics["exact_match,names_it"] >= 0.5
