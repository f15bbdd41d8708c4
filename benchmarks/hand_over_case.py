"""One measurement of the hand-over, run as a file.

The program's own parts do the work. The client reads a server's answers, and the trainer's handle
asks a controller in a child process. `StepDistributor` hands the step to the ranks, and the
checkpoint's code writes the state. Only the servers are missing: their answers are made up.
"""

import gc
import json
import multiprocessing
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path

import orjson
import psutil

GROUP_SIZE = 16
GROUPS_PER_MINI_BATCH = 32
NUM_PROMPT_TOKENS = 200
VOCABULARY = 150_000
NUM_DISTINCT = 16  # answers; the others repeat them, as objects of their own
TP = 2
DP = 2
CAP = 24576
OBJECTS_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class HandOver:
    """A hand-over of num_samples responses of num_tokens tokens each, `rounds` times."""

    num_samples: int
    num_tokens: int
    rounds: int


class Answers:
    """A stand-in for the controller: the program's own code makes groups of servers' answers."""

    def __init__(self, case: HandOver, config: object) -> None:
        import asyncio

        self._case = case
        self._groups: tuple = ()
        self.stop_asked = asyncio.Event()

    async def start(self) -> None:
        """Do nothing: there is nothing to wait for."""

    async def close(self) -> None:
        """Do nothing: nothing is open."""

    def evaluate(self, step: int, weight_version: int) -> dict[str, float]:
        """Build the groups; return their cost."""
        from megatron_dapo.data.samples import Group, Prompt

        bodies = [self._body(random.Random(seed)) for seed in range(NUM_DISTINCT)]
        self._sample("", bodies[0], (1,))  # for imports on first use
        gc.collect()
        before = psutil.Process().memory_info().rss
        start = time.process_time()
        groups = []
        for number in range(self._case.num_samples // GROUP_SIZE):
            chooser = random.Random(number)
            prompt = tuple(chooser.randrange(VOCABULARY) for _ in range(NUM_PROMPT_TOKENS))
            samples = tuple(self._sample(str(number), chooser.choice(bodies), prompt) for _ in range(GROUP_SIZE))
            groups.append(Group(str(number), Prompt(number, str(number), prompt, "", "bench", ""), samples))
        seconds = time.process_time() - start
        gc.collect()
        self._groups = tuple(groups)
        num_tokens = self._case.num_samples * self._case.num_tokens
        return {
            "bytes_per_token": (psutil.Process().memory_info().rss - before) / num_tokens,
            "ms_per_answer": 1e3 * seconds / self._case.num_samples,
        }

    def next_batch(self, step: int, weight_version: int) -> object:
        """Return the groups as a step."""
        from megatron_dapo.data.samples import RolloutBatch

        return RolloutBatch(self._groups, {})

    def state_dict(self, with_samples: bool = True) -> dict:
        """Return the groups as waiting ones."""
        from megatron_dapo.queue.plain_data import group_to_plain

        return {"queue": {"kept": [group_to_plain(group) for group in self._groups]}} if with_samples else {}

    def _body(self, chooser: random.Random) -> bytes:
        length = self._case.num_tokens
        tokens = [chooser.randrange(VOCABULARY) for _ in range(length)]
        log_probs = [-chooser.expovariate(1.0) for _ in range(length)]
        meta = {
            "output_token_logprobs": [[value, token, None] for value, token in zip(log_probs, tokens, strict=True)],
            "finish_reason": {"type": "stop"},
            "weight_versions": [{"version": "3", "start": 0, "end": length}],
        }
        return json.dumps({"output_ids": tokens, "meta_info": meta}).encode()

    def _sample(self, uid: str, body: bytes, prompt: tuple[int, ...]) -> object:
        from megatron_dapo.rewards.reward_result import RewardResult
        from megatron_dapo.rewards.shaping import unshaped
        from megatron_dapo.rollout import sampling
        from megatron_dapo.rollout.trajectory import Trajectory
        from megatron_dapo.servers import client

        trajectory = Trajectory(prompt)
        trajectory.add_model_turn(client.generation_of(orjson.loads(body)))
        return sampling._to_sample(uid, 0, trajectory, RewardResult(float(len(uid) % 2), True), unshaped)


def _controller(case: HandOver, config: object, connection: object, log_file: str) -> None:
    from megatron_dapo.rollout import handle

    handle.Controller = partial(Answers, case)  # type: ignore[assignment, misc]
    handle._main(config, connection, log_file)  # type: ignore[arg-type]


def _rank(rank: int, port: int, folder: Path, case: HandOver) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": TP * DP, "LOCAL_WORLD_SIZE": TP * DP, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
    from megatron_dapo.common.large_imports import large_imports

    with large_imports():
        from megatron_dapo.config.loader import load_config
        from megatron_dapo.huggingface.spec_reader import read_model_spec
        from megatron_dapo.platform.parallel import ParallelLayout
        from megatron_dapo.training.distribute import StepDistributor

    config = load_config(
        None,
        [
            f"actor_rollout_ref.model.path={folder / 'hf'}",
            f"trainer.run_dir={folder / 'run'}",
            f"actor_rollout_ref.actor.megatron.tensor_model_parallel_size={TP}",
            f"actor_rollout_ref.actor.max_tokens_per_microbatch={CAP}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={GROUPS_PER_MINI_BATCH}",
        ],
    )
    layout = ParallelLayout.initialize(tp=TP, object_timeout_s=OBJECTS_TIMEOUT_S)
    distributor = StepDistributor(config, layout, read_model_spec(folder / "hf"))
    leader = _Leader(case, config, folder) if rank == 0 else None
    layout.gather(None)
    rounds = [_round(layout, distributor, leader) for _ in range(case.rounds)]
    peaks = layout.gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    if leader is not None:
        fastest = min(rounds, key=lambda each: each["to_rank_0_s"] + each["to_ranks_s"])
        fastest["cpu_s"] = statistics.median(each["cpu_s"] for each in rounds)
        answer = {**asdict(case), **leader.costs, **fastest, **leader.save_state(), "peak_bytes_of_ranks": peaks}
        (folder / "answer.json").write_text(json.dumps(answer))
        leader.handle.close()
    layout.gather(None)
    ParallelLayout.shutdown()


class _Leader:
    """The own part of rank 0: the controller."""

    def __init__(self, case: HandOver, config: object, folder: Path) -> None:
        from megatron_dapo.rollout.handle import RolloutHandle

        self._folder = folder
        log_file = folder / "controller.log"
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        # a daemon: a failing rank would wait for it
        process = context.Process(target=_controller, args=(case, config, there, str(log_file)), daemon=True)
        process.start()
        there.close()
        self.handle = RolloutHandle(config, process, here, log_file)  # type: ignore[arg-type]
        self.costs = self.handle.evaluate(0, 0)

    def controllers_cpu_s(self) -> float:
        """Return the CPU seconds of the controller so far, to a hundredth."""
        times = psutil.Process(self.handle.pid).cpu_times()
        return times.user + times.system

    def save_state(self) -> dict[str, float]:
        """Fetch and write the state of waiting groups; return the seconds and bytes."""
        from megatron_dapo.checkpointing.folders import read_controller_state, write_controller_state

        start = time.perf_counter()
        state = self.handle.state_dict()
        fetched = time.perf_counter()
        saved = self._folder / "saved"
        saved.mkdir()
        write_controller_state(saved, state)
        written = time.perf_counter()
        del state
        (file,) = saved.iterdir()
        num_bytes = file.stat().st_size
        began = time.perf_counter()
        read_controller_state(saved)
        return {
            "state_to_rank_0_s": fetched - start,
            "state_written_s": written - fetched,
            "state_read_s": time.perf_counter() - began,
            "state_bytes": num_bytes,
        }


def _round(layout: object, distributor: object, leader: _Leader | None) -> dict[str, float]:
    """Hand the step over; return seconds.

    They go from the controller to rank 0, and from there to micro-batches on all ranks. Of the
    latter rank 0's cutting and the slowest rank's collating are given, too. CPU seconds are of all
    ranks and the controller.
    """
    groups = None
    began = time.process_time() + (leader.controllers_cpu_s() if leader else 0.0)
    to_rank_0 = 0.0
    if leader is not None:
        start = time.perf_counter()
        groups = leader.handle.next_batch(1, 0).groups
        to_rank_0 = time.perf_counter() - start
    seconds = {"_cut": 0.0, "_collated": 0.0}
    layout.gather(None)
    start = time.perf_counter()
    with _timed(distributor, seconds):
        shard = distributor(1, groups)
    layout.gather(None)
    to_ranks = time.perf_counter() - start
    cpu_s = time.process_time() + (leader.controllers_cpu_s() if leader else 0.0) - began
    num_tokens = sum(sum(batch.lengths) for batches in shard.mini_batches for batch in batches)
    assert num_tokens > 0
    del shard, groups
    gc.collect()
    return {
        "to_rank_0_s": to_rank_0,
        "to_ranks_s": to_ranks,
        "cut_s": max(layout.gather(seconds["_cut"])),
        "collate_s": max(layout.gather(seconds["_collated"])),
        "cpu_s": sum(layout.gather(cpu_s)),
    }


class _timed:
    """Count the seconds of an object's methods, by name, while the block runs."""

    def __init__(self, owner: object, seconds: dict[str, float]) -> None:
        self._owner = owner
        self._seconds = seconds

    def __enter__(self) -> None:
        for name in self._seconds:
            setattr(self._owner, name, self._counted(name, getattr(self._owner, name)))

    def __exit__(self, *_: object) -> None:
        for name in self._seconds:
            delattr(self._owner, name)

    def _counted(self, name: str, method: Callable) -> Callable:
        def counted(*arguments: object) -> object:
            start = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self._seconds[name] += time.perf_counter() - start

        return counted


def main(num_samples: str, num_tokens: str, rounds: str) -> None:
    """Measure and print the figures as JSON."""
    import torch

    from benchmarks.synthetic_model import ModelSize, write_model
    from tests.helpers import free_port

    case = HandOver(int(num_samples), int(num_tokens), int(rounds))
    with tempfile.TemporaryDirectory(prefix="hand-over-") as name:
        folder = Path(name)
        write_model(folder / "hf", ModelSize(hidden=64, ffn=128, layers=2, vocab=256), torch.float32, 10**9)
        context = multiprocessing.get_context("spawn")
        port = free_port()
        ranks = [context.Process(target=_rank, args=(rank, port, folder, case)) for rank in range(TP * DP)]
        try:
            for process in ranks:
                process.start()
            while running := [process for process in ranks if process.exitcode is None]:
                wait([process.sentinel for process in running])
                if any(process.exitcode for process in ranks):
                    sys.exit("a rank failed")
        finally:
            for process in ranks:
                process.kill()
        print((folder / "answer.json").read_text())


if __name__ == "__main__":
    main(*sys.argv[1:])
