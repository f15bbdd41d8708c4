"""Starts trainers by forking: everything is imported once; a new one trains after a second.

python -m tests.e2e.trainer_nursery CONFIG LOG NUM_RANKS

The ranks' output goes to LOG. Commands are lines of its input, and it says "done" after each.
`start`: the ranks of one more trainer; `kill RANK ...`: kill -9; `end`: of the rest, as
launch.local does when one is gone.
"""

import os
import signal
import sys
import traceback

import torch._dynamo  # noqa: F401  torch's optimizers import it, which takes longer than all the rest of a start

import megatron_dapo.trainer  # noqa: F401
from megatron_dapo import job
from megatron_dapo.__main__ import main
from tests.e2e.scripted_trainer import ScriptedRollout
from tests.helpers import free_port


def fork_rank(rank: int, num_ranks: int, port: int, config: str, log: str) -> int:
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        for number in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        os.environ |= {name: str(value) for name, value in place.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        job.start_rollout = ScriptedRollout
        code = main(["train", "--config", config])
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


class Nursery:
    def __init__(self, config: str, log: str, num_ranks: str) -> None:
        self._config, self._log, self._num_ranks = config, log, int(num_ranks)
        self._alive: dict[int, int] = {}

    def start(self) -> None:
        port = free_port()
        for rank in range(self._num_ranks):
            self._alive[rank] = fork_rank(rank, self._num_ranks, port, self._config, self._log)

    def kill(self, *ranks: str) -> None:
        """Of processes that have not been waited for: their numbers are still theirs."""
        for rank in ranks:
            os.kill(self._alive[int(rank)], signal.SIGKILL)

    def end(self) -> None:
        self.kill(*map(str, self._alive))
        for process in self._alive.values():
            os.waitpid(process, 0)
        self._alive.clear()


if __name__ == "__main__":
    nursery = Nursery(*sys.argv[1:])
    for line in sys.stdin:
        command, *ranks = line.split()
        getattr(nursery, command)(*ranks)
        print("done", flush=True)
    nursery.end()
