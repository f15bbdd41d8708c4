"""Searches the fastest layouts and splits of a config's GPUs that fit into memory: several nodes,
one node, or one GPU."""

import heapq
import itertools
import math
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.commands.plan.fitting import (
    NODES_PER_SERVER,
    NUM_SERVERS,
    OVER_NODES,
    SERVER,
    SERVER_TP,
    changed_overrides,
    cuts_server,
    layout_keys,
    mini_batches,
)
from megatron_dapo.commands.plan.shortage import ADAPTER_RANK, OFFLOAD, takes_offload
from megatron_dapo.commands.plan.simulated_server import Machines
from megatron_dapo.commands.plan.simulation import Recipe, Speed
from megatron_dapo.commands.plan.step_time import (
    Assumptions,
    PhaseTimes,
    Simulate,
    StepTime,
    phase_times,
    server_of,
    simulated,
    slots_in_cache,
    step_recipe,
    step_time,
)
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.sizes import GB, ceil_div
from megatron_dapo.config.derived import (
    gen_batch_size,
    parallel_sizes,
    shares_gpus,
    starts_servers,
    uses_critic,
    uses_servers,
    world_size,
)
from megatron_dapo.config.key_names import LORA_RANK, MEGATRON, ROLLOUT
from megatron_dapo.config.keys import with_keys
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.lengths import Lengths
from megatron_dapo.estimates.memory import trainer_memory
from megatron_dapo.estimates.recompute import NOTHING, least_that_fits
from megatron_dapo.estimates.server_memory import push_memory, server_memory
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.spec_reader import model_spec

NUM_SHOWN = 10
NUM_OTHERS = 2  # of those that train adapters in place of weights, or the reverse
SIZES = (1, 2, 4, 8)
LAYOUTS_PER_SPLIT = 2  # the fastest ones; a slower layout of the same GPUs is of no use
SERVERS_PER_SPLIT = 2  # those with most tokens per second; fewer, larger ones end a step's tail earlier
_CHANCE = 1.1  # bound of a step over a simulated one of few requests, at most
SHARED = "actor_rollout_ref.hybrid_engine"
CONCURRENCY = f"{ROLLOUT}.max_concurrency"


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

    @cached_property
    def actor(self) -> ModelSpec:
        """Return the actor's spec."""
        return model_spec(self.model_json)

    @cached_property
    def simulate(self) -> Simulate:
        """Return a simulation of half of the plan's requests, and in flight of no more than with
        K = 2. It does not repeat itself: with K = 0 all layouts wait alike, with K above 0 those as
        fast to one in a hundred."""
        speeds: dict[Any, list[tuple[float, Speed]]] = defaultdict(list)

        def simulate(machines: Machines, recipe: Recipe, responses: Lengths, acceptance: float) -> Speed:
            train_s = machines.train_s
            known = speeds[replace(machines, train_s=0.0), recipe, responses, acceptance]
            near = (speed for other_s, speed in known if math.isclose(other_s, train_s, rel_tol=0.01))
            if (speed := next(near, None)) is None:
                part = min(0.5, 1.5 / (recipe.max_staleness + 1))
                speed = simulated(machines, recipe, responses, acceptance, part_of_requests=part)
                known.append((train_s, speed))
            return speed

        return simulate

    @cached_property
    def as_read(self) -> Config:
        """Return its config as the user wrote it: `auto` is not settled."""
        return load_config(self.path, self.overrides)

    def accepts(self, keys: Mapping[str, Any]) -> bool:
        """Return whether a run would accept these values: sizes that divide each other, rules of
        the keys."""
        try:
            load_and_validate(
                self.path,
                [*self.overrides, *changed_overrides(self.as_read, keys)],
                check_files=False,
                model_json=self.model_json,
            )
        except UserError:
            return False
        return True


def search(
    source: ConfigSource,
    config: Config,
    assumed: Assumptions,
    staleness: Sequence[int],
    kind: Mapping[str, Any] | None = None,
    number: int | None = None,
) -> list[tuple[Candidate, StepTime]]:
    """Return the fastest candidates that a run would accept, the fastest first; at most `number`.

    Exact among the candidates: they are simulated in the order of a lower bound of their step. The
    search goes on until none of the rest can be faster than the last one shown, at the largest
    chance of a simulation. A smaller K above 0 is taken to be no faster. kind: keys of all
    candidates. number: None: NUM_SHOWN.
    """
    number = number or NUM_SHOWN
    every = enumerate(candidates(source, config, assumed, staleness, kind))
    waiting = [(each.bound_s, -each.max_staleness, position, each) for position, each in every]
    heapq.heapify(waiting)
    best: list[tuple[Candidate, StepTime]] = []
    with_larger_k: dict[int, float] = {}  # of the same layout and split: seconds of a step
    while waiting:
        bound_s, larger_first, position, candidate = heapq.heappop(waiting)
        if len(best) == number and bound_s >= _CHANCE * best[-1][1].step:
            break
        parts, age = candidate.parts, candidate.max_staleness
        if age and (least_s := with_larger_k.get(id(parts), 0.0)) > bound_s:
            heapq.heappush(waiting, (least_s, larger_first, position, candidate))
            continue
        recipe = step_recipe(candidate.config, age, assumed.rows)
        time = step_time(parts, recipe, assumed.responses, assumed.acceptance, source.simulate)
        with_larger_k[id(parts)] = time.step
        best = sorted([*best, (candidate, time)], key=lambda pair: pair[1].step)[:number]
    return best


def candidates(
    source: ConfigSource,
    config: Config,
    assumed: Assumptions,
    staleness: Sequence[int],
    kind: Mapping[str, Any] | None = None,
) -> Iterator[Candidate]:
    """Yield layouts and splits that fit into memory: for each division of the GPUs the fastest
    layouts, the fastest servers, and each K."""
    kind = dict(kind or {})
    apart = kind | {SHARED: False}
    ages = [age for age in staleness if source.accepts(apart | _staleness_keys(config, age))]
    for place, num_server_gpus in _places(with_keys(config, kind)):
        place = kind | place | _staleness_keys(config, 0)
        servers = _fastest_servers(with_keys(config, place), num_server_gpus, source, assumed, max(staleness))
        if not servers:
            continue
        first = with_keys(config, place | servers[0])
        layouts = sorted(_layouts(source, first, assumed), key=lambda layout: layout[0])
        accepted = (layout for _, layout in layouts if source.accepts(place | servers[0] | layout))
        for layout, of_servers in itertools.product(itertools.islice(accepted, LAYOUTS_PER_SPLIT), servers):
            keys = place | of_servers | layout
            changed = with_keys(config, keys)
            parts = phase_times(changed, source.actor, assumed, source.critic)
            for age in ages if not place[SHARED] else [age for age in ages if not age]:
                keys_of_age = keys | _staleness_keys(config, age)
                yield Candidate(keys_of_age, changed, parts, age, _bound(changed, parts, assumed, age))


def _places(config: Config) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the divisions of a config's GPUs between trainer and servers: (keys, GPUs of the
    servers). Several nodes are divided by whole ones, one node by its GPUs; or all are shared."""
    nodes = config.trainer.nnodes + config.actor_rollout_ref.rollout.server.nnodes
    num_gpus = gpus_of(config)
    per_node = num_gpus // nodes
    keys = ("trainer.nnodes", "trainer.n_procs_per_node", f"{SERVER}.nnodes")

    def place(*values: int, shared: bool = False) -> dict[str, Any]:
        return {SHARED: shared, **dict(zip(keys, values, strict=True))}

    yield place(nodes, per_node, 0, shared=True), num_gpus
    if nodes == 1:
        yield from ((place(1, number, 0), num_gpus - number) for number in range(1, num_gpus))
    else:
        yield from ((place(n, per_node, nodes - n), (nodes - n) * per_node) for n in range(1, nodes))


def gpus_of(config: Config) -> int:
    """Return the GPUs of trainer and servers together."""
    server, per_node = config.actor_rollout_ref.rollout.server, config.trainer.n_procs_per_node
    if server.nnodes or shares_gpus(config):
        return (config.trainer.nnodes + server.nnodes) * per_node
    return world_size(config) + server.num_servers * server.tensor_model_parallel_size


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
    num_responses = (
        step_recipe(config, max_staleness, assumed.rows).n * config.data.train_batch_size / assumed.acceptance
    )
    writing = num_responses * assumed.responses.mean / (parts.num_servers * parts.server.tokens_per_s)
    still = parts.push + parts.moving
    training = parts.train_s + still
    return max(training, writing + still) if max_staleness else training + writing


def _fastest_servers(
    config: Config, num_gpus: int, source: ConfigSource, assumed: Assumptions, oldest: int
) -> list[dict[str, Any]]:
    """Return the keys of the servers with the most tokens per second in total, the fastest first;
    none if none fits. Each takes as many requests as its cache holds, and a step may have. Servers
    over several nodes are for models that no server within a node holds."""
    spec, rollout = source.actor, config.actor_rollout_ref.rollout
    longest = config.data.max_prompt_length + config.data.max_response_length
    most = max(gen_batch_size(config), (oldest + 1) * config.data.train_batch_size) * rollout.n
    for nodes in OVER_NODES:
        rates: list[tuple[float, dict[str, Any]]] = []
        for tp in _server_sizes(config, spec, num_gpus, nodes):
            num_servers = num_gpus // tp
            keys: dict[str, Any] = {NUM_SERVERS: num_servers, SERVER_TP: tp, NODES_PER_SERVER: nodes}
            changed = with_keys(config, keys)
            if not server_memory(changed, spec, source.critic).holds(longest):
                continue
            keys[CONCURRENCY] = max(min(slots_in_cache(changed, spec, assumed), ceil_div(most, num_servers)), 1)
            rates.append((num_servers * server_of(with_keys(changed, keys), spec, assumed).tokens_per_s, keys))
        if rates:
            rates.sort(key=lambda rate: -rate[0])
            return [keys for _, keys in rates[:SERVERS_PER_SPLIT]]
    return []


def _server_sizes(config: Config, spec: ModelSpec, num_gpus: int, nodes: int) -> list[int]:
    """Return the tensor-parallel sizes that divide the GPUs of a node, or of so many whole nodes of
    the servers' own."""
    num_nodes = config.trainer.nnodes if shares_gpus(config) else config.actor_rollout_ref.rollout.server.nnodes
    per_node = num_gpus // max(num_nodes, 1)
    if nodes == 1:
        return [tp for tp in SIZES if per_node % tp == 0 and cuts_server(config, spec, tp)]
    has_nodes = not shares_gpus(config) and num_nodes and num_nodes % nodes == 0
    return [nodes * per_node] if has_nodes and cuts_server(config, spec, nodes * per_node) else []


def _layouts(source: ConfigSource, config: Config, assumed: Assumptions) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield layouts of the trainer that fit with its critic, and their seconds from batch to push.

    Each has the least recomputation that fits; where some is needed, Adam on the host is tried,
    too.
    """
    specs = [source.actor] if source.critic is None else [source.actor, source.critic]
    num_gpus = world_size(config)
    for tp, pp, cp in itertools.product(SIZES, SIZES, SIZES):
        if num_gpus % (tp * pp * cp) or tp > config.trainer.n_procs_per_node:
            continue
        if not all(_divides(spec, tp, pp, cp) for spec in specs):
            continue
        if any(samples % (num_gpus // (tp * pp * cp)) for samples in mini_batches(config)):
            continue
        megatron = config.actor_rollout_ref.actor.megatron
        ep = math.gcd(megatron.expert_model_parallel_size, num_gpus // pp)
        if num_gpus // pp % (ep * megatron.expert_tensor_parallel_size):
            continue
        keys = {**layout_keys(tp, pp, ep), f"{MEGATRON}.context_parallel_size": cp}
        for offloaded in (0.0, 1.0) if takes_offload(source.actor) else (0.0,):
            tried = keys | {OFFLOAD: offloaded}
            recompute = least_that_fits(with_keys(config, tried), source.actor, source.critic)
            if recompute is None:
                continue
            tried |= {f"{MEGATRON}.{name}": value for name, value in recompute.items()}
            changed = with_keys(config, tried)
            if not shares_gpus(config) or _can_push(changed, source):
                parts = phase_times(changed, source.actor, assumed, source.critic)
                yield parts.train_s + parts.moving, tried
            if recompute == NOTHING:
                break


def _can_push(config: Config, source: ConfigSource) -> bool:
    return push_memory(config, source.actor, source.critic) <= config.trainer.gpu_memory_gb * GB


def _divides(spec: ModelSpec, tp: int, pp: int, cp: int) -> bool:
    if spec.delta_net is not None and (cp > 1 or spec.delta_net.num_key_heads % tp):  # CP: on CPUs alone
        return False
    return pp <= spec.num_layers and not (spec.num_heads % tp or spec.num_kv_heads % tp)


def search_report(source: ConfigSource, config: Config, assumed: Assumptions, staleness: Sequence[int]) -> str:
    """Return the best candidates as a table, and each as keys to paste. Raises UserError if there
    is nothing to divide."""
    why = None
    if not uses_servers(config):
        why = "the run uses no servers; leave it out"
    elif not starts_servers(config):
        why = f"{ROLLOUT}.server_urls or server_urls_file names running servers; leave one of both out"
    elif config.trainer.nnodes > 1 and not (config.actor_rollout_ref.rollout.server.nnodes or shares_gpus(config)):
        why = f"{SERVER}.nnodes is 0; set it to the number of server nodes, or {SHARED} to true"
    if why is not None:
        raise UserError(f"--search divides GPUs between trainer and servers, but {why}.")
    best = search(source, config, assumed, staleness)
    other = {LORA_RANK: 0 if config.actor_rollout_ref.model.lora_rank else ADAPTER_RANK}
    others = [] if uses_critic(config) else search(source, config, assumed, staleness, other, NUM_OTHERS)
    if not best + others:
        return "No layout of these GPUs fits into their memory."
    lines = [f"The fastest of {gpus_of(config)} GPUs, within memory", _HEAD]
    lines += [_line(number, pair, source) for number, pair in enumerate(best, start=1)]
    if others:
        what = f"of adapters of rank {ADAPTER_RANK}" if other[LORA_RANK] else "of all weights in place of adapters"
        lines += [f"Training {what}, which learns otherwise ({LORA_RANK}={other[LORA_RANK]})"]
        lines += [_line(number, pair, source) for number, pair in enumerate(others, start=len(best) + 1)]
    commands = []
    for number, (candidate, _) in enumerate([*best, *others], start=1):
        words = [f"--config={source.path}", *source.overrides, *changed_overrides(source.as_read, candidate.keys)]
        commands.append(f"{number}: python -m megatron_dapo train --dry-run {shlex.join(words)}")
    note = "As commands; the same key=value follow `sbatch slurm/...` or `python -m launch.local`:"
    return "\n".join([*lines, "", note, *commands])


_HEAD = (
    "  no    K  GPUs train:sample  TP  PP  CP  EP  recompute  Adam on host  servers x slots    GB      step"
    "  trainer idle  servers idle"
)


def _recomputed(keys: dict[str, Any]) -> str:
    """Return the recomputation in at most 9 letters: none, mlp, 12 layers, all."""
    granularity = keys[f"{MEGATRON}.recompute_granularity"]
    if granularity != "full":
        return {"none": "none", "selective": "mlp"}[granularity]
    is_all = keys[f"{MEGATRON}.recompute_method"] == "uniform"
    return "all" if is_all else f"{keys[f'{MEGATRON}.recompute_num_layers']} layers"


def _line(number: int, pair: tuple[Candidate, StepTime], source: ConfigSource) -> str:
    candidate, time = pair
    keys, config = candidate.keys, candidate.config
    sizes = parallel_sizes(config)
    num_bytes = trainer_memory(config, source.actor, source.critic).total
    tp = keys[SERVER_TP]
    sampling = keys[NUM_SERVERS] * tp
    gpus = f"{sizes.world} in turns" if keys[SHARED] else f"{sizes.world}:{sampling}"
    servers = f"{keys[NUM_SERVERS]}xTP{tp} x {candidate.parts.server.slots}"
    return (
        f"  {number:>2}  {candidate.max_staleness:>3}  {gpus:>17}  {sizes.tp:>2}  {sizes.pp:>2}  {sizes.cp:>2}"
        f"  {sizes.ep:>2}  {_recomputed(keys):>9}  {keys[OFFLOAD]:>12.0%}"
        f"  {servers:>15}  {num_bytes / GB:>4.0f}  {time.step:>6.0f} s  {time.trainer_idle:>12.0%}"
        f"  {max(time.servers_idle, 0.0):>12.0%}"
    )
