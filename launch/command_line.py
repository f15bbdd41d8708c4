"""What the commands of this folder share: their arguments, the check of the config, and where their log goes."""

import argparse
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_dapo.config import Config, UserError, load_and_validate
from megatron_dapo.config.recipes import add_config_arguments

USER_ERROR_EXIT_CODE = 2
# Ctrl-C, an end that is asked for, a closed terminal, what schedulers send before a time limit
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def parser(program: str, description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=f"python -m {program}",
        usage=f"python -m {program} [options] [key=value ...]",
        description=description,
        epilog="key=value sets any key of the config; docs/config.md lists them all. Exit code 2: mistakes to correct.",
    )
    add_config_arguments(made)
    return made


def parse(made: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Arguments and overrides."""
    arguments, overrides = made.parse_known_args(argv)
    if stray := [text for text in overrides if text.startswith("-")]:
        made.error(f"unknown argument {stray[0]}")
    return arguments, overrides


def checked_config(path: str | None, overrides: list[str], check_files: bool = True) -> Config:
    """Raises UserError with every mistake of the config."""
    return load_and_validate(path, overrides, check_files=check_files)


def require_one_node(config: Config) -> None:
    if config.trainer.nnodes != 1:
        raise UserError(
            f"trainer.nnodes = {config.trainer.nnodes}: this command starts the processes of one machine; "
            "set trainer.nnodes=1, or start the run with a cluster's launcher."
        )


@contextmanager
def show_log(log_file: Path) -> Iterator[None]:
    """While entered, what launch and the supervisor of the servers log goes to standard error and to log_file."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    to_terminal, to_file = logging.StreamHandler(sys.stderr), logging.FileHandler(log_file, encoding="utf-8")
    to_terminal.setFormatter(logging.Formatter("%(message)s"))
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    loggers = [logging.getLogger(name) for name in ("launch", "megatron_dapo.rollout")]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(to_terminal)
        logger.addHandler(to_file)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(to_terminal)
            logger.removeHandler(to_file)
        to_file.close()
