"""The command `sft` as a user starts it: its files,
and that a stopped or killed run is the same run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from checkpoints_tools.stored_tensors import TensorFolder
from launch.local import run_local
from megatron_dapo.checkpointing.folders import newest_first, read_controller_state
from megatron_dapo.checkpointing.manifest import verify
from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.servers import child_process
from megatron_dapo.storage.run_folder import RunFolder
from tests.forked_commands import ForkedPopen
from tests.helpers import free_port
from tests.peft_adapters import with_adapter
from tests.sft_files import conversations, make_chat_model, write_rows

pytestmark = pytest.mark.distributed

NUM_STEPS = 30
LIFE_S = 120.0


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_chat_model(folder / "model")
    write_rows(folder / "train.jsonl", conversations(40, seed=1))
    write_rows(folder / "val.jsonl", conversations(5, seed=2))
    return folder


def overrides_of(inputs: Path, run: Path) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={inputs / 'model'}",
        f"data.train_files=[{inputs / 'train.jsonl'}]",
        f"data.val_files=[{inputs / 'val.jsonl'}]",
        "data.train_batch_size=6",
        "sft.max_length=150",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=3",
        "actor_rollout_ref.actor.optim.lr_decay_style=cosine",
        f"trainer.run_dir={run}",
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.test_freq=10",
        "trainer.save_interval=5",
        "trainer.keep_last=2",
    ]


def start(inputs: Path, run: Path, *more: str) -> ForkedPopen:
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    variables = place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with (run.parent / f"{run.name}.log").open("ab") as log:
        return ForkedPopen(
            [sys.executable, "-m", "megatron_dapo", "sft", *overrides_of(inputs, run), *more],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {name: str(value) for name, value in variables.items()},
            start_new_session=True,
            preexec_fn=None,
        )


def finished(inputs: Path, run: Path, *more: str) -> int:
    code = start(inputs, run, *more).wait(LIFE_S)
    assert code in (0, 85), (run.parent / f"{run.name}.log").read_text()[-4000:]
    return code


def metrics_of(run: Path) -> list[dict]:
    """Without seconds, and quotients of them."""
    lines = [json.loads(line) for line in RunFolder(run).metrics.read_text().splitlines()]
    return [{name: x for name, x in line.items() if not name.startswith(("time", "perf/"))} for line in lines]


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory) -> Path:
    """A run without a break."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert finished(inputs, run) == 0
    return run


def test_a_run_reports_its_loss_and_leaves_a_model_that_transformers_reads(whole, inputs):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    steps = [line for line in metrics_of(whole) if "train/loss" in line]
    held_out = [line for line in metrics_of(whole) if "val/loss" in line]
    assert [line["step"] for line in steps] == list(range(1, NUM_STEPS + 1))
    assert [line["step"] for line in held_out] == [0, 10, 20, 30]
    assert steps[-1]["train/loss"] < 0.8 * steps[0]["train/loss"]
    assert held_out[-1]["val/loss"] < 0.8 * held_out[0]["val/loss"]
    assert steps[0]["actor/lr"] == pytest.approx(1e-2 / 3) and steps[2]["actor/lr"] == pytest.approx(1e-2)
    assert steps[-1]["actor/lr"] < 1e-4 and steps[-1]["data/epoch"] == pytest.approx(NUM_STEPS * 6 / 40)
    names = {"actor/entropy", "actor/grad_norm", "actor/lr", "actor/num_optimizer_steps", "data/epoch"}
    assert steps[0].keys() == names | {"step", "train/loss", "data/num_counted_tokens"}

    log = (whole.parent / "run.log").read_text()
    assert "train.jsonl: 40 conversations of 40 rows" in log and "180 conversations are drawn in all: 4.5 epochs" in log
    assert "loss  entropy" in log and "held out, after step 30: loss" in log
    run = RunFolder(whole)
    assert [folder.name for folder in newest_first(run.checkpoints)] == ["step_000030", "step_000025"]
    model = AutoModelForCausalLM.from_pretrained(run.model)
    assert AutoTokenizer.from_pretrained(run.model).chat_template
    card = (run.model / "README.md").read_text()
    assert f"by {NUM_STEPS} steps of fine-tuning" in card and f"| loss | {held_out[0]['val/loss']:.4g} |" in card
    before = load_file(inputs / "model" / "model.safetensors")
    assert all(not tensor.equal(before[name]) for name, tensor in model.state_dict().items())


def test_a_stopped_and_killed_run_equals_the_unbroken_run_bit_for_bit(whole, inputs, tmp_path):
    run = RunFolder(tmp_path / "run").create()
    run.stop.touch()
    assert finished(inputs, run.path) == 85
    assert [folder.name for folder in newest_first(run.checkpoints)] == ["step_000001"] and not run.stop.exists()

    life = start(inputs, run.path)
    deadline = time.monotonic() + LIFE_S
    while not any(line["step"] >= 12 for line in metrics_of(run.path)):
        assert life.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(life.pid, signal.SIGKILL)
    assert life.wait(LIFE_S) == -signal.SIGKILL
    saved = newest_first(run.checkpoints)[0]
    assert verify(saved).is_whole and 1 < int(saved.name[-6:]) <= 15

    assert finished(inputs, run.path) == 0
    log = (tmp_path / "run.log").read_text()
    assert f"Resumed after step {int(saved.name[-6:])} from {saved}" in log
    assert "the place in the conversations" in log and log.count("not restored: nothing is missing") == 2
    assert metrics_of(run.path) == metrics_of(whole)
    models = [RunFolder(path).model / "model.safetensors" for path in (run.path, whole)]
    assert models[0].read_bytes() == models[1].read_bytes()
    states = [read_controller_state(RunFolder(path).checkpoint(NUM_STEPS)) for path in (run.path, whole)]
    assert states[0] == states[1]


def test_only_adapters_are_saved_resumed_bit_for_bit_and_merged_at_the_end(inputs, tmp_path):
    base = load_file(inputs / "model" / "model.safetensors")
    lora = ["actor_rollout_ref.model.lora_rank=4", "trainer.total_training_steps=6", "trainer.save_interval=3"]
    through, stopped = (RunFolder(tmp_path / name).create() for name in ("through", "stopped"))
    assert finished(inputs, through.path, *lora) == 0
    stopped.stop.touch()
    assert finished(inputs, stopped.path, *lora) == 85
    assert finished(inputs, stopped.path, *lora) == 0
    assert metrics_of(stopped.path) == metrics_of(through.path)
    for part in ("adapter/adapter_model.safetensors", "model/model.safetensors"):
        assert (stopped.path / part).read_bytes() == (through.path / part).read_bytes(), part
    tensors = load_file(through.adapter / "adapter_model.safetensors")
    by_hand = with_adapter(base, tensors, scale=16 / 4)
    merged = load_file(through.model / "model.safetensors")
    assert all(torch.allclose(merged[name], tensor, rtol=1e-6, atol=1e-6) for name, tensor in by_hand.items())
    assert not any(merged[name].equal(base[name]) for name in base if "_proj.weight" in name)

    saved = through.checkpoint(6)
    assert verify(saved).is_whole
    written = (saved / "adapter" / "adapter_model.safetensors").read_bytes()
    assert written == (through.adapter / "adapter_model.safetensors").read_bytes()
    names = TensorFolder(saved / "megatron").tensors  # each with two moments
    assert len(names) == 3 * len(tensors) and all("adapters.model.layers." in name for name in names)
    go_on = [*lora, f"actor_rollout_ref.model.lora_adapter_path={through.adapter}"]
    assert finished(inputs, tmp_path / "third", *go_on) == 0
    first, last = (metrics_of(path) for path in (tmp_path / "third", through.path))
    assert first[0]["val/loss"] == pytest.approx(last[-1]["val/loss"], rel=1e-6)


def test_launch_local_starts_the_ranks_of_a_run_that_fine_tunes(whole, inputs, tmp_path, capfd):
    """Two tensor-parallel ranks: stopped, resumed, and up to rounding the same losses
    as one rank."""
    run = RunFolder(tmp_path / "run").create()
    config = load_and_validate(
        None,
        [
            *overrides_of(inputs, run.path),
            "sft.enable=true",
            "trainer.n_procs_per_node=2",
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        ],
    )
    run.stop.touch()
    with mock.patch.object(child_process.subprocess, "Popen", ForkedPopen):
        assert run_local(config) == 85
        assert run_local(config) == 0
    assert "server" not in capfd.readouterr().out
    losses, expected = (
        [line["train/loss"] for line in metrics_of(path) if "train/loss" in line] for path in (run.path, whole)
    )
    # Adam divides by gradients as small as their rounding
    assert losses[:3] == pytest.approx(expected[:3], rel=1e-3)
    assert len(losses) == NUM_STEPS


def test_a_run_folder_of_the_other_kind_is_not_gone_on_with(whole, inputs):
    from megatron_dapo.checkpointing.config_changes import check_changes, config_changes
    from megatron_dapo.checkpointing.folders import read_trainer_state
    from megatron_dapo.common.errors import UserError
    from megatron_dapo.config.loader import load_config

    before = read_trainer_state(newest_first(RunFolder(whole).checkpoints)[0])["config"]
    now = load_config(None, overrides_of(inputs, whole))
    with pytest.raises(UserError, match="sft.enable is false, but was true"):
        check_changes(config_changes(before, now), now, (), "checkpoint")
