"""Servers dying during a run: kills cost time, and no sample, in step with the trainer and ahead of
it."""

from pathlib import Path

import pytest

from megatron_dapo.checkpointing.folders import newest_first, read_controller_state, read_trainer_state
from megatron_dapo.checkpointing.manifest import verify
from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.config.schema.config import Config
from megatron_dapo.rollout.batch_files import read_batch
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry.closing_table import Summary, closing_table, read_metrics
from tests.elastic import Kills, StandIns, check_accounts, fingerprints, train
from tests.forked_local import forks
from tests.proofs import amount, few
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.e2e

NUM_STEPS = {0: amount(8, 15), 2: amount(15, 30)}  # max_staleness -> steps; with 2 every push is in flight
NUM_KILLS, NUM_SERVERS = amount(8, 20), 3
FIRST = 2  # steps before the kills, and after them, in which all servers are there, to compare with


def make_config(folder: Path, max_staleness: int, num_steps: int, *overrides: str) -> Config:
    make_tiny(folder / "model", "qwen2")
    rows = "".join(
        f'{{"prompt": "{a}+{b}=", "label": "0", "data_source": "any"}}\n' for a in range(10) for b in range(10)
    )
    (folder / "prompts.jsonl").write_text(rows)
    rollout = "actor_rollout_ref.rollout"
    return load_and_validate(
        None,
        [
            f"actor_rollout_ref.model.path={folder}/model",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            f"data.train_files=[{folder}/prompts.jsonl]",
            "data.apply_chat_template=false",
            "data.train_batch_size=8",
            "data.gen_batch_size=6",
            "data.max_prompt_length=8",
            "data.max_response_length=16",
            f"{rollout}.n=4",
            # also how long the trainer waits when all are lost
            f"{rollout}.server.startup_timeout_s=15.0",
            f"{rollout}.step_timeout_s=200.0",
            f"{rollout}.request_timeout_s=60.0",
            f"{rollout}.max_retries=8",
            f"{rollout}.max_staleness={max_staleness}",
            # a stand-in's log-probs are no model's
            "algorithm.rollout_correction.max_mismatch=null",
            f"algorithm.rollout_correction.rollout_is={'token' if max_staleness else 'none'}",
            "algorithm.dynamic_sampling.enable=true",
            "algorithm.dynamic_sampling.max_num_gen_batches=20",
            "reward.function=tests.scripted_reward:even_length",
            "reward.num_workers=1",
            "weight_sync.timeout_s=60.0",
            "weight_sync.verify=true",
            "weight_sync.verify_num_tensors=10000",
            f"trainer.total_training_steps={num_steps}",
            "trainer.save_interval=-1",
            "trainer.dump_batches=true",
            "trainer.logger=[jsonl]",
            f"trainer.run_dir={folder}/run",
            *overrides,
        ],
    )


@pytest.fixture(scope="module", params=few((2, 0), 1))
def config(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Config:
    """Two pipeline stages, so two groups with every server, and all weights compared with the
    servers' after each push. More prompts than a gen batch in most steps."""
    folder = tmp_path_factory.mktemp("elastic")
    two_stages = ("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2", "trainer.n_procs_per_node=2")
    return make_config(folder, request.param, NUM_STEPS[request.param] + 5, *two_stages)


@pytest.fixture(scope="module")
def num_steps(config: Config) -> int:
    return NUM_STEPS[config.actor_rollout_ref.rollout.max_staleness]


@pytest.fixture(scope="module")
def run(config: Config, num_steps: int) -> RunFolder:
    """Kills; after the last step under test all servers are lost for good."""
    servers, kills = StandIns(NUM_SERVERS), Kills(NUM_KILLS, FIRST, num_steps - FIRST, longest_wait_s=2.0)

    def look(num_done: int) -> bool:
        kills.look(num_done, servers.pids())
        return num_done >= num_steps

    with forks():
        code = train(config, servers, look)
    run = RunFolder.of(config.trainer)
    assert code == 1, tail(run)
    assert len(kills.done) == NUM_KILLS
    for url in servers.urls:
        assert url in run.log("trainer-rank-0").read_text().splitlines()[-1], "the end names the servers"
    return run


def tail(run: RunFolder) -> str:
    return "\n".join(f"--- {log}\n{log.read_text()[-3000:]}" for log in sorted(run.logs.glob("*.log")))


def records(run: RunFolder, num_steps: int) -> list[dict]:
    return read_metrics(run.metrics)[:num_steps]


def test_every_uid_is_trained_exactly_n_times_and_every_token_is_of_the_expected_version(config, run, num_steps):
    accounts = check_accounts(config, num_steps)
    print(accounts)
    assert accounts.num_trained == num_steps * config.data.train_batch_size and accounts.num_filtered > 0


def test_every_token_was_written_by_the_weights_of_its_version(config, run, num_steps):
    """A server with a version holds exactly its weights, however often it was started again."""
    by_version = fingerprints(config, num_steps)
    # a version that wrote no token is soon followed by the next
    if config.actor_rollout_ref.rollout.max_staleness:
        assert set(by_version) <= set(range(num_steps)) and len(by_version) > num_steps // 2
    else:
        assert sorted(by_version) == list(range(num_steps))
    assert all(len(values) == 1 for values in by_version.values()), "two servers of one version had other weights"
    assert len(set.union(*by_version.values())) == len(by_version), "the weights changed with every version"


def test_the_metrics_tell_of_the_losses_and_the_report_of_what_they_cost(run, num_steps):
    steps = records(run, num_steps)
    assert all(step["rollout/num_servers"] == NUM_SERVERS for step in steps)
    assert all(0 <= step["weight_sync/num_servers"] <= NUM_SERVERS for step in steps)
    assert sum(step["rollout/num_retries"] for step in steps) > 0
    num_rejoins = sum(step["weight_sync/num_rejoins"] for step in steps)
    assert NUM_KILLS / 4 <= num_rejoins <= NUM_KILLS  # several kills of one server between two pushes are one
    assert steps[0]["rollout/num_servers_current"] > NUM_SERVERS - 0.1
    assert min(step["rollout/num_servers_current"] for step in steps) < NUM_SERVERS - 0.1
    table = closing_table(Summary.of(steps))
    print(table)
    assert f"servers that joined again {num_rejoins:.0f}" in " ".join(table.split()) and "some away" in table


def test_when_all_are_lost_the_last_step_is_saved_with_the_groups_that_were_finished(run, num_steps):
    newest, *_ = newest_first(run.checkpoints)
    last = max(record["step"] for record in read_metrics(run.metrics))
    assert verify(newest).is_whole and read_trainer_state(newest)["step"] == last >= num_steps
    assert read_trainer_state(newest)["num_optimizer_steps"] == 2 * last
    num_open = len(read_controller_state(newest)["queue"]["open"])
    assert num_open == 6 if num_steps == NUM_STEPS[0] else num_open >= 6, "what was open goes on after a resume"


def test_ahead_of_the_trainer_responses_go_on_while_weights_are_pushed(config, run, num_steps):
    spans = [
        len(set(sample.weight_versions))
        for step in range(1, num_steps + 1)
        for group in read_batch(run.batches, step).groups
        for sample in group.samples
    ]
    num_interrupted = sum(number > 1 for number in spans)
    print(f"{num_interrupted} of {len(spans)} responses have tokens of several versions")
    assert num_interrupted == 0 if not config.actor_rollout_ref.rollout.max_staleness else num_interrupted > num_steps
