"""Experience replay from end to end: a real server, two trainer ranks,
every dumped batch inspected."""

import json
from dataclasses import replace

import pytest

from examples.arithmetic import problems
from examples.arithmetic.problems import BASE
from examples.demo_run import config_path
from launch.local import main
from megatron_dapo.rollout.batch_files import read_batch
from megatron_dapo.storage.run_folder import RunFolder
from tests.forked_local import run_here

pytestmark = pytest.mark.e2e

NUM_STEPS, NUM_GROUPS, N = 4, 8, 4


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    folder = tmp_path_factory.mktemp("replay")
    run_here(
        main,
        *("--config", str(config_path("experience_replay.yaml"))),
        f"data.train_files=[{problems.write_files(folder)[0]}]",
        f"actor_rollout_ref.model.path={BASE}",
        f"data.train_batch_size={NUM_GROUPS}",
        f"actor_rollout_ref.rollout.n={N}",
        "data.max_response_length=40",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.off_policy_shaping_mode=exgrpo_policy_shaping",
        "actor_rollout_ref.actor.off_policy_clip_ratio_high=null",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "exp_manager.experience_replay.replay_start_ratio=0.0",
        "trainer.n_procs_per_node=2",
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.dump_batches=true",
        f"trainer.run_dir={folder}/run",
    )
    return RunFolder(folder / "run")


@pytest.fixture(scope="module")
def batches(run):
    return [read_batch(run.batches, step).groups for step in range(1, NUM_STEPS + 1)]


@pytest.fixture(scope="module")
def metrics(run) -> list[dict]:
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [line for line in lines if "actor/loss" in line]


def replayed(group):
    return [sample for sample in group.samples if sample.exp_mask]


def test_half_of_the_groups_borrow_a_trajectory_as_it_was_written(batches):
    assert not any(replayed(group) for group in batches[0])
    for number, groups in enumerate(batches[1:], 1):
        assert [len(replayed(group)) for group in groups] == [0, 1] * (NUM_GROUPS // 2)
        written = [sample for earlier in batches[:number] for group in earlier for sample in group.samples]
        for group in groups:
            assert len(group.samples) == N and {sample.uid for sample in group.samples} == {group.uid}
            for sample in replayed(group):
                origins = [each for each in written if replace(each, uid=sample.uid, exp_mask=True, number=0) == sample]
                assert origins and sample.correct and max(sample.weight_versions) < number
                assert all(log_prob <= 0.0 for log_prob in sample.rollout_log_probs)
            fresh = [sample for sample in group.samples if not sample.exp_mask]
            assert {version for sample in fresh for version in sample.weight_versions} == {number}


def test_solved_prompts_are_not_replayed(batches):
    solved: set[int] = set()
    for groups in batches:
        assert not solved & {group.prompt.index for group in groups if replayed(group)}
        solved |= {group.prompt.index for group in groups if all(sample.correct for sample in group.samples)}


def test_the_metrics_are_those_of_the_batches(batches, metrics):
    for groups, line in zip(batches, metrics, strict=True):
        counts = [(sample.num_written_tokens, sample.exp_mask) for group in groups for sample in group.samples]
        share = sum(tokens for tokens, old in counts if old) / sum(tokens for tokens, _ in counts)
        assert line["exp_mask_ratio"] == pytest.approx(share)
        assert line["replay/num_replayed_groups"] == sum(bool(replayed(group)) for group in groups)
        fresh = [sample for group in groups for sample in group.samples if not sample.exp_mask]
        assert line["reward/accuracy"] == pytest.approx(sum(sample.correct for sample in fresh) / len(fresh))
        assert line["rollout/staleness_max"] == 0
    # successes, no worse than their groups
    assert all(line["actor/off_pg_loss"] <= 0.0 for line in metrics)


def test_server_and_trainer_are_compared_on_new_tokens_alone(metrics):
    """Bound as in test_program.py; older policies' log-probs would differ by far more."""
    assert all(line["actor/rollout_abs_diff_max"] < 5e-4 for line in metrics)
