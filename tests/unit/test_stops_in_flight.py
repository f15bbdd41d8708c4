"""Runs stopped or killed while servers write: unfinished answers go on, nothing is lost or doubled.

The controller runs in this process. A killed run is not asked for its state any more: it resumes
from its last checkpoint. The trainer is a loop that asks for batches and pushes.
"""

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from megatron_dapo.checkpointing.state_file import from_bytes, to_bytes
from megatron_dapo.common.rollout_errors import Interrupted, NeedsSync
from megatron_dapo.data.samples import Group
from megatron_dapo.rewards.reward_result import RewardResult
from megatron_dapo.rollout.controller import Controller
from megatron_dapo.servers.growing_answer import GrowingAnswer
from tests.fake_rollout import PROMPT_LENGTH, WritingServer, make_config, mislabelled, rollout_folder
from tests.proofs import amount

pytestmark = pytest.mark.unit

N, SIZE, LIMIT, MAX_STALENESS = 3, 4, 40, 2
OVERRIDES = (
    f"actor_rollout_ref.rollout.n={N}",
    f"data.max_response_length={LIMIT}",
    "data.gen_batch_size=6",
    "actor_rollout_ref.rollout.max_concurrency=8",
    "algorithm.dynamic_sampling.max_num_gen_batches=50",
    "algorithm.rollout_correction.rollout_is=token",
    "trainer.total_training_steps=1000",
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_dapo.rollout.build_rollout.RewardPool", Rewards)
    yield from rollout_folder(tmp_path, monkeypatch)


class Rewards:
    """A point for a response that begins with "right", in this process."""

    last_traceback = None

    def __init__(self, *_):
        pass

    async def start(self):
        pass

    scores_groups = False

    async def score(self, data_source, response, *_):
        return RewardResult(float(response.startswith("right")), response.startswith("right"))

    async def close(self):
        pass


@dataclass
class Run:
    """The survivors of a run's processes: the checkpoint,
    and the batches of the steps before it."""

    servers: list[WritingServer]
    config: object
    step: int = 0
    state: bytes | None = None
    trained: list[tuple[Group, ...]] = field(default_factory=list)

    async def live(self, seconds: float, kind: str) -> None:
        """Resume, train, and end after so many seconds: stopped, or killed."""
        controller = Controller(self.config)
        try:
            await controller.start()
            if self.state is not None:
                controller.load_state_dict(from_bytes(self.state))
            await self.push(self.step)
            training = asyncio.create_task(self.train(controller))
            await asyncio.wait({training}, timeout=seconds)
            if kind == "stopped":
                controller.stop_asked.set()
                await asyncio.wait_for(training, 20.0)
                await controller.halt()
                self.save(controller)
                await self.wait_until_nothing_is_open()
            else:
                training.cancel()
                await asyncio.wait({training})
        finally:
            await controller.close()

    async def wait_until_nothing_is_open(self) -> None:
        """A request that was on its way when the others were aborted ends with its connection."""
        async with asyncio.timeout(60.0):
            while any(server.num_open for server in self.servers):
                await asyncio.sleep(0.005)

    async def train(self, controller: Controller) -> None:
        while not controller.stop_asked.is_set():
            try:
                batch = await controller.next_batch(self.step + 1, self.step)
            except Interrupted:
                return
            except NeedsSync:
                await self.push(self.step)
                continue
            await asyncio.sleep(0.03)  # it trains
            await self.push(self.step + 1)
            self.step += 1
            self.trained.append(batch.groups)
            self.save(controller)

    async def push(self, version: int) -> None:
        await asyncio.gather(*(server.push(version) for server in self.servers))

    def save(self, controller: Controller) -> None:
        self.state = to_bytes(controller.state_dict())
        account = controller._drawing.queue.account
        assert account.is_closed and account.num_handed == sum(map(len, self.trained)), account
        self.account = account


async def slow_in_turns(servers):
    """One server after the other is slow for a while."""
    while True:
        for slow in servers:
            for server in servers:
                server.slowness = 12.0 if server is slow else 1.0
            await asyncio.sleep(0.7)


def run_lives(folder, lives, max_staleness=MAX_STALENESS, num_steps=0, is_uneven=False):
    """The Run after these (seconds, kind), and after this many steps,
    on two servers that write slowly. is_uneven: one is much slower."""

    async def scenario():
        chance = random.Random(1)
        servers = [
            WritingServer(
                lambda: min(1 + int(chance.lognormvariate(2.5, 0.8)), LIMIT + 5),
                token_s=0.004,
                version=0,
                word=lambda: chance.choice(["right", "wrong"]),
            )
            for _ in range(2)
        ]
        config = make_config(folder, servers, *OVERRIDES, f"actor_rollout_ref.rollout.max_staleness={max_staleness}")
        slowing = asyncio.create_task(slow_in_turns(servers) if is_uneven else asyncio.sleep(0))
        try:
            for server in servers:
                await server.start()
            run = Run(servers, config)
            for seconds, kind in lives:
                await run.live(seconds, kind)
            while len(run.trained) < num_steps:  # a busy machine takes more lives
                await run.live(1.0, "stopped")
            return run
        finally:
            slowing.cancel()
            for server in servers:
                await server.stop()

    return asyncio.run(asyncio.wait_for(scenario(), 180))


def check_trained(run, max_staleness=MAX_STALENESS):
    seen = set()
    for step, groups in enumerate(run.trained, 1):
        assert len(groups) == SIZE
        for group in groups:
            assert group.uid not in seen, f"{group.uid} is trained twice"
            seen.add(group.uid)
            assert len(group.samples) == N
            for sample in group.samples:
                assert not mislabelled(sample), f"{group.uid}: {mislabelled(sample)}"
                assert step - 1 - max_staleness <= min(sample.weight_versions)
                assert max(sample.weight_versions) <= step - 1
                assert (
                    sample.num_response_tokens <= LIMIT and (sample.num_response_tokens == LIMIT) >= sample.is_truncated
                )
    drawn = [int(uid.partition("-")[0]) for groups in run.trained for uid in (group.uid for group in groups)]
    assert drawn == sorted(drawn), "batches are in the order of the draws"


def num_continued(run):
    """Requests that go on with tokens of an answer. None exceeds the context."""
    lengths = [
        (len(sent["input_ids"]), sent["sampling_params"]["max_new_tokens"])
        for server in run.servers
        for sent in server.requests
    ]
    assert all(read + write == PROMPT_LENGTH + LIMIT and write > 0 for read, write in lengths)
    return sum(read > PROMPT_LENGTH for read, _ in lengths)


def test_stops_and_kills_at_random_moments_lose_no_group_and_double_none(folder):
    chance = random.Random(7)
    lives = [(chance.uniform(0.05, 0.9), "stopped" if number % 2 else "killed") for number in range(amount(8, 20))]
    run = run_lives(folder, [*lives, (2.0, "stopped")], num_steps=len(lives))
    check_trained(run)
    assert num_continued(run) > len(lives)
    continued = [
        sample
        for groups in run.trained
        for group in groups
        for sample in group.samples
        if len(sample.servers) == 2 or len(set(sample.weight_versions)) > 1
    ]
    assert len(continued) > len(lives)


def test_a_synchronous_step_that_is_stopped_goes_on_with_its_partial_answers(folder):
    run = run_lives(folder, [(0.12, "stopped"), (0.12, "stopped"), (1.0, "stopped")], max_staleness=0, num_steps=1)
    check_trained(run, max_staleness=0)
    assert run.trained and num_continued(run) > 5


def test_stops_and_kills_while_answers_move_lose_no_group_and_double_none(folder, monkeypatch):
    """Looks every 0.1 s at servers slow in turns."""
    monkeypatch.setattr("megatron_dapo.rollout.build_rollout.LOOK_S", 0.1)
    monkeypatch.setattr("megatron_dapo.servers.speedometer._MIN_STEPS", 1)  # of so short looks
    moved, move = [], GrowingAnswer.move

    def note(answer, part, url):
        moved.append(len(part.tokens))
        move(answer, part, url)

    monkeypatch.setattr(GrowingAnswer, "move", note)
    chance = random.Random(11)
    lives = [(chance.uniform(0.4, 1.2), "stopped" if number % 2 else "killed") for number in range(amount(4, 20))]
    run = run_lives(folder, [*lives, (2.0, "stopped")], num_steps=len(lives), is_uneven=True)
    check_trained(run)
    assert len(moved) >= len(lives) and sum(length > 1 for length in moved) > len(lives) / 2
    assert num_continued(run) > 0
