"""Searches the fastest layouts and splits of a config's nodes that fit into memory."""

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.commands.plan.step_time import (
    Assumptions,
    PhaseTimes,
    StepTime,
    phase_times,
    server_of,
    step_recipe,
    step_time,
)
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.sizes import GB
from megatron_dapo.config.derived import uses_servers
from megatron_dapo.config.key_names import MEGATRON, ROLLOUT
from megatron_dapo.config.keys import with_keys
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.memory import server_memory, trainer_memory
from megatron_dapo.estimates.recompute import least_that_fits
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.spec_reader import model_spec

NUM_SHOWN = 10
SIZES = (1, 2, 4, 8)
LAYOUTS_PER_SPLIT = 2  # the fastest ones; a slower layout of the same nodes is of no use
SERVER = f"{ROLLOUT}.server"


@dataclass(frozen=True)
class Candidate:
    """A layout and split."""

    keys: dict[str, Any]
    """Its changes to the config."""
    config: Config
    parts: PhaseTimes
    max_staleness: int
    bound_s: float
    """A lower bound of its step."""


@dataclass(frozen=True)
class ConfigSource:
    """The source of a config, for checks of other values, and its models."""

    path: Path
    overrides: tuple[str, ...]
    model_json: dict[str, Any]
    critic: ModelSpec | None = None
    """Its spec, if its size differs from the actor's."""

    @property
    def actor(self) -> ModelSpec:
        """Return the actor's spec."""
        return model_spec(self.model_json)

    def accepts(self, config: Config, keys: Mapping[str, Any]) -> bool:
        """Return whether a run would accept these values: sizes that divide each other, rules of
        the keys."""
        try:
            load_and_validate(
                self.path,
                [*self.overrides, *changed_overrides(config, keys)],
                check_files=False,
                model_json=self.model_json,
            )
        except UserError:
            return False
        return True


def search(
    source: ConfigSource, config: Config, assumed: Assumptions, staleness: Sequence[int]
) -> list[tuple[Candidate, StepTime]]:
    """Return the fastest candidates that a run would accept, the fastest first; at most NUM_SHOWN.

    Exact among the candidates: they are simulated in the order of a lower bound of their step. The
    search goes on until none of the rest can be faster than the last one shown.
    """
    ordered = sorted(candidates(source, config, assumed, staleness), key=lambda candidate: candidate.bound_s)
    best: list[tuple[Candidate, StepTime]] = []
    for candidate in ordered:
        if len(best) == NUM_SHOWN and candidate.bound_s >= best[-1][1].step:
            break
        recipe = step_recipe(candidate.config, candidate.max_staleness)
        time = step_time(candidate.parts, recipe, assumed.responses, assumed.acceptance)
        best = sorted([*best, (candidate, time)], key=lambda pair: pair[1].step)[:NUM_SHOWN]
    return best


def candidates(
    source: ConfigSource, config: Config, assumed: Assumptions, staleness: Sequence[int]
) -> Iterator[Candidate]:
    """Yield layouts and splits that fit into memory: for each number of trainer nodes the fastest
    layouts, the fastest servers, and each K."""
    num_nodes = config.trainer.nnodes + config.actor_rollout_ref.rollout.server.nnodes
    for nodes in range(1, num_nodes):
        split = {"trainer.nnodes": nodes, f"{SERVER}.nnodes": num_nodes - nodes}
        servers = _fastest_servers(with_keys(config, split), source.actor, assumed)
        if servers is None:
            continue
        layouts = sorted(_layouts(source, with_keys(config, split | servers), assumed), key=lambda layout: layout[0])
        accepted = (keys for _, layout in layouts if source.accepts(config, keys := split | servers | layout))
        for keys in itertools.islice(accepted, LAYOUTS_PER_SPLIT):
            changed = with_keys(config, keys)
            parts = phase_times(changed, source.actor, assumed, source.critic)
            for age in staleness:
                keys_of_age = keys | _staleness_keys(config, age)
                if source.accepts(config, keys_of_age):
                    yield Candidate(keys_of_age, changed, parts, age, _bound(changed, parts, assumed, age))


def _staleness_keys(config: Config, max_staleness: int) -> dict[str, Any]:
    keys: dict[str, Any] = {f"{ROLLOUT}.max_staleness": max_staleness}
    correction = config.algorithm.rollout_correction
    if max_staleness and correction.rollout_is == correction.rollout_rs == "none" and not correction.bypass_mode:
        # older tokens are not trained on without
        keys["algorithm.rollout_correction.rollout_is"] = "token"
    return keys


def _bound(config: Config, parts: PhaseTimes, assumed: Assumptions, max_staleness: int) -> float:
    """Return a lower bound of a step's seconds: of the trainer, and of servers with all slots in
    use; their sum if they take turns."""
    num_responses = config.data.train_batch_size * config.actor_rollout_ref.rollout.n / assumed.acceptance
    writing = num_responses * assumed.responses.mean / (parts.num_servers * parts.server.tokens_per_s)
    training = parts.train_s + parts.push
    return max(training, writing + parts.push) if max_staleness else training + writing


def _fastest_servers(config: Config, spec: ModelSpec, assumed: Assumptions) -> dict[str, Any] | None:
    """Return the keys of the servers with the most tokens per second in total, or None if none
    fits."""
    num_gpus = config.trainer.n_procs_per_node
    longest = config.data.max_prompt_length + config.data.max_response_length
    rates: list[tuple[float, dict[str, Any]]] = []
    for tp in SIZES:
        if num_gpus % tp or spec.num_heads % tp or (spec.moe and spec.ffn_size % tp):
            continue
        num_servers = config.actor_rollout_ref.rollout.server.nnodes * num_gpus // tp
        keys = {f"{SERVER}.num_servers": num_servers, f"{SERVER}.tensor_model_parallel_size": tp}
        changed = with_keys(config, keys)
        if server_memory(changed, spec).num_tokens >= longest:
            rates.append((num_servers * server_of(changed, spec, assumed).tokens_per_s, keys))
    return max(rates, key=lambda rate: rate[0])[1] if rates else None


def _layouts(source: ConfigSource, config: Config, assumed: Assumptions) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield layouts of the trainer that fit with its critic, and their seconds from batch to push.

    Each has the least recomputation that fits.
    """
    specs = [source.actor] if source.critic is None else [source.actor, source.critic]
    num_gpus = config.trainer.nnodes * config.trainer.n_procs_per_node
    for tp, pp, cp in itertools.product(SIZES, SIZES, SIZES):
        if num_gpus % (tp * pp * cp) or tp > config.trainer.n_procs_per_node:
            continue
        if not all(_divides(spec, tp, pp) for spec in specs):
            continue
        megatron = config.actor_rollout_ref.actor.megatron
        if num_gpus // pp % (megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size):
            continue
        keys = {
            f"{MEGATRON}.tensor_model_parallel_size": tp,
            f"{MEGATRON}.pipeline_model_parallel_size": pp,
            f"{MEGATRON}.virtual_pipeline_model_parallel_size": None,
            f"{MEGATRON}.pipeline_layers": None,
            f"{MEGATRON}.context_parallel_size": cp,
            f"{MEGATRON}.sequence_parallel": tp > 1,
        }
        recompute = least_that_fits(with_keys(config, keys), source.actor, source.critic)
        if recompute is not None:
            keys |= {f"{MEGATRON}.{name}": value for name, value in recompute.items()}
            yield phase_times(with_keys(config, keys), source.actor, assumed, source.critic).train_s, keys


def _divides(spec: ModelSpec, tp: int, pp: int) -> bool:
    return pp <= spec.num_layers and not (spec.num_heads % tp or spec.num_kv_heads % tp)


def changed_overrides(config: Config, keys: Mapping[str, Any]) -> list[str]:
    """Return the keys with other values than a config's, in the form of a command line."""
    return [f"{key}={_as_text(value)}" for key, value in keys.items() if _value_of(config, key) != value]


def _value_of(config: Config, key: str) -> object:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _as_text(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(value)}]" if isinstance(value, list) else str(value)


def search_report(source: ConfigSource, config: Config, assumed: Assumptions, staleness: Sequence[int]) -> str:
    """Return the best candidates as a table, and each as keys to paste. Raises UserError if there
    is nothing to divide."""
    server = config.actor_rollout_ref.rollout.server
    if not uses_servers(config):
        raise UserError(
            "--search divides nodes between trainer and servers, but the run uses no servers; leave it out."
        )
    if not server.nnodes:
        raise UserError(
            "--search divides nodes between trainer and servers, but actor_rollout_ref.rollout.server.nnodes is 0; set "
            "it to the number of server nodes."
        )
    best = search(source, config, assumed, staleness)
    if not best:
        return "No layout of these nodes fits into the memory of their GPUs."
    num_gpus = (config.trainer.nnodes + server.nnodes) * config.trainer.n_procs_per_node
    lines = [
        f"The fastest of {num_gpus} GPUs, within memory",
        "  no    K  nodes train:sample  TP  PP  CP  recompute  servers    GB      step  trainer idle  servers idle",
    ]
    commands = []
    for number, (candidate, time) in enumerate(best, start=1):
        memory = trainer_memory(candidate.config, source.actor, source.critic)
        lines.append(_line(number, candidate, time, memory.total))
        words = [f"--config={source.path}", *source.overrides, *changed_overrides(config, candidate.keys)]
        commands.append(f"{number}: python -m megatron_dapo train --dry-run {shlex.join(words)}")
    note = "As commands; the same key=value follow `sbatch slurm/...` or `python -m launch.local`:"
    return "\n".join([*lines, "", note, *commands])


def _recomputed(keys: dict[str, Any]) -> str:
    """Return the recomputation in at most 9 letters: none, mlp, 12 layers, all."""
    granularity = keys[f"{MEGATRON}.recompute_granularity"]
    if granularity != "full":
        return {"none": "none", "selective": "mlp"}[granularity]
    is_all = keys[f"{MEGATRON}.recompute_method"] == "uniform"
    return "all" if is_all else f"{keys[f'{MEGATRON}.recompute_num_layers']} layers"


def _line(number: int, candidate: Candidate, time: StepTime, num_bytes: int) -> str:
    keys = candidate.keys
    nodes = f"{keys['trainer.nnodes']}:{keys[f'{SERVER}.nnodes']}"
    servers = f"{keys[f'{SERVER}.num_servers']}xTP{keys[f'{SERVER}.tensor_model_parallel_size']}"
    return (
        f"  {number:>2}  {candidate.max_staleness:>3}  {nodes:>18}  {keys[f'{MEGATRON}.tensor_model_parallel_size']:>2}"
        f"  {keys[f'{MEGATRON}.pipeline_model_parallel_size']:>2}  {keys[f'{MEGATRON}.context_parallel_size']:>2}"
        f"  {_recomputed(keys):>9}"
        f"  {servers:>7}  {num_bytes / GB:>4.0f}  {time.step:>6.0f} s  {time.trainer_idle:>12.0%}"
        f"  {max(time.servers_idle, 0.0):>12.0%}"
    )
