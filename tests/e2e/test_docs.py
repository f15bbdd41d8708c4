"""The commands of docs/checkpoints.md without a network or a cluster do as the text says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import converted
from tests.helpers import REPOSITORY
from tests.model_json import MODEL_JSON
from tests.tiny_models import CHAT_TEMPLATE, make_tiny, make_tokenizer

pytestmark = pytest.mark.e2e

# .venv, a network, a cluster, a server of its own
ELSEWHERE = ("source ", "hf ", "sbatch ", "python -m sglang.")


def section() -> str:
    """The first block of commands of "From a download to a served model"."""
    text = (REPOSITORY / "docs" / "checkpoints.md").read_text().partition("## From a download to a served model\n")[2]
    return re.search(r"(?m)((?:^    .*\n|^\n)+)", text)[1]


def test_from_a_download_to_a_model_that_can_be_served(tmp_path):
    downloads, models = tmp_path / "downloads" / "data", tmp_path / "models"
    downloads.mkdir(parents=True)
    rows = [{"prompt": [{"role": "user", "content": "2+2=?"}], "reward_model": {"ground_truth": "4"}}] * 3
    for name in ("dapo-math-17k", "aime-2024"):
        pq.write_table(pa.Table.from_pylist(rows), downloads / f"{name}.parquet")
    (models / "Qwen2.5-7B").mkdir(parents=True)
    (models / "Qwen2.5-7B" / "config.json").write_text(json.dumps({**MODEL_JSON, "max_position_embeddings": 32768}))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(models / "Qwen2.5-7B")
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    tiny = make_tiny(tmp_path / "tiny", "qwen2", layers=2)
    (tmp_path / "runs" / "NAME" / "checkpoints").mkdir(parents=True)
    converted(tiny, tmp_path / "runs" / "NAME" / "checkpoints" / "step_000300")

    lines = [line[4:] for line in section().splitlines()]
    script = "\n".join(line for line in lines if not line.startswith(ELSEWHERE)).replace(
        "python -m", f"{sys.executable} -m"
    )
    assert len(re.findall(r"-m (?:checkpoints_tools\.|megatron_dapo train)", script)) == 4
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Process plan" in done.stdout and pq.read_table(tmp_path / "data" / "dapo-math-17k.parquet").num_rows == 1
    AutoModelForCausalLM.from_pretrained(models / "trained")


def test_hf_download_has_the_options_that_are_given():
    options_help = subprocess.run(
        [Path(sys.executable).with_name("hf"), "download", "--help"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}, capture_output=True, text=True,
    ).stdout  # fmt: skip
    used = [line for line in section().splitlines() if line.strip().startswith("hf download")]
    assert len(used) == 3 and all(option in options_help for line in used for option in re.findall(r"--[a-z-]+", line))
