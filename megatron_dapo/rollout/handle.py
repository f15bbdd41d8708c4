"""The trainer's side of the rollout controller: a child process that is asked, and never waited for in vain."""

import asyncio
import atexit
import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron_dapo.config import Config, RunFolder, UserError
from megatron_dapo.data.types import RolloutBatch
from megatron_dapo.rollout.controller import Controller
from megatron_dapo.rollout.errors import RolloutError

log = logging.getLogger(__name__)

_GRACE_S = 60.0  # on top of the controller's own deadlines, whose errors say more
_POLL_S = 0.5
_CLOSE_S = 10.0
_COMMANDS = ("next_batch", "evaluate", "state_dict", "load_state_dict")


class RolloutHandle:
    """The controller in a child process. Calls block, one at a time; each has a deadline.

    An error in the controller is raised here with its message (UserError and RolloutError keep their class);
    a controller that died is reported with its exit code and log file. One that missed a deadline is asked no more: its
    late answer would be taken for that of the next call.
    """

    def __init__(self, config: Config, process: Any, connection: Connection, log_file: Path) -> None:
        rollout = config.actor_rollout_ref.rollout
        self.log_file = log_file
        self._process = process
        self._connection = connection
        self._start_timeout_s = rollout.server.startup_timeout_s + _GRACE_S
        self._call_timeout_s = rollout.step_timeout_s + _GRACE_S
        self._ready = False
        self._unanswered: str | None = None

    @classmethod
    def start(cls, config: Config) -> "RolloutHandle":
        """Start the controller and return at once; it waits for the servers by itself (`wait_ready`)."""
        log_file = RunFolder.of(config.trainer).log("controller").absolute()
        log_file.parent.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("spawn")  # never fork a process that holds CUDA or process groups
        ours, theirs = context.Pipe()
        process = context.Process(target=_main, args=(config, theirs, str(log_file)), name="rollout-controller")
        process.start()
        theirs.close()  # so that the controller's end is the only one, and its death is seen here as end of file
        handle = cls(config, process, ours, log_file)
        atexit.register(handle.close)  # runs before multiprocessing's own, which waits for children without a deadline
        return handle

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until data are read and all servers are healthy. Raises UserError or RolloutError."""
        if self._unanswered is not None:
            raise RolloutError(
                f"the rollout controller (pid {self.pid}) has not answered {self._unanswered} in time and is asked no "
                f"more; see {self.log_file}."
            )
        if not self._ready:
            self._receive("start", self._start_timeout_s)
            self._ready = True

    def next_batch(self, step: int, weight_version: int) -> RolloutBatch:
        """Groups for one rollout step; see Controller.next_batch."""
        return self._call("next_batch", step, weight_version)

    def evaluate(self, step: int, weight_version: int) -> dict[str, float]:
        """Metrics of the held-out prompts, {} without val_files; raises NeedsSync; see Controller.evaluate."""
        return self._call("evaluate", step, weight_version)

    def state_dict(self) -> dict:
        """Prompt cursor, surplus groups, counters; plain data."""
        return self._call("state_dict")

    def load_state_dict(self, state: dict) -> None:
        self._call("load_state_dict", state)

    def dump_stacks(self) -> None:
        """Have the controller write what its threads and tasks are doing to its log; returns at once."""
        if self._process.is_alive():
            os.kill(self.pid, signal.SIGUSR2)

    def close(self) -> None:
        """End the controller: it sees the closed pipe; after a while it is killed. Idempotent."""
        atexit.unregister(self.close)
        self._connection.close()
        self._process.join(_CLOSE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _call(self, command: str, *arguments: Any) -> Any:
        self.wait_ready()
        try:
            self._connection.send((command, arguments))
        except (BrokenPipeError, ConnectionResetError):
            raise self._died(command) from None
        return self._receive(command, self._call_timeout_s)

    def _receive(self, command: str, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while not self._connection.poll(_POLL_S):
            if not self._process.is_alive() and not self._connection.poll(0):
                raise self._died(command)
            if time.monotonic() > deadline:
                self._unanswered = command
                raise RolloutError(
                    f"the rollout controller (pid {self.pid}) has not answered {command} for {timeout_s:g} s; "
                    f"see {self.log_file}."
                )
        try:
            kind, answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._died(command) from None
        if kind == "error":
            raise answer
        return answer

    def _died(self, command: str) -> RolloutError:
        self._process.join(_CLOSE_S)
        return RolloutError(
            f"the rollout controller died in {command} with exit code {self._process.exitcode}; see {self.log_file}."
        )


# ---------------------------------------------------------------------------------------------------- in the child


def _main(config: Config, connection: Connection, log_file: str) -> None:
    # they reach the whole terminal, or job step; the trainer decides, and closes the pipe when it is done with us
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN not passed on to what reward functions start
    output = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    asyncio.run(_serve(config, connection, log_file))


async def _serve(config: Config, connection: Connection, log_file: str) -> None:
    """Answer commands until the trainer closes the pipe or dies: then also work under way is dropped."""
    commands: asyncio.Queue = asyncio.Queue()
    loop = asyncio.get_running_loop()
    gone = loop.create_future()
    loop.add_signal_handler(signal.SIGUSR2, _dump_tasks)
    faulthandler.register(signal.SIGUSR2, chain=True)  # also where the loop does not get to it
    threading.Thread(target=_read_commands, args=(connection, loop, commands, gone), daemon=True).start()
    answering = asyncio.create_task(_answer_commands(config, connection, commands, log_file))
    await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
    if gone.done():
        log.info("the controller ends: %s", gone.result())
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)


def _dump_tasks() -> None:
    for task in asyncio.all_tasks():
        task.print_stack(limit=8, file=sys.stderr)
    sys.stderr.flush()


def _read_commands(connection: Connection, loop: Any, commands: asyncio.Queue, gone: asyncio.Future) -> None:
    """In a thread of its own, since a pipe is not awaited: so the trainer's death is seen in the middle of a step."""
    try:
        while True:
            loop.call_soon_threadsafe(commands.put_nowait, connection.recv())
    except (EOFError, OSError):
        loop.call_soon_threadsafe(lambda: gone.done() or gone.set_result("the trainer closed the pipe"))


async def _answer_commands(config: Config, connection: Connection, commands: asyncio.Queue, log_file: str) -> None:
    controller = None
    try:
        controller = Controller(config)
        await controller.start()
        connection.send(("ok", None))
        while True:
            command, arguments = await commands.get()
            assert command in _COMMANDS, command
            connection.send(await _answer(getattr(controller, command), arguments, log_file))
    except Exception as error:
        connection.send(("error", _portable(error, log_file)))
    finally:
        if controller is not None:
            await controller.close()


async def _answer(method: Any, arguments: tuple, log_file: str) -> tuple[str, Any]:
    try:
        answer = method(*arguments)
        return "ok", await answer if asyncio.iscoroutine(answer) else answer
    except Exception as error:
        return "error", _portable(error, log_file)


def _portable(error: Exception, log_file: str) -> Exception:
    """The error as the trainer raises it; the traceback stays in the log."""
    log.error("%s: %s", type(error).__name__, error, exc_info=error)
    if isinstance(error, UserError | RolloutError):
        return error
    return RolloutError(f"{type(error).__name__} in the rollout controller: {error}; see {log_file}.")
