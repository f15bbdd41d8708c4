"""RPC handle of the rollout controller's process; every call has a deadline."""

import asyncio
import atexit
import faulthandler
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron_dapo.agents.agent_pool import END_S
from megatron_dapo.common import ends
from megatron_dapo.common.ends import EndFolder, EndKind
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.exit_codes import FAILED_EXIT_CODE
from megatron_dapo.common.rollout_errors import NeedsSync, RolloutError
from megatron_dapo.common.seeds import seed_generators
from megatron_dapo.common.signals import SignalReceiver, ignore_signals
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.flat_pickle import receive, send
from megatron_dapo.data.samples import RolloutBatch
from megatron_dapo.rollout.batch_source import never
from megatron_dapo.rollout.controller import Controller
from megatron_dapo.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

_GRACE_S = 60.0  # on top of the controller's own deadlines, with errors that say more
_POLL_S = 0.5
_CLOSE_S = 10.0
_COMMANDS = ("next_batch", "begin_evaluation", "evaluate", "halt", "state_dict", "load_state_dict")
_STOP = "stop"  # not a command: it is received during one, and not answered


class RolloutHandle:
    """A BatchSource with servers: the controller in a child process. Each call has a deadline.

    Errors of the controller are raised here with their message; UserError and RolloutError keep
    their class. The death of a controller is reported with its exit code and log file. A controller
    is asked no more after a missed deadline: its late answer would pass for an answer to the next
    call. Its state after the last step is kept here, so that the step can be saved.
    """

    def __init__(self, config: Config, process: Any, connection: Connection, log_file: Path) -> None:
        rollout = config.actor_rollout_ref.rollout
        self.log_file = log_file
        self._config = config
        self._process = process
        self._connection = connection
        self._start_timeout_s = rollout.server.startup_timeout_s + _GRACE_S
        self._call_timeout_s = rollout.step_timeout_s + _GRACE_S
        self._ready = False
        self._unanswered: str | None = None
        self._state: dict | None = None  # after the last step
        self._state_before: dict | None = None  # and before it
        self._was_refused = False

    @classmethod
    def start(cls, config: Config) -> "RolloutHandle":
        """Start the controller; return at once.

        It waits for the servers by itself (`wait_ready`).
        """
        log_file = RunFolder.of(config.trainer).log("controller").absolute()
        log_file.parent.mkdir(parents=True, exist_ok=True)
        # never fork a process that holds CUDA or process groups
        context = multiprocessing.get_context("spawn")
        connection, controllers_end = context.Pipe()
        process = context.Process(
            target=_main, args=(config, controllers_end, str(log_file)), name="rollout-controller"
        )
        process.start()
        # so that only the controller has it, and its death is seen here as end of file
        controllers_end.close()
        handle = cls(config, process, connection, log_file)
        # runs before multiprocessing's own, a wait for children without a deadline
        atexit.register(handle.close)
        return handle

    @property
    def pid(self) -> int:
        """Return the id of the controller's process."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until data are read and all servers are healthy.

        Raises UserError or RolloutError.
        """
        if self._unanswered is not None:
            raise RolloutError(
                f"the rollout controller (pid {self.pid}) has not answered {self._unanswered} in time and is asked no "
                f"more; see {self.log_file}."
            )
        if not self._ready:
            self._receive("start", self._start_timeout_s)
            self._ready = True

    def next_batch(self, step: int, weight_version: int, is_to_stop: Callable[[], bool] = never) -> RolloutBatch:
        """Return the groups of one rollout step; see Controller.next_batch.

        Only the first `rollout.dump_samples` of them have texts. Raises Interrupted soon after
        is_to_stop says so.
        """
        batch = self._call("next_batch", step, weight_version, is_to_stop=is_to_stop)
        # the samples ahead of the trainer would take minutes to hand over
        state = self._call("state_dict", False)
        self._state_before = self._state
        self._state = state
        return batch

    def refuse_batch(self) -> None:
        """Leave the last batch out of training: `state_dict` is the one before it from now on.

        A resumed run draws its prompts again. No further batch may be asked for.
        """
        self._was_refused = True

    def begin_evaluation(self, step: int, weight_version: int) -> None:
        """Have the held-out prompts answered; see Controller.begin_evaluation."""
        self._call("begin_evaluation", step, weight_version)

    def evaluate(self, step: int, weight_version: int) -> dict[str, float]:
        """Return the metrics of the held-out prompts; see Controller.evaluate. Raises NeedsSync."""
        return self._call("evaluate", step, weight_version)

    def halt(self) -> None:
        """End sampling, so that the last `state_dict` has the unfinished responses too.

        A controller that no longer answers has nothing under way.
        """
        try:
            if failure := self._call("halt"):
                log.error("the rollout had failed before it was halted: %s", failure)
        except RolloutError as error:
            log.warning("the rollout was not halted: %s", error)

    def state_dict(self) -> dict:
        """Return the prompt cursor, waiting groups and counters, as plain data.

        If the controller no longer answers, return the state after the last step. It lacks the
        groups sampled ahead of the trainer, which are sampled again.
        """
        if self._was_refused:
            assert self._state_before is not None, "no step is done before the first batch: nothing is saved"
            return self._state_before
        try:
            return self._call("state_dict")
        except RolloutError as error:
            if self._state is None:
                raise
            log.warning("the rollout's state is that after the last step: %s", error)
            return self._state

    def load_state_dict(self, state: dict) -> None:
        """Continue from the state of a saved controller."""
        self._call("load_state_dict", state)
        self._state = state

    def dump_stacks(self) -> None:
        """Have the controller log the stacks of its threads and tasks; return at once."""
        if self._process.is_alive():
            os.kill(self.pid, signal.SIGUSR2)

    def close(self) -> None:
        """End the controller: it sees the closed pipe; after a while it is killed. Idempotent."""
        atexit.unregister(self.close)
        self._connection.close()
        self._process.join(_close_s(self._config))
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _call(self, command: str, *arguments: Any, is_to_stop: Callable[[], bool] = never) -> Any:
        self.wait_ready()
        try:
            self._connection.send((command, arguments))
        except (BrokenPipeError, ConnectionResetError):
            raise self._died(command) from None
        return self._receive(command, self._call_timeout_s, is_to_stop)

    def _receive(self, command: str, timeout_s: float, is_to_stop: Callable[[], bool] = never) -> Any:
        deadline = time.monotonic() + timeout_s
        has_sent_stop = False
        while not self._connection.poll(_POLL_S):
            if not has_sent_stop and is_to_stop():
                has_sent_stop = True
                with suppress(OSError):  # it died, which is seen below
                    self._connection.send((_STOP, ()))
            if not self._process.is_alive() and not self._connection.poll(0):
                raise self._died(command)
            if time.monotonic() > deadline:
                self._unanswered = command
                raise RolloutError(
                    f"the rollout controller (pid {self.pid}) has not answered {command} for {timeout_s:g} s; "
                    f"see {self.log_file}."
                )
        try:
            kind, answer = receive(self._connection)
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


def _close_s(config: Config) -> float:
    """Return the seconds for a controller to end by itself, with its agents."""
    return _CLOSE_S + (END_S if config.actor_rollout_ref.rollout.agent.enable else 0.0)


# ------------------------------------------------------------------------------------- in the child


def _main(config: Config, connection: Connection, log_file: str) -> None:
    # they reach the whole terminal, or job step; the trainer decides, and closes the pipe when it
    # is done with us
    ignore_signals([signal.SIGINT])
    # received, not ignored: the children of reward functions would inherit ignored signals
    SignalReceiver((signal.SIGTERM, signal.SIGUSR1)).install()
    output = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    seed_generators(config.trainer.seed)
    ends.begin("controller", ends.own_folder() or EndFolder(RunFolder.of(config.trainer).ends, start=""))
    try:
        asyncio.run(_serve(config, connection, log_file))
    except BaseException as error:
        ends.write_own_end(ends.end_of_error(error))
        raise
    ends.record_end(EndKind.DONE, 0)


async def _serve(config: Config, connection: Connection, log_file: str) -> None:
    """Answer commands until the trainer closes the pipe or dies; drop the work under way then."""
    commands: asyncio.Queue[tuple[str, tuple]] = asyncio.Queue()
    stop_asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    gone = loop.create_future()
    loop.add_signal_handler(signal.SIGUSR2, _dump_tasks)
    faulthandler.register(signal.SIGUSR2, chain=True)  # also while the loop does not get to it
    reading = (connection, loop, commands, stop_asked, gone, _close_s(config))
    threading.Thread(target=_read_commands, args=reading, daemon=True).start()
    answering = asyncio.create_task(_answer_commands(config, connection, commands, stop_asked, log_file))
    await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
    if gone.done():
        log.info("the controller ends: %s", gone.result())
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)


def _dump_tasks() -> None:
    for task in asyncio.all_tasks():
        task.print_stack(limit=8, file=sys.stderr)
    sys.stderr.flush()


def _read_commands(
    connection: Connection,
    loop: Any,
    commands: asyncio.Queue,
    stop_asked: asyncio.Event,
    gone: asyncio.Future,
    close_s: float,
) -> None:
    """Forward the trainer's messages, in a thread of its own, since a pipe cannot be awaited.

    So the trainer's death and its request to stop are seen in the middle of a step. A request too
    late for one command does not stop the next.
    """

    def note_the_end() -> None:
        if not gone.done():
            gone.set_result("the trainer closed the pipe")

    try:
        while True:
            command = connection.recv()
            if command[0] == _STOP:
                loop.call_soon_threadsafe(stop_asked.set)
            else:
                loop.call_soon_threadsafe(stop_asked.clear)
                loop.call_soon_threadsafe(commands.put_nowait, command)
    except (EOFError, OSError):
        with suppress(RuntimeError):  # the loop is closed: all is over
            loop.call_soon_threadsafe(note_the_end)
    time.sleep(close_s)
    ends.record_end(EndKind.FAILED, FAILED_EXIT_CODE, "the loop did not end when the trainer closed the pipe")
    # user code holds the loop; a living trainer has killed us by now, a dead one cannot
    os._exit(FAILED_EXIT_CODE)


async def _answer_commands(
    config: Config, connection: Connection, commands: asyncio.Queue, stop_asked: asyncio.Event, log_file: str
) -> None:
    controller = None
    try:
        controller = Controller(config)
        controller.stop_asked = stop_asked
        await controller.start()
        gc.freeze()  # modules and prompts stay: the collector need not go through them
        send(connection, ("ok", None))
        while True:
            command, arguments = await commands.get()
            assert command in _COMMANDS, command
            kind, answer = await _answer(getattr(controller, command), arguments, log_file)
            send(connection, (kind, answer))
            del answer  # while it waits for the next command, it holds no groups
    except Exception as error:
        portable = _portable(error, log_file)
        ends.record_end(_end_kind(portable), 0, str(portable))
        send(connection, ("error", portable))
    finally:
        if controller is not None:
            await controller.close()


async def _answer(method: Any, arguments: tuple, log_file: str) -> tuple[str, Any]:
    try:
        answer = method(*arguments)
        return "ok", await answer if asyncio.iscoroutine(answer) else answer
    except Exception as error:
        return "error", _portable(error, log_file)


def _end_kind(error: Exception) -> EndKind:
    return error.end_kind if isinstance(error, RolloutError) else EndKind.USER_ERROR


def _portable(error: Exception, log_file: str) -> Exception:
    """Return the error as the trainer raises it; the traceback stays in the log."""
    if isinstance(error, NeedsSync):  # no failure
        return error
    log.error("%s: %s", type(error).__name__, error, exc_info=error)
    if isinstance(error, UserError | RolloutError):
        return error
    return RolloutError(f"{type(error).__name__} in the rollout controller: {error}; see {log_file}.")
