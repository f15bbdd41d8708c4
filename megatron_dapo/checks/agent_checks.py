"""Checks of an agent's keys: its program, gateways and limits, and the techniques beside it."""

import shutil
from collections.abc import Iterator
from functools import partial
from urllib.parse import urlsplit

from megatron_dapo.checks.known_mistakes import Check, known_mistakes
from megatron_dapo.checks.rollout_checks import secret_names, turn_length
from megatron_dapo.common.addresses import is_loopback
from megatron_dapo.common.import_path import fault_without_import
from megatron_dapo.config.built_ins import IMPORT_PATH, estimators_with
from megatron_dapo.config.derived import is_base_url, is_server_url, uses_experience_replay
from megatron_dapo.config.key_names import AGENT, ESTIMATOR, MULTI_TURN, REPLAY, ROLLOUT
from megatron_dapo.config.schema.config import Config

_LAST_PORT = 65535


def _while_enabled(*checks: Check) -> Check:
    def mistakes(config: Config) -> Iterator[str]:
        if config.actor_rollout_ref.rollout.agent.enable:
            yield from known_mistakes(checks, config)

    return mistakes


def _program(config: Config) -> Iterator[str]:
    keys = config.actor_rollout_ref.rollout.agent
    if bool(keys.function) == bool(keys.command):
        yield f"Of {AGENT}.function and command {'both are' if keys.function else 'none is'} given; give one of them."


def _key_in_argv(config: Config) -> Iterator[str]:
    if any("{key}" in word for word in config.actor_rollout_ref.rollout.agent.command):
        yield f"{AGENT}.command has {{key}}, but others can read arguments; leave it out: OPENAI_API_KEY is set to it."


def _import_paths(config: Config) -> Iterator[str]:
    for name, path in _given_paths(config).items():
        if not IMPORT_PATH.fullmatch(path):
            yield f"{AGENT}.{name} is {path!r}, but must be of the form package.module:name; correct it."


def _given_paths(config: Config) -> dict[str, str]:
    """Return the keys with an import path. A parser's may be a name of SGLang's, without a colon."""
    keys = config.actor_rollout_ref.rollout.agent
    named = {name: path for name in ("tool_parser", "reasoning_parser") if ":" in (path := getattr(keys, name) or "")}
    return {name: path for name in ("function", "credit") if (path := getattr(keys, name))} | named


def _beside_multi_turn(config: Config) -> Iterator[str]:
    if config.actor_rollout_ref.rollout.multi_turn.enable:
        yield f"{AGENT}.enable and {MULTI_TURN}.enable are both true, but a trajectory has one of both; leave one out."


def _public_url(config: Config) -> Iterator[str]:
    keys = config.actor_rollout_ref.rollout.agent
    if keys.public_url is not None and not is_base_url(keys.public_url):
        yield f"{AGENT}.public_url is {keys.public_url!r}, but must be of the form https://host:port; correct it."
    if keys.public_url is not None and keys.num_gateways > 1:
        yield (
            f"{AGENT}.num_gateways is {keys.num_gateways}, but {AGENT}.public_url leads to one gateway, and a "
            f"trajectory knows only its own; set num_gateways to 1, or public_url to null."
        )


def _ports(config: Config) -> Iterator[str]:
    keys = config.actor_rollout_ref.rollout.agent
    if keys.port is None:
        return
    last = keys.port + keys.num_gateways - 1
    if last > _LAST_PORT:
        yield (
            f"{AGENT}.port is {keys.port}, but {AGENT}.num_gateways {keys.num_gateways} would take ports up to {last}, "
            f"above {_LAST_PORT}; lower one of them."
        )
    for url in filter(is_server_url, config.actor_rollout_ref.rollout.server_urls):
        parts = urlsplit(url)
        if is_loopback(parts.hostname or "") and keys.port <= (parts.port or 0) <= last:
            yield (
                f"{AGENT}.port {keys.port} and {AGENT}.num_gateways {keys.num_gateways} take port {parts.port}, which "
                f"is that of the server {url} in {ROLLOUT}.server_urls; choose another port."
            )


def _timeout(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    longest = rollout.agent.timeout_s + rollout.agent.end_timeout_s
    if longest > rollout.step_timeout_s:
        yield (
            f"{AGENT}.timeout_s and end_timeout_s are together {longest:g}, longer than the whole step's "
            f"{ROLLOUT}.step_timeout_s {rollout.step_timeout_s:g}; lower the first or raise the last."
        )


def _estimator(config: Config) -> Iterator[str]:
    name = config.algorithm.adv_estimator
    if name in estimators_with(per_token=True):
        others = ", ".join(estimators_with(per_token=False))
        yield (
            f"{ESTIMATOR} is {name}, which goes from token to token of one row, but with {AGENT}.enable a trajectory "
            f"may have several rows; choose one of {others}."
        )


def _experience_replay(config: Config) -> Iterator[str]:
    if uses_experience_replay(config):
        yield f"{REPLAY}.enable is true, but replays one row per response; with {AGENT}.enable set it to false."


def _own_code(config: Config) -> Iterator[str]:
    for name, path in _given_paths(config).items():
        if IMPORT_PATH.fullmatch(path) and (fault := fault_without_import(path)):
            yield f"{AGENT}.{name} is {path}, {fault}"


def _command(config: Config) -> Iterator[str]:
    command = config.actor_rollout_ref.rollout.agent.command
    if command and shutil.which(command[0]) is None:
        yield f"{AGENT}.command begins with {command[0]!r}, no program here; give its path, or a name on PATH."


def _sandbox(config: Config) -> Iterator[str]:
    if config.actor_rollout_ref.rollout.agent.sandbox and shutil.which("bwrap") is None:
        yield f"{AGENT}.sandbox is true, but bwrap is not installed here; install it by `make setup-sandbox`."


agent = _while_enabled(
    _program,
    _key_in_argv,
    _import_paths,
    _beside_multi_turn,
    partial(secret_names, AGENT),
    _public_url,
    _ports,
    _timeout,
    partial(turn_length, AGENT),
)
training_with_agent = _while_enabled(_estimator, _experience_replay)
# nothing of the agent's own code and programs runs
agent_on_machine = _while_enabled(_own_code, _command, _sandbox)
