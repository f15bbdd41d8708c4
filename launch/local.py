"""Runs a config on this machine: starts its SGLang servers and, meanwhile, the trainer; ends both
in any case.

python -m launch.local --config configs/demo.yaml [--replay DIR] [--dry-run] [key=value ...]
"""

import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence

from launch.command_line import (
    STOP_SIGNALS,
    checked_config,
    forget_last_start,
    parse,
    parser,
    require_free_gpus,
    require_local,
    show_log,
)
from launch.process_names import LAUNCHER
from megatron_dapo.checkpointing.run_lock import RunLock
from megatron_dapo.commands.plan.dry_run import dry_run
from megatron_dapo.commands.plan.process_plan import process_plan
from megatron_dapo.common.child_environment import COMMON
from megatron_dapo.common.ends import End, EndFolder, EndKind, end_of_code
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.exit_codes import FAILED_EXIT_CODE, SAVED_EXIT_CODE, USER_ERROR_EXIT_CODE, signal_exit_code
from megatron_dapo.common.files import write_whole
from megatron_dapo.common.signals import StopSignals
from megatron_dapo.common.standard_streams import open_standard_streams, print_line
from megatron_dapo.config.derived import shares_gpus, starts_reward_model, starts_servers
from megatron_dapo.config.loader import to_yaml
from megatron_dapo.config.schema.config import Config
from megatron_dapo.first_look import first_look
from megatron_dapo.storage.run_folder import RunFolder

log = logging.getLogger("launch")

POLL_INTERVAL_S = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code.

    - The trainer's (85: asked to stop, and saved).
    - 1: the servers failed.
    - 2: mistakes of the user.
    - 128 + signal: stopped with nothing saved.
    """
    os.environ.update(COMMON)  # before torch is imported here: its threads would be bound
    options_parser = parser(
        "launch.local", "Train on this machine: SGLang servers and trainer, started and stopped together."
    )
    options_parser.add_argument("--replay", metavar="DIR", help="train on batches that trainer.dump_batches=true wrote")
    options_parser.add_argument(
        "--dry-run", action="store_true", help="check, print the config and the process plan, and stop"
    )
    arguments, overrides = parse(options_parser, argv)
    if arguments.replay:
        overrides = [*overrides, f"trainer.replay={arguments.replay}"]
    try:
        if arguments.dry_run:
            dry_run(arguments.config, overrides, check=require_local, look=first_look)
            return 0
        config = checked_config(arguments.config, overrides)
        require_local(config)
        first_look(config)
        print_line(process_plan(config))
        return run_local(config)
    except UserError as error:
        print(error.report(), file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    except KeyboardInterrupt:  # before the first process was started
        return 130


def run_local(config: Config, command: Sequence[str] | None = None) -> int:
    """Run a checked config and return the exit code, like `main`. command: the program of each
    rank; None: the trainer.

    Servers are started unless some are given by URL or the run uses none. The trainer is started at
    the same time: its controller waits for them. With shared GPUs it is started after them: SGLang
    sizes its cache by the memory free at its start. Nothing is left running afterwards.
    """
    # these import torch: after the config was checked
    from launch.trainer_ranks import TrainerRanks, trainer_command
    from megatron_dapo.servers.run_servers import RunServers
    from megatron_dapo.servers.supervisor import ServerFailure

    open_standard_streams()
    require_free_gpus(config)
    run = RunFolder.of(config.trainer).create()
    _wait_for_folder(run)
    config_file = run.logs / "config.yaml"
    write_whole(config_file, to_yaml(config))
    forget_last_start(run, starts_servers=starts_servers(config))
    if shares_gpus(config):
        run.ledger.mkdir()
    folder = EndFolder(run.ends, start=secrets.token_hex(8))
    with show_log(run.log("launch")), StopSignals(STOP_SIGNALS) as stop:
        servers = None
        end = end_of_code(FAILED_EXIT_CODE)
        if starts_servers(config) or starts_reward_model(config):
            first_gpu = 0 if shares_gpus(config) else config.trainer.n_procs_per_node
            servers = RunServers.of(config, run.logs, first_gpu=first_gpu)
        overrides_of_servers = servers.overrides() if servers else []
        ranks = TrainerRanks(config, run, command or trainer_command(str(config_file), overrides_of_servers), folder)
        try:
            if servers:
                servers.start()
            if servers and shares_gpus(config) and not _become_healthy(servers, stop):
                code = stop.exit_code
            else:
                ranks.start()
                code = _watch(servers, ranks, stop)
            end = end_of_code(code)
            return code
        except UserError as error:
            end = End(EndKind.USER_ERROR, USER_ERROR_EXIT_CODE, error.sentences[0])
            raise
        except ServerFailure as error:
            log.error("The servers failed: %s", error)
            end = End(EndKind.FAILED, FAILED_EXIT_CODE, error.summary())
            return FAILED_EXIT_CODE
        finally:
            ranks.stop()
            if servers:
                servers.stop()
            _record(folder, end)


def _record(folder: EndFolder, end: End) -> None:
    try:
        folder.write(LAUNCHER, end)
    except OSError as error:  # a full disk: the run's end stays the same
        log.error("How the run ended cannot be written to %s: %s", folder.path, error)


def _wait_for_folder(run: RunFolder) -> None:
    """Wait until no other run uses the run folder, before servers are started and logs are written.

    Otherwise servers would be started in vain, and an active run's logs would be overwritten. Raise
    UserError if the other run continues, or the folder is not writable.
    """
    lock = RunLock(run.lock)
    lock.acquire()
    lock.release()  # rank 0 takes it for the time of the run


def _become_healthy(servers, stop: StopSignals) -> bool:
    """Wait until all servers are healthy; return False after a stop signal. Raises ServerFailure."""
    while not servers.check():
        if stop.received is not None:
            log.warning("%s: stopping the servers, before the trainer was started", _words(stop.received))
            return False
        time.sleep(POLL_INTERVAL_S)
    return True


def _watch(servers, ranks, stop: StopSignals) -> int:
    """Wait until the trainer ends. A stop signal has it save first; a second one does not wait.
    Raises ServerFailure."""
    was_asked = False
    while stop.num_received < 2:
        if stop.received is not None and not was_asked:
            was_asked = True
            log.warning(
                "%s: the trainer saves, at the latest when its step ends, then all stops; "
                "a second signal stops it at once",
                _words(stop.received),
            )
            ranks.ask_to_stop(_words(stop.received))
        if servers and not _check(servers):
            # before the trainer: its failure may follow from theirs
            servers = None
        code = ranks.check()
        if code is not None:
            return _end(code, servers, ranks, stop)
        time.sleep(POLL_INTERVAL_S)
    assert stop.received is not None, "two signals came"
    log.warning("%s again: stopping the trainer, then the servers", _words(stop.received))
    return stop.exit_code


def _words(received: signal.Signals) -> str:
    return "Ctrl-C" if received == signal.SIGINT else received.name


def _check(servers) -> bool:
    """Check the servers; return False if the last server is lost for good: the trainer then waits
    in vain, saves and fails by itself. Raises ServerFailure if training cannot have begun."""
    from megatron_dapo.servers.supervisor import ServerFailure

    try:
        servers.check()
    except ServerFailure as error:
        if not servers.were_healthy:
            raise
        log.error("The servers failed: %s\nThe trainer waits in vain for one, saves its last step and ends.", error)
        return False
    return True


def _end(code: int, servers, ranks, stop: StopSignals) -> int:
    if code in (0, SAVED_EXIT_CODE):
        return code
    # training had not begun: nothing to save
    if stop.received and code == signal_exit_code(signal.SIGTERM):
        return stop.exit_code
    if servers:
        _check(servers)
    log.error("The trainer failed: %s", ranks.failure())
    return code


if __name__ == "__main__":
    sys.exit(main())
