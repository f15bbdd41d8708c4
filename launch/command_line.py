"""Shared by the commands of this folder: arguments, the check of the config, and the log."""

import argparse
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_dapo.checks.colocated_checks import given_servers
from megatron_dapo.checks.gpu_checks import machine_here, shared_gpu_faults
from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import remove_folder
from megatron_dapo.common.heavy_packages import require_package
from megatron_dapo.config.derived import shares_gpus, uses_servers
from megatron_dapo.config.recipes import add_config_arguments
from megatron_dapo.config.schema.config import Config
from megatron_dapo.storage.run_folder import RunFolder

# Ctrl-C, a request to end, a closed terminal, the schedulers' signal before a time limit
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def parser(program: str, description: str) -> argparse.ArgumentParser:
    options_parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        usage=f"python -m {program} [options] [key=value ...]",
        description=description,
        epilog="key=value sets any key of the config; docs/config.md lists them all. Exit code 2: mistakes to correct.",
    )
    add_config_arguments(options_parser)
    return options_parser


def parse(options_parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return arguments and overrides."""
    arguments, overrides = options_parser.parse_known_args(argv)
    if stray := [text for text in overrides if text.startswith("-")]:
        options_parser.error(f"unknown argument {stray[0]}")
    return arguments, overrides


def checked_config(path: str | None, overrides: list[str], check_files: bool = True) -> Config:
    """Raise UserError with every mistake of the config, or for a missing package."""
    config = load_and_validate(path, overrides, check_files=check_files)
    require_package("torch")  # of every process that is started
    return config


def forget_last_start(run: RunFolder, *, starts_servers: bool) -> None:
    """Remove the agreements of a run's earlier start: the lease and the accounts of shared GPUs.

    starts_servers: those of servers over several nodes, too. Running ones still need theirs.
    """
    remove_folder(run.lease)
    remove_folder(run.ledger)
    if starts_servers:
        remove_folder(run.server_starts)


def require_local(config: Config) -> None:
    """Raise UserError for a run of several nodes, or with given servers and shared GPUs."""
    require_one_node(config)
    if sentences := list(given_servers(config)):
        raise UserError(sentences)


def require_free_gpus(config: Config) -> None:
    """Raise UserError for GPUs of this machine that trainer and servers cannot share, before any
    process of the run holds memory."""
    if not shares_gpus(config):
        return
    from megatron_dapo.servers.server_command import visible_gpus  # it imports torch

    if sentences := list(shared_gpu_faults(config, machine_here(visible_gpus()[: config.trainer.n_procs_per_node]))):
        raise UserError(sentences)


def require_one_node(config: Config) -> None:
    if config.trainer.nnodes != 1:
        raise UserError(
            f"trainer.nnodes = {config.trainer.nnodes}: this command starts the processes of one machine; "
            "set trainer.nnodes=1, or start the run with a cluster's launcher."
        )
    nodes = config.actor_rollout_ref.rollout.server.nnodes
    if nodes and uses_servers(config):
        raise UserError(
            f"actor_rollout_ref.rollout.server.nnodes = {nodes}: this command starts the servers on the trainer's "
            "machine; set it to 0, or start the run with a cluster's launcher."
        )


@contextmanager
def show_log(log_file: Path | None) -> Iterator[None]:
    """Send log messages of launch and of the servers' supervisor to standard error during the
    block.

    They also go to `log_file`, with the time. Without `log_file`, standard error is itself a file,
    and has the time.
    """
    timed = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    to_terminal = logging.StreamHandler(sys.stderr)
    to_terminal.setFormatter(logging.Formatter("%(message)s") if log_file else timed)
    handlers: list[logging.Handler] = [to_terminal]
    if log_file:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(log_file, encoding="utf-8"))
        handlers[1].setFormatter(timed)
    loggers = [logging.getLogger(name) for name in ("launch", "megatron_dapo.servers")]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        for handler in handlers:
            logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            for handler in handlers:
                logger.removeHandler(handler)
        for handler in handlers[1:]:
            handler.close()
