"""A run of agents, ahead of their servers' tokens: it is stopped, its trainer, its controller and a
gateway are killed, and it goes on."""

import signal
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from megatron_dapo.common.exit_codes import SAVED_EXIT_CODE
from megatron_dapo.data.samples import Branch
from megatron_dapo.rollout.batch_files import read_batch
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry.closing_table import read_metrics
from tests.distributed.lives import SAMPLING, Life, Lives, Moment, stand_ins
from tests.distributed.test_kills_in_flight import PROMPT_LENGTH, N, make_config, number_of
from tests.elastic import check_accounts

pytestmark = pytest.mark.distributed

AGENT = "actor_rollout_ref.rollout.agent"
KEYS = ("enable=true", "function=tests.counting_agent:play", "num_workers=1", "max_open=16", "timeout_s=60.0")
MARK = "AGENT_LIVES_OF"  # in the environment of all processes of the run


def command(process: psutil.Process) -> str:
    with suppress(psutil.Error):  # it has ended
        return " ".join(process.cmdline())
    return ""


@dataclass(frozen=True)
class OfChild(Moment):
    """The signal goes to the gateway, or to its parent, the controller."""

    is_controller: bool = False

    def act(self, trainer: int) -> None:
        for child in psutil.Process(trainer).children(recursive=True):
            if "agents.gateway_process" in command(child):
                (child.parent() if self.is_controller else child).send_signal(self.signal)


@dataclass(frozen=True)
class History:
    config: object
    lives: list[Life]
    groups: list  # of all steps, in their order
    left: list[str]  # commands of processes that outlived their life
    records: list[dict]  # metrics of the steps


def processes(mark: str) -> list[str]:
    commands = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                commands.append(command(process))
    return [*filter(None, commands)]


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    folder: Path = tmp_path_factory.mktemp("lives")
    moments = [
        Moment(SAMPLING, 500, signal.SIGTERM),
        OfChild(SAMPLING, 400, signal.SIGKILL, is_controller=True),
        Moment(SAMPLING, 600, signal.SIGKILL),
    ]
    lives, left = [], []
    with stand_ins(2) as (urls, events), pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, str(folder))
        config = make_config(folder, urls, *(f"{AGENT}.{key}" for key in KEYS))
        run = Lives(config, events)
        for moment in moments:
            lives.append(run.live(moment))
            left += processes(str(folder))
        num_steps = (lives[-1].after.step if lives[-1].after else 0) + 3
        last = OfChild(SAMPLING, 100, signal.SIGKILL)
        lives.append(run.live(last, f"trainer.total_training_steps={num_steps}"))
        left += processes(str(folder))
        assert lives[-1].code == 0, run.tails()
        of_run = RunFolder.of(config.trainer)
        batches = [read_batch(of_run.batches, step).groups for step in range(1, num_steps + 1)]
        return History(config, lives, [*sum(map(list, batches), [])], left, read_metrics(of_run.metrics))


def test_each_life_ends_as_it_is_told_and_goes_on_from_the_newest_checkpoint(history):
    stopped, lost_controller, killed, last = history.lives
    assert stopped.code == SAVED_EXIT_CODE and lost_controller.code not in (0, SAVED_EXIT_CODE)
    assert killed.code == -signal.SIGKILL and last.code == 0
    for life in history.lives:
        assert life.resumed_after == (life.before.step if life.before else None)


def test_no_process_outlives_its_life(history):
    assert history.left == []


def test_each_draw_is_trained_once_or_filtered_and_none_is_too_old(history):
    num_steps = history.lives[-1].after.step
    check_accounts(history.config, num_steps)
    numbers = [number_of(group.uid) for group in history.groups]
    assert numbers == sorted(set(numbers)) and len(history.groups) >= 12
    of_last = history.records[history.lives[-1].before.step :]
    assert sum(record["agent/num_restarts"] for record in of_last) > 0, "the gateway's end cost nothing"


def written(branch: Branch) -> list[tuple[int, ...]]:
    """All tokens up to each turn's first one."""
    tokens = [*branch.prompt_tokens.tolist(), *branch.response_tokens.tolist()]
    own = [0] * len(branch.prompt_tokens) + (branch.rollout_log_probs != 0).tolist()
    return [tuple(tokens[:place]) for place in range(1, len(own)) if own[place] and not own[place - 1]]


def test_each_turn_of_a_row_is_a_request_with_the_very_tokens_before_it(history):
    asked = Counter(tuple(request["input_ids"]) for life in history.lives for request in life.requests)
    num_turns = 0
    for group in history.groups:
        assert len(group.samples) == N
        for sample in group.samples:
            assert sample.reward_error is None and len(sample.branches) == 1 + sample.number % 2
            assert sample.num_turns == 2 + sample.number % 2
            turns = [turn for branch in sample.branches for turn in written(branch)]
            assert len(turns) == sample.num_turns and all(turn in asked for turn in turns)
            assert len({turn[: PROMPT_LENGTH - 1] for turn in turns}) == 1
            num_turns += len(turns)
    assert num_turns > 100
