"""The trainer as launch starts it, with a rollout computed from its draws, and a signal to itself.

python -m tests.e2e.scripted_trainer STEP NAME TRAIN_ARGUMENTS...

STEP: after its metrics rank 0 gets the signal NAME.

NAME may also be an end in mid-step after that, with three groups of its gen batch finished.
`asked`: a SIGTERM; `asked_and_lost`: a SIGTERM and then a failure of the servers; `exhausted`: a
mistake of the user.
"""

import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import megatron_dapo.job
from megatron_dapo.__main__ import main
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.rollout_errors import Interrupted, RolloutError
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.prompt_cursor import PromptCursor
from megatron_dapo.data.samples import Group, Prompt, RolloutBatch
from megatron_dapo.queue.experience_replay import make_pool, replay_metrics
from megatron_dapo.queue.group_filter import by_correctness
from megatron_dapo.queue.group_queue import GroupQueue, QueueLimits
from megatron_dapo.queue.prompt_draws import PromptDraws
from megatron_dapo.telemetry.telemetry import Telemetry
from tests.synthetic import synthetic_groups

NUM_FINISHED = 3  # groups, at an end in the middle of a step
VOCABULARY = 64
NUM_PROMPTS, NUM_GROUPS, GEN_BATCH, GROUP_SIZE = 25, 4, 9, 4


class ScriptedRollout:
    """The bookkeeping of the real one (epochs, dynamic sampling, surplus, experience replay)
    without servers. The same draws, in the same order, give the same groups; groups from an earlier
    step keep their weight version."""

    def __init__(self, config: Config) -> None:
        self._pool = make_pool(config)
        self._draws = PromptDraws(PromptCursor(NUM_PROMPTS, seed=1), self._pool, GEN_BATCH)
        # so that groups wait between steps
        limits = QueueLimits(NUM_GROUPS, GEN_BATCH, max_num_gen_batches=20, max_staleness=10)
        self._queue = GroupQueue(limits, by_correctness("strict"))

    def wait_ready(self) -> None:
        pass

    def dump_stacks(self) -> None:
        pass

    def next_batch(self, step: int, weight_version: int, is_to_stop: Callable[[], bool]) -> RolloutBatch:
        self._queue.begin(step, weight_version)
        while not self._queue.is_ready():
            if not self._queue.num_open:
                self._draw_gen_batch(weight_version)
            for draw in [each for each in self._queue.open_groups if not self._queue.is_finished(each.uid)]:
                if self._queue.num_unfinished == GEN_BATCH - NUM_FINISHED:
                    self.interrupt(step)
                if is_to_stop():
                    raise Interrupted("as the script has it")
                self._queue.add_finished(_group(draw, weight_version))
            groups = self._queue.decide()
            if self._pool is not None:
                self._pool.record(groups)
        taken = self._queue.take()
        metrics = {
            "rollout/num_gen_batches": float(taken.num_gen_batches),
            "rollout/num_groups_ready": float(taken.num_ready or 0),
            "rollout/num_surplus": float(self._queue.num_ready),
            "rollout/num_drawn": float(self._queue.account.num_drawn),
            "rollout/num_filtered": float(taken.filtered.total()),
        }
        if self._pool is not None:
            self._pool.end_step()
            metrics |= self._pool.metrics() | replay_metrics(taken.groups, weight_version)
        return RolloutBatch(taken.groups, metrics)

    def _draw_gen_batch(self, weight_version: int) -> None:
        for _ in range(GEN_BATCH):
            number, replayed = self._draws.next()
            self._queue.draw(_prompt(number), weight_version, replayed)

    def interrupt(self, step: int) -> None:
        """The event planned for the middle of this step."""

    def halt(self) -> None:
        """Nothing is under way."""

    def state_dict(self) -> dict:
        pool = {} if self._pool is None else {"experiences": self._pool.state_dict()}
        return {**self._draws.state_dict(), "queue": self._queue.state_dict(), **pool}

    def load_state_dict(self, state: dict) -> None:
        self._draws.load_state_dict(state)
        self._queue.load_state_dict(state["queue"])
        if self._pool is not None:
            self._pool.load_state_dict(state["experiences"])

    def close(self) -> None:
        pass


def _prompt(number: int) -> Prompt:
    tokens = tuple(random.Random(number).randrange(3, VOCABULARY) for _ in range(1 + number % 7))
    return Prompt(number, f"key{number}", tokens, "", "scripted", "0")


def _group(draw: Group, weight_version: int) -> Group:
    (group,) = synthetic_groups(VOCABULARY, num_groups=1, n=GROUP_SIZE, seed=int(draw.uid.partition("-")[0]))
    samples = [
        replace(
            sample,
            uid=draw.uid,
            prompt_tokens=draw.prompt.tokens,
            weight_versions=(weight_version,) * sample.num_response_tokens,
        )
        for sample in group.samples
    ]
    return replace(draw, samples=(*draw.samples, *samples[len(draw.samples) :]))


def signal_after(step: int, name: str) -> None:
    log = Telemetry.log

    def log_and_signal(self: Telemetry, number: int, *metrics_and_groups: Any) -> None:
        log(self, number, *metrics_and_groups)
        if number == step:
            os.kill(os.getpid(), getattr(signal, name))

    Telemetry.log = log_and_signal


def end_in_the_middle_of(step: int, how: str) -> None:
    def interrupt(self: ScriptedRollout, number: int) -> None:
        if number != step:
            return
        if how == "exhausted":
            raise UserError("the data are exhausted, as the script has it.")
        os.kill(os.getpid(), signal.SIGTERM)
        if how == "asked_and_lost":
            raise RolloutError("all servers are lost, as the script has it")

    ScriptedRollout.interrupt = interrupt


if __name__ == "__main__":
    if sys.argv[2].startswith("SIG"):
        signal_after(int(sys.argv[1]), sys.argv[2])
    else:
        end_in_the_middle_of(int(sys.argv[1]) + 1, sys.argv[2])
    megatron_dapo.job.start_rollout = ScriptedRollout
    # the log-probs of made-up groups are no model's
    sys.exit(main(["train", *sys.argv[3:], "algorithm.rollout_correction.max_mismatch=null"]))
