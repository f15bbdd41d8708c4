"""A run from a dict, read again, and its model converted and back: all from Python."""

from unittest import mock

import numpy as np
import pytest
from safetensors.torch import load_file

from megatron_dapo.library.conversion import convert_to_huggingface, convert_to_megatron
from megatron_dapo.library.start import train
from megatron_dapo.servers import child_process
from tests.forked_commands import ForkedPopen
from tests.helpers import REPOSITORY
from tests.sft_files import conversations, make_chat_model, write_rows

pytestmark = pytest.mark.distributed


def test_a_run_from_a_dict_is_read_and_its_model_converted(tmp_path, monkeypatch):
    make_chat_model(tmp_path / "model")
    write_rows(tmp_path / "train.jsonl", conversations(12, seed=1))
    settings = {
        "sft": {"enable": True, "max_length": 150},
        "actor_rollout_ref": {"model": {"path": tmp_path / "model"}, "actor": {"optim": {"lr": 1e-2}}},
        "data": {"train_files": [str(tmp_path / "train.jsonl")], "train_batch_size": 6},
        "trainer": {"run_dir": str(tmp_path / "run"), "total_training_steps": 3},
    }
    with mock.patch.object(child_process.subprocess, "Popen", ForkedPopen):
        run = train(settings)
    metrics = run.metrics()
    assert metrics["step"].tolist() == [1, 2, 3] and np.isfinite(metrics["train/loss"]).all()
    assert run.config().sft.max_length == 150

    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.chdir(tmp_path)
    megatron = convert_to_megatron("run/model", "megatron")
    again = load_file(convert_to_huggingface(megatron, "again") / "model.safetensors")
    trained = load_file("run/model/model.safetensors")
    assert again.keys() == trained.keys() and all(again[name].equal(trained[name]) for name in trained)
