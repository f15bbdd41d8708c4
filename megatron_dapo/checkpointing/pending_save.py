"""A save under way, by this process or by a forked one during training.

Megatron's own writer reports through a queue; its server process imports the whole program again
(seconds per rank). There a failed rank leaves the others waiting. Here every result travels over
the job's own process group.
"""

import atexit
import gc
import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from megatron_dapo.common.errors import JobError
from megatron_dapo.common.parent_death import end_with_parent
from megatron_dapo.common.signals import ignore_signals
from megatron_dapo.platform.agreement import Agreement, describe

# sent to all processes of a job: the trainer decides
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class PendingSave:
    """The files of one folder. They count only after `finish` has returned.

    A forked process has this process's memory as of the start of the save: training may change it
    at once. The child ends with this process, which does not wait for it: a partial write counts
    for nothing.
    """

    def __init__(
        self,
        agreement: Agreement,
        folder: Path,
        write: Callable[[], list[Any]],
        complete: Callable[[list[Any]], None],
        background: bool,
    ) -> None:
        """Begin to write in the background, or leave it to `finish`. Not collective.

        Raises nothing: `finish` reports a failed fork, for example for lack of memory, like any
        failed write.

        Args:
            write: writes this rank's files and returns their descriptions, which are pickled.
            complete: gets this rank's result when all ranks have written; collective.
        """
        self._agreement = agreement
        self._folder = folder
        self._complete = complete
        self._result = write
        self._receiver: Connection | None = None
        self._is_finished = False
        self._failure: JobError | None = None
        if background:
            try:
                self._start(write)
            except OSError as error:
                self._result = partial(_fail, f"no process can be started to write ({describe(error)})")

    def is_done(self) -> bool:
        """Return whether every rank's writing has ended, well or not, so that `finish` does not
        wait. Collective."""
        # also true at the end of the pipe
        has_ended = self._receiver is None or self._receiver.poll()
        return all(self._agreement.gather(has_ended))

    def finish(self) -> None:
        """Wait for the files and complete the folder. Collective over all ranks. A second call does
        nothing.

        Raises:
            JobError: on every rank if one rank's writing failed, and again in later calls.
        """
        if self._failure:
            raise self._failure
        if self._is_finished:
            return
        try:
            self._complete(self._agreement.each(f"writing {self._folder}", self._result))
        except JobError as failure:
            self._failure = failure
            raise
        self._is_finished = True
        del self._result, self._complete  # and the state that they hold

    def _start(self, write: Callable[[], list[Any]]) -> None:
        context = multiprocessing.get_context("fork")
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_write_and_report, args=(write, sender, os.getpid()), daemon=True)
        try:
            self._process.start()
        except OSError:
            self._receiver = None
            raise
        finally:
            sender.close()  # then the child's end is the only one, and its death ends the pipe
        # before multiprocessing's own handler, which would wait for hanging storage
        atexit.register(self._process.kill)
        self._result = self._receive

    def _receive(self) -> list[Any]:
        """Wait for the child. Raises OSError with the child's error, or saying how it ended."""
        assert self._receiver is not None
        try:
            results, error = self._receiver.recv()
        except EOFError:
            self._join()
            raise OSError(f"the writing process ended with exit code {self._process.exitcode}") from None
        self._join()
        if error:
            raise OSError(error)
        return results

    def _join(self) -> None:
        self._process.join()
        atexit.unregister(self._process.kill)


def _write_and_report(write: Callable[[], list[Any]], sender: Connection, parent: int) -> None:
    """Write, in the child, and send (results, error)."""
    gc.disable()  # collecting the parent's GPU objects here would touch the GPU
    # a fork has the parent's OpenMP team without its threads: two would wait for ever
    torch.set_num_threads(1)
    ignore_signals(_SIGNALS)
    # a killed trainer leaves no writer behind, in a folder that its successor uses
    end_with_parent(parent)
    answer: tuple[list[Any], str]
    try:
        answer = (write(), "")
    except Exception as error:  # noqa: BLE001  every failure is the parent's to report
        answer = ([], describe(error))
    sender.send(answer)
    sender.close()


def _fail(text: str) -> NoReturn:
    raise OSError(text)
