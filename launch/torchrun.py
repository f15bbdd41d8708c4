"""torchrun for the trainer: signals reach the ranks, and the exit code is theirs (85: asked to
stop, and saved).

python -m launch.torchrun [torchrun's options] -m megatron_dapo train --config FILE [key=value ...]

torchrun itself turns every exit code into 1, with a traceback. SIGUSR1 ends it and leaves the ranks
behind; after SIGTERM it kills them before a long step is over.
"""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

import psutil

from launch.process_names import trainer_launcher_name
from megatron_dapo.common import ends
from megatron_dapo.common.addresses import node_name
from megatron_dapo.common.child_environment import COMMON
from megatron_dapo.common.exit_codes import (
    SAVED_EXIT_CODE,
    USER_ERROR_EXIT_CODE,
    exit_phrase,
    shell_exit_code,
    signal_exit_code,
)
from megatron_dapo.common.signals import SignalReceiver, is_ignored

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# a rank saves after it has stopped sampling, or at the end of its step, which may take long
_FORWARDED = (signal.SIGTERM, signal.SIGUSR1)
_LEFT_TO_TORCHRUN = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code of the first rank of this node that did not end with 0; 128 + signal
    after a signal."""
    # for the ranks; before torch is imported: its threads would be bound
    os.environ.update(COMMON)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    ends.begin(trainer_launcher_name(node_name()), ends.own_folder())
    arguments = parse_args(argv)
    arguments.signals_to_handle = ",".join(_left_to_torchrun())
    SignalReceiver(_FORWARDED, _forward).install()
    try:
        run(arguments)
    except ChildFailedError as failure:
        _, first = failure.get_first_failure()
        if first.exitcode not in (SAVED_EXIT_CODE, USER_ERROR_EXIT_CODE):
            # the ranks have explained these two
            print(failure, *map(_failure_line, failure.failures.items()), sep="\n", file=sys.stderr, flush=True)
        for failed in failure.failures.items():
            _record_end(failed)
        ends.write_own_end(ends.end_of_code(first.exitcode))
        return shell_exit_code(first.exitcode)
    ends.write_own_end(ends.end_of_code(0))
    return 0


def _left_to_torchrun() -> Iterator[str]:
    """Yield the names of the signals that torchrun handles: not SIGHUP if `nohup` ignores it."""
    for number in _LEFT_TO_TORCHRUN:
        if not (number == signal.SIGHUP and is_ignored(number)):
            yield number.name


def _failure_line(failed: "tuple[int, ProcessFailure]") -> str:
    """Return how a rank ended, for the log."""
    rank, failure = failed
    time = datetime.fromtimestamp(failure.timestamp).isoformat()
    return f"rank {rank} on {node_name()} {exit_phrase(failure.exitcode)} at {time}"


def _record_end(failed: "tuple[int, ProcessFailure]") -> None:
    """Write how a rank ended that was killed before it could write it."""
    rank, failure = failed
    folder = ends.own_folder()
    name = ends.rank_name(rank)
    try:
        if folder is not None and folder.read(name) is None:
            folder.write(name, replace(ends.end_of_code(failure.exitcode), time=failure.timestamp))
    except OSError as error:
        print(f"How rank {rank} ended cannot be written: {error}", file=sys.stderr, flush=True)


def _forward(number: signal.Signals) -> None:
    ranks = psutil.Process().children()
    for rank in ranks:
        rank.send_signal(number)
    if not ranks:  # not started yet: nothing to save
        sys.exit(signal_exit_code(number))


if __name__ == "__main__":
    sys.exit(main())
