"""The trainer's ranks on one machine: started with the variables that torchrun sets, watched,
ended."""

import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from megatron_dapo.common.addresses import LOOPBACK
from megatron_dapo.common.child_environment import COMMON, places_to_write
from megatron_dapo.common.ends import EndFolder, end_of_code
from megatron_dapo.common.exit_codes import SAVED_EXIT_CODE, shell_exit_code
from megatron_dapo.config.schema.config import Config
from megatron_dapo.platform.device import is_gpu
from megatron_dapo.servers.child_process import ChildProcess
from megatron_dapo.servers.server_command import ledger_variables, visible_gpus
from megatron_dapo.servers.supervisor import ReservedPort
from megatron_dapo.storage.run_folder import RunFolder

log = logging.getLogger("launch")

STOP_GRACE_S = 20.0
LAST_RANK_GRACE_S = 300.0
_GOOD_ENDS = (None, 0, SAVED_EXIT_CODE)


class TrainerRanks:
    """`trainer.n_procs_per_node` processes of one command. Rank 0 writes to our standard output;
    its errors, and all that the others write, go to logs/trainer-rank-N.log of the run folder."""

    def __init__(self, config: Config, run: RunFolder, command: Sequence[str], ends: EndFolder) -> None:
        """Prepare the ranks. command: of each rank; ends: the folder of their end records."""
        self._config = config
        self._world = config.trainer.n_procs_per_node
        self._run = run
        self._command = command
        self._ends = ends
        self._master_port = ReservedPort(LOOPBACK)
        self._ranks: list[ChildProcess] = []
        self._deadline: float | None = None
        self._was_asked = False

    def start(self) -> None:
        for rank in range(self._world):
            name = f"trainer-rank-{rank}"
            environment = self._environment(rank)
            self._ranks.append(
                ChildProcess(name, self._command, self._run.log(name), environment, show_stdout=rank == 0)
            )
        ranks = "rank" if self._world == 1 else "ranks"
        log.info("trainer: %d %s (pid %s)", self._world, ranks, ", ".join(str(rank.pid) for rank in self._ranks))

    def check(self) -> int | None:
        """Return the exit code of the first failed rank; None while the ranks run. 0: all are done;
        85: they stopped and are saved."""
        codes = [rank.poll() for rank in self._ranks]
        failed = [code for code in codes if code not in _GOOD_ENDS]
        if failed:
            self._record_killed()
            return shell_exit_code(failed[0])
        if None in codes:
            return self._overdue() if any(code is not None for code in codes) else None
        return max(code for code in codes if code is not None)

    def _record_killed(self) -> None:
        """Write the records of ranks that a signal ended before they could write their own."""
        for rank in self._ranks:
            code = rank.poll()
            if code is None or code >= 0:
                continue
            with suppress(OSError):
                if self._ends.read(rank.name) is None:
                    self._ends.write(rank.name, end_of_code(code))

    def failure(self) -> str:
        """Return the failed ranks, each with its end, log file and last lines."""
        return "\n".join(rank.describe_end() for rank in self._ranks if rank.poll() not in _GOOD_ENDS)

    def ask_to_stop(self, reason: str | None = None) -> None:
        """Send SIGTERM to all ranks, once: they save at the end of their step and exit with 85, if
        training has begun. reason: the user's action, for their messages in place of SIGTERM."""
        self._was_asked = True
        if reason:
            with suppress(OSError):  # a full disk: the ranks say SIGTERM
                self._ends.note_stop(reason)
        for rank in self._ranks:
            rank.terminate()

    def stop(self) -> None:
        """Send SIGTERM to all ranks, and SIGKILL after a grace time to the remaining ones and their
        children. Ranks that were asked to stop before get no grace time."""
        grace_s = 0.0 if self._was_asked else STOP_GRACE_S
        self.ask_to_stop()
        deadline = time.monotonic() + grace_s
        for rank in self._ranks:
            rank.stop(max(0.0, deadline - time.monotonic()))
        self._master_port.release()

    def _overdue(self) -> int | None:
        """Return 1 if ranks are overdue: another one is done, and they had time to end as well."""
        self._deadline = self._deadline or time.monotonic() + LAST_RANK_GRACE_S
        if time.monotonic() < self._deadline:
            return None
        running = ", ".join(rank.name for rank in self._ranks if rank.poll() is None)
        log.error("%s did not end within %g s of the first rank that did", running, LAST_RANK_GRACE_S)
        return 1

    def _environment(self, rank: int) -> dict[str, str]:
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._world),
            "LOCAL_WORLD_SIZE": str(self._world),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self._master_port.number),
            "PYTHONUNBUFFERED": "1",
            **self._ends.variables(),
        }
        if is_gpu():
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus()[: self._world])
        else:
            environment |= ledger_variables(self._config, [str(rank)])
        return {"OMP_NUM_THREADS": "1"} | environment | COMMON | places_to_write(environment)


def trainer_command(config_file: str, overrides: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "megatron_dapo", "train", "--config", config_file, *overrides]
