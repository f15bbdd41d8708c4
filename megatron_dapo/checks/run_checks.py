"""Checks before the start: keys against each other, the model, this machine. One joint error."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_dapo.checks.config_checks import CHECKS, SHARED_CHECKS
from megatron_dapo.checks.critic_checks import CRITIC_CHECKS, own_model
from megatron_dapo.checks.fp8_server_checks import fp8_servers
from megatron_dapo.checks.known_mistakes import Check, known_mistakes
from megatron_dapo.checks.machine_checks import EVALUATION_CHECKS, MACHINE_CHECKS
from megatron_dapo.checks.model_checks import MODEL_CHECKS, positions, read_model_json, read_model_specs, servers
from megatron_dapo.checks.sft_checks import SFT_CHECKS, is_read
from megatron_dapo.checks.unused_keys import unused_keys
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.derived import world_size
from megatron_dapo.config.keys import known_keys
from megatron_dapo.config.loader import read_config
from megatron_dapo.config.schema.base import Refused
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.recompute import settled


def validate(
    config: Config, model_json: dict[str, Any] | None, check_files: bool = True, num_processes: int | None = None
) -> None:
    """Raise UserError with a sentence for every mistake.

    model_json: the model's config.json; without it its checks are left out.
    check_files: demand the run's files and packages; a recipe may leave them open.
    num_processes: trainer ranks started by the launcher, if any.
    """
    _raise(_mistakes(config, model_json, check_files, num_processes))


def load_and_validate(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    check_files: bool = True,
    num_processes: int | None = None,
    model_json: dict[str, Any] | None = None,
) -> Config:
    """Return the checked config of a file and its overrides; `auto` is settled if the model is
    here.

    model_json: config.json of another model than the config's; `auto` then stays as it is.
    Raises UserError with every mistake: unknown keys, refused values, and known values in conflict
    with each other or this machine.
    """
    reading = read_config(path, overrides)
    config = reading.known
    mistakes = _mistakes(config, model_json or _model_json(config), check_files, num_processes, reading.overridden)
    _raise(reading.with_mistakes(mistakes))
    specs = None if model_json else read_model_specs(reading.config)
    return settled(reading.config, *specs) if specs else reading.config


def load_for_evaluation(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Return the config of an evaluation, with only its own keys checked. Raises UserError with
    every mistake."""
    reading = read_config(path, overrides)
    mistakes = [*known_mistakes(EVALUATION_CHECKS, reading.known)]
    model_json = _model_json(reading.known)
    if model_json is not None:
        mistakes += known_mistakes((positions, servers), reading.known, model_json)
    _raise(reading.with_mistakes(mistakes))
    return reading.config


def _raise(mistakes: Iterable[str]) -> None:
    if sentences := list(mistakes):
        raise UserError(sentences)


def _model_json(config: Config) -> dict[str, Any] | None:
    """Return config.json of the actor; None if it is unreadable, or its path was refused."""
    with suppress(Refused):
        return read_model_json(config)
    return None


def _mistakes(
    config: Config,
    model_json: dict[str, Any] | None,
    check_files: bool,
    num_processes: int | None,
    overridden: frozenset[str] = frozenset(),
) -> Iterator[str]:
    """Yield the mistakes of a config. overridden: keys from the command line."""
    yield from _mistakes_of_kind(config, overridden)
    if model_json is not None:
        yield from known_mistakes((*MODEL_CHECKS, own_model, fp8_servers), config, model_json)
    if check_files:
        yield from known_mistakes(MACHINE_CHECKS, config)
    yield from known_mistakes([_processes], config, num_processes)


def _mistakes_of_kind(config: Config, overridden: frozenset[str]) -> Iterator[str]:
    """Yield the mistakes of reinforcement learning or of fine-tuning; with the kind unknown, the
    common ones."""
    checks: tuple[Check, ...] = SHARED_CHECKS
    keys = [key for key in known_keys().values() if is_read(key.name)]
    with suppress(Refused):
        if config.sft.enable:
            checks = SFT_CHECKS
        else:
            checks = (*CHECKS, *CRITIC_CHECKS)
            keys = list(known_keys().values())
    yield from unused_keys(config, keys, overridden)
    yield from known_mistakes(checks, config)


def _processes(config: Config, num_processes: int | None) -> Iterator[str]:
    if num_processes is not None and num_processes != world_size(config):
        trainer, ending = config.trainer, "" if num_processes == 1 else "es"
        yield (
            f"The launcher started {num_processes} process{ending}, but trainer.nnodes {trainer.nnodes} x "
            f"trainer.n_procs_per_node {trainer.n_procs_per_node} is {world_size(config)}; make them agree."
        )
