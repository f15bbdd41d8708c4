"""A stopped and resumed run is the same run: bit for bit in its layout, to rounding in another.

The trainer is the real one, started by launch.local; the rollout is scripted (see
scripted_trainer), because a server's sampling is not repeatable. The rollout's part of a checkpoint
is the real bookkeeping: cursor, surplus groups.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from launch.local import run_local
from megatron_dapo.checkpointing.folders import (
    CONTROLLER_STATE,
    newest_first,
    read_controller_state,
    read_trainer_state,
)
from megatron_dapo.checkpointing.manifest import verify, write_manifest
from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.config.schema.config import Config
from megatron_dapo.servers import child_process
from megatron_dapo.storage.run_folder import RunFolder, batch_file
from tests.e2e.scripted_trainer import NUM_FINISHED
from tests.forked_commands import ForkedPopen
from tests.helpers import REPOSITORY, run_torchrun
from tests.proofs import proof
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.e2e

NUM_STEPS, STOPPED_AFTER = 6, 3


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """The model, and a folder that stands for dumped batches (the scripted rollout reads none)."""
    folder = tmp_path_factory.mktemp("given")
    make_tiny(folder / "model", "qwen2", layers=2)
    shutil.copytree(folder / "model", folder / "reference")
    for step in range(1, NUM_STEPS + 2):
        batch_file(folder / "batches", step).parent.mkdir(exist_ok=True)
        batch_file(folder / "batches", step).touch()
    return folder


def config_of(inputs: Path, run: Path, *overrides: str) -> Config:
    """KL in the reward with an adaptive coefficient, a learning rate with warm-up and decay, two
    optimizer steps per rollout step, experience replay. Every kind of state is there, and all of
    them move."""
    return load_and_validate(
        None,
        [
            f"actor_rollout_ref.model.path={inputs / 'model'}",
            f"actor_rollout_ref.ref.path={inputs / 'reference'}",
            f"trainer.replay={inputs / 'batches'}",
            f"trainer.run_dir={run}",
            f"trainer.total_training_steps={NUM_STEPS}",
            "trainer.n_procs_per_node=2",
            "trainer.logger=[jsonl]",
            "data.max_prompt_length=16",
            "data.max_response_length=32",
            "data.train_batch_size=4",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.actor.optim.lr_warmup_steps=2",
            "actor_rollout_ref.actor.optim.lr_decay_style=cosine",
            "algorithm.use_kl_in_reward=true",
            "algorithm.kl_ctrl.type=adaptive",
            "algorithm.kl_ctrl.kl_coef=0.05",
            "algorithm.kl_ctrl.horizon=100",
            "exp_manager.experience_replay.enable=true",
            *overrides,
        ],
    )


def train(config: Config, signal_after: int = 0, number: str = "SIGTERM") -> int:
    """Exit code of launch.local with the scripted trainer; its ranks are forks."""
    with mock.patch.object(child_process.subprocess, "Popen", ForkedPopen):
        return train_from_the_start(config, signal_after, number)


def train_from_the_start(config: Config, signal_after: int = 0, number: str = "SIGTERM") -> int:
    """Exit code of launch.local with the scripted trainer;
    its ranks import everything for themselves."""
    command = [sys.executable, "-m", "tests.e2e.scripted_trainer", str(signal_after), number]
    run = RunFolder.of(config.trainer)
    return run_local(config, [*command, "--config", str(run.logs / "config.yaml")])


@contextmanager
def without_weights(model: Path) -> Iterator[None]:
    """The folder's weights cannot be read in here."""
    weights, hidden = model / "model.safetensors", model / "hidden"
    weights.rename(hidden)
    try:
        yield
    finally:
        hidden.rename(weights)


def metrics_of(run: Path) -> list[dict]:
    """By step, without seconds, and quotients of them."""
    lines = [json.loads(line) for line in RunFolder(run).metrics.read_text().splitlines()]
    return [
        {name: x for name, x in line.items() if name != "time" and not name.startswith(("time/", "perf/"))}
        for line in lines
    ]


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of models and optimizers, read by torch only;
    the critic's too, if there is one."""
    tensors = {}
    for part in (path for path in (checkpoint / "megatron", checkpoint / "critic") if path.is_dir()):
        reader = FileSystemReader(part)
        stored = reader.read_metadata().state_dict_metadata.items()
        whole = {
            n: torch.empty(t.size, dtype=t.properties.dtype) for n, t in stored if isinstance(t, TensorStorageMetadata)
        }
        load(whole, storage_reader=reader, no_dist=True)
        tensors |= whole if part.name == "megatron" else {f"critic.{name}": tensor for name, tensor in whole.items()}
    return tensors


# with two tensor-parallel ranks PPO: a critic that starts before the policy,
# with a schedule of its own
LAYOUTS = {
    "tp2": (
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "exp_manager.experience_replay.enable=false",
        "algorithm.adv_estimator=gae",
        "algorithm.lam=0.95",
        "critic.optim.lr=1e-3",
        "critic.optim.lr_decay_style=linear",
        "trainer.critic_warmup=2",
    ),
    "dp2": (),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def whole(request, inputs, tmp_path_factory) -> tuple[Path, tuple[str, ...]]:
    """Six steps without a break; the layout's overrides. Ranks of the first layout import
    everything for themselves: the base for the forks."""
    run, layout = tmp_path_factory.mktemp("whole") / "run", LAYOUTS[request.param]
    config = config_of(inputs, run, f"trainer.save_interval={NUM_STEPS}", "trainer.save_hf=true", *layout)
    start = train_from_the_start if request.param == "tp2" else train
    assert start(config) == 0
    return run, layout


def test_three_steps_a_signal_and_three_more_are_the_run_of_six_bit_for_bit(whole, inputs, tmp_path, capfd):
    run, layout = tmp_path / "run", whole[1]
    config = config_of(inputs, run, f"trainer.save_interval={NUM_STEPS}", *layout)
    assert train(config, signal_after=STOPPED_AFTER) == 85
    saved = RunFolder(run).checkpoint(STOPPED_AFTER)
    assert newest_first(RunFolder(run).checkpoints) == [saved] and verify(saved).is_whole
    assert f"Stopped after step {STOPPED_AFTER} by SIGTERM; saved in {saved}" in capfd.readouterr().out

    with without_weights(inputs / "model"):  # which are not read only to be overwritten
        assert train(config.model_copy()) == 0
    printed = capfd.readouterr().out
    assert (
        f"Resumed after step {STOPPED_AFTER} from {saved}" in printed and "not restored: nothing is missing" in printed
    )
    has_critic = "algorithm.adv_estimator=gae" in layout
    assert ("critic's model, critic's optimizer, critic's lr_schedule" in printed) == has_critic
    assert metrics_of(run) == metrics_of(whole[0])
    assert [line["step"] for line in metrics_of(run)] == list(range(1, NUM_STEPS + 1))
    assert metrics_of(run)[STOPPED_AFTER - 1]["rollout/num_surplus"] > 0
    assert len({line["actor/reward_kl_penalty_coeff"] for line in metrics_of(run)}) == NUM_STEPS
    replayed = [line.get("replay/num_replayed_groups", 0) for line in metrics_of(run)]
    assert has_critic or (replayed[0] == 0 and all(replayed[STOPPED_AFTER:]))

    actual, expected = (RunFolder(path).checkpoint(NUM_STEPS) for path in (run, whole[0]))
    tensors = tensors_of(expected)
    assert sum(name.startswith("optimizer.state.exp_avg_sq.") for name in tensors) > 10
    assert ("critic.optimizer.state.exp_avg.value_head.weight" in tensors) == has_critic
    equal = {name: torch.equal(tensor, tensors[name]) for name, tensor in tensors_of(actual).items()}
    assert equal == dict.fromkeys(tensors, True)
    assert (actual / CONTROLLER_STATE).read_bytes() == (expected / CONTROLLER_STATE).read_bytes()
    paths = {"config": {}, "config_hash": ""}  # they hold the run folders
    assert read_trainer_state(actual) | paths == read_trainer_state(expected) | paths
    exported = [
        folder / "model.safetensors" for folder in (RunFolder(run).model, RunFolder(whole[0]).model, expected / "hf")
    ]
    assert len({file.read_bytes() for file in exported}) == 1


@pytest.mark.parametrize("whole", ["dp2"], indirect=True)
@pytest.mark.parametrize(
    ("how", "save_interval", "code"),
    [
        ("asked", NUM_STEPS, 85),  # the step before has to be saved
        ("asked", STOPPED_AFTER, 85),  # it is saved, but no later samples
        ("asked_and_lost", NUM_STEPS, 85),
        ("exhausted", NUM_STEPS, 2),
    ],
)
def test_a_run_that_ends_in_the_middle_of_a_step_goes_on_with_its_open_gen_batch(
    whole, inputs, tmp_path, capfd, how, save_interval, code
):
    run, layout = tmp_path / "run", whole[1]
    config = config_of(inputs, run, f"trainer.save_interval={save_interval}", *layout)
    assert train(config, STOPPED_AFTER, how) == code
    saved, printed = RunFolder(run).checkpoint(STOPPED_AFTER), capfd.readouterr()
    assert newest_first(RunFolder(run).checkpoints) == [saved] and verify(saved).is_whole
    assert (f"Stopped after step {STOPPED_AFTER} by SIGTERM; saved in {saved}" in printed.out) == (code == 85)
    assert printed.err.count("the data are exhausted") == (how == "exhausted")
    assert len(read_controller_state(saved)["queue"]["finished"]) == NUM_FINISHED

    assert train(config.model_copy()) == 0
    assert f"Resumed after step {STOPPED_AFTER} from {saved}" in capfd.readouterr().out
    assert metrics_of(run) == metrics_of(whole[0])
    actual, expected = (RunFolder(path).checkpoint(NUM_STEPS) for path in (run, whole[0]))
    assert (actual / CONTROLLER_STATE).read_bytes() == (expected / CONTROLLER_STATE).read_bytes()


@pytest.mark.parametrize("whole", LAYOUTS, indirect=True)
def test_a_run_goes_on_in_another_layout(whole, inputs, tmp_path, capfd):
    """From two data-parallel ranks, or two tensor-parallel ones with a critic, to two pipeline
    stages, after a blocking save."""
    run, layout = tmp_path / "run", whole[1]
    assert train(config_of(inputs, run, "trainer.async_save=false", *layout), STOPPED_AFTER, "SIGUSR1") == 85
    staged = "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2"
    assert train(config_of(inputs, run, staged, *(key for key in layout if "tensor_model_parallel" not in key))) == 0
    printed = capfd.readouterr().out
    assert "not restored: rng" in printed and f"changed {staged.partition('=')[0]} 1 -> 2" in printed
    has_critic = "algorithm.adv_estimator=gae" in layout
    assert ("critic's model, critic's optimizer, critic's lr_schedule" in printed) == has_critic
    same, close = ["actor/lr", "rollout/num_drawn"], ["actor/loss", "actor/grad_norm"] + ["critic/vf_loss"] * has_critic
    for of_resumed, of_whole in zip(metrics_of(run), metrics_of(whole[0]), strict=True):
        assert of_resumed.keys() == of_whole.keys()  # none of the actor's while the critic warms up
        assert [of_resumed.get(name) for name in same] == [of_whole.get(name) for name in same]
        assert of_resumed["actor/reward_kl_penalty_coeff"] == pytest.approx(of_whole["actor/reward_kl_penalty_coeff"])
        expected = {name: of_whole[name] for name in close if name in of_whole}
        # tight as long as training has not made the rounding larger: see tests/e2e/test_ppo.py
        growth = 1 if of_resumed["step"] <= STOPPED_AFTER + 1 else 10
        assert {name: of_resumed[name] for name in expected} == pytest.approx(
            expected, rel=1e-4 * growth, abs=1e-6 * growth
        )
    assert expected.keys() == set(close)


@pytest.mark.parametrize("whole", ["dp2"], indirect=True)
def test_a_changed_learning_rate_is_refused_before_anything_starts(whole, inputs, capfd):
    run, layout = whole
    lr = "actor_rollout_ref.actor.optim.lr"
    assert train(config_of(inputs, run, f"{lr}=2e-3", *layout)) == 2
    assert f"{lr} is 0.002, but was 0.001 in the run that wrote step_000006" in capfd.readouterr().err


@pytest.mark.parametrize("whole", ["dp2"], indirect=True)
def test_a_model_without_its_optimizer_is_taken_only_if_accepted(whole, inputs, tmp_path, capfd):
    """In half precision the optimizer has weights of its own: a step at hardly any learning rate
    leaves the trained model."""
    run, layout = tmp_path / "run", whole[1]
    shutil.copytree(whole[0], run)
    write_manifest(RunFolder(run).checkpoint(NUM_STEPS), ["model", "counters", "controller"])
    file = "model.safetensors"
    trained, begun = load_file(RunFolder(run).model / file), load_file(inputs / "model" / file)
    changes = {
        "actor_rollout_ref.actor.optim.lr": 1e-9,
        "actor_rollout_ref.actor.megatron.dtype": "bfloat16",
        "trainer.total_training_steps": NUM_STEPS + 1,
    }
    more = [f"{key}={value}" for key, value in changes.items()]
    more += [f"trainer.accept_changes=[{','.join(changes)}]", *layout]
    assert train(config_of(inputs, run, *more)) == 2
    assert "has no optimizer, lr_schedule, rng" in capfd.readouterr().err
    assert train(config_of(inputs, run, *more, "trainer.accept_missing=[optimizer]")) == 0
    printed = capfd.readouterr().out
    assert f"Resumed after step {NUM_STEPS}" in printed and "not restored: optimizer and generators" in printed
    # the decay's end
    assert metrics_of(run)[NUM_STEPS]["actor/lr"] == metrics_of(whole[0])[-1]["actor/lr"] == 0.0
    exported = load_file(RunFolder(run).model / file)
    assert all(is_rounded(tensor, trained[name]) for name, tensor in exported.items())
    assert not all(is_rounded(tensor, begun[name]) for name, tensor in exported.items())


def is_rounded(half: torch.Tensor, full: torch.Tensor) -> bool:
    """To bfloat16, and within a rounding of that."""
    return half.dtype == torch.bfloat16 and torch.allclose(half.float(), full.float(), rtol=2**-7, atol=1e-7)


@proof
@pytest.mark.parametrize("whole", ["dp2"], indirect=True)
def test_a_converted_model_is_trained_as_that_of_hugging_face_bit_for_bit(whole, inputs, tmp_path):
    """Converted by two tensor-parallel processes, trained by two data-parallel ranks;
    so is the reference."""
    run, made, layout = RunFolder(tmp_path / "run"), tmp_path / "made", whole[1]
    options = ("--hf-model", str(inputs / "model"), "--output", str(made), "--tp", "2")
    run_torchrun(REPOSITORY / "checkpoints_tools" / "hf_to_megatron.py", 2, *options)
    save = f"trainer.save_interval={NUM_STEPS}"
    assert train(config_of(inputs, run.path, f"actor_rollout_ref.model.path={made}", save, *layout)) == 0
    assert metrics_of(run.path) == metrics_of(whole[0])
    undisturbed = RunFolder(whole[0])
    assert files_of(run.model) == files_of(undisturbed.model)
    kept, same = files_of(run.checkpoint(NUM_STEPS) / "hf"), files_of(undisturbed.checkpoint(NUM_STEPS) / "hf")
    assert kept == {name: content for name, content in same.items() if not name.endswith(".safetensors")}


@pytest.mark.parametrize("whole", ["dp2"], indirect=True)
def test_a_run_may_start_from_the_model_of_a_training_checkpoint(whole, inputs, tmp_path):
    """Cut in another way, with the run's own export as its reference:
    before the first step no log-prob differs."""
    run, earlier = tmp_path / "run", RunFolder(whole[0])
    options = [
        f"actor_rollout_ref.model.path={earlier.checkpoint(NUM_STEPS)}",
        f"actor_rollout_ref.ref.path={earlier.model}",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
        "trainer.total_training_steps=1",
    ]
    assert train(config_of(inputs, run, *options)) == 0
    (line,) = metrics_of(run)
    assert line["actor/reward_kl_penalty"] == 0.0 != metrics_of(earlier.path)[-1]["actor/reward_kl_penalty"]


def files_of(folder: Path) -> dict[str, bytes]:
    """Without the model card: it names the model that the run began with."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "README.md"}
