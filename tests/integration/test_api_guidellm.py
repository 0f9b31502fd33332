"""GuideLLM, unmodified, loads real workers (where it is installed)."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.tokenizer import load_tokenizer
from tests.integration.service import Service

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

# It brings many packages; its command may be one of another environment.
COMMAND = os.environ.get("GUIDELLM", "guidellm")
NUM_REQUESTS, NUM_TOKENS = 8, 12


@pytest.fixture(scope="module")
def service(packaged_model: Path) -> Iterator[Service]:
    if shutil.which(COMMAND) is None:
        pytest.skip("guidellm is not installed (set GUIDELLM)")
    with Service(packaged_model, model_name="m") as running:
        yield running
        running.assert_idle()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_counts_every_request_and_token(
    service: Service, packaged_model: Path, tmp_path: Path, path: str
) -> None:
    prompts = [json.dumps({"prompt": f"Fact number {i}:"}) for i in range(NUM_REQUESTS)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    load_tokenizer(packaged_model)._backend.save(str(tokenizer / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
    backend = f"kind=openai_http,target={service.url},model=m,request_format={path}"
    extras = f"extras.body.max_tokens={NUM_TOKENS},extras.body.ignore_eos=true"
    options = {
        "--backend": f"{backend},{extras}",
        "--profile": "kind=concurrent,streams=2",
        "--constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "--data": f"kind=json_file,path={tmp_path / 'prompts.jsonl'}",
        "--tokenizer": f"kind=huggingface_auto,model={tokenizer}",
        "--output": f"kind=json,path={tmp_path / 'out.json'}",
    }
    arguments = [word for option in options.items() for word in option]
    offline = {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [COMMAND, "run", *arguments, "--disable-console"],
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (report,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    totals = report["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0)
    for request in report["requests"]["successful"]:
        assert request["output_tokens"] == NUM_TOKENS
        assert request["output"]
