"""The time of a rollout step: the trainer's and the servers' times, combined by the simulation for
each K."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_dapo.commands.plan.server_time import (
    ServerLayout,
    ServerSpeed,
    mean_context,
    push_rate,
    push_s,
    server_speed,
)
from megatron_dapo.commands.plan.simulated_server import Machines
from megatron_dapo.commands.plan.simulation import Recipe, Simulation, Speed, random_draws
from megatron_dapo.commands.plan.training_time import (
    Efficiency,
    TrainingTime,
    trainer_layout,
    training_time,
    training_work,
)
from megatron_dapo.common.sizes import ceil_div
from megatron_dapo.config.derived import (
    critic_batching,
    gen_batch_size,
    machines_per_server,
    needs_old_log_probs,
    needs_reference,
    num_optimizer_steps_per_rollout_step,
    replaces_groups,
    samples_per_rollout_step,
    shares_gpus,
    uses_critic,
    uses_servers,
    world_size,
)
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.lengths import MEAN_SHARE, SPREAD, Lengths
from megatron_dapo.estimates.hardware import Hardware
from megatron_dapo.estimates.server_memory import COPY_RATE, moved_bytes, moving_s, server_memory
from megatron_dapo.estimates.server_states import state_bytes
from megatron_dapo.estimates.server_weights import holds_blocks
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.queue.group_filter import by_correctness

# Of the controller's and the ranks' work per token of a step before they train: 1.56 s for 8192
# answers of 6000 tokens with prompts of 200, at TP 2, DP 2 on two cores
# (benchmarks/results/hand_over_cpu.json). The nodes' network is not in it.
HAND_OVER_S = 0.031e-6
# Of the controller's core per token that servers write, for answers of 6000 tokens from 32 servers
# (benchmarks/results/controller_cpu.json).
CONTROLLER_S = 2.9e-6
# Approximate requests of a simulated step: a larger step is simulated by a part of it with the same
# part of its servers.
SIMULATED_REQUESTS = 3000
MEASURED_STEPS = 6
SEED = 1
PROMPT = 170
"""Default mean tokens of a prompt: DAPO-Math-17k's. Synthetic ones have MEAN_SHARE of the
longest."""
ACCEPTANCE = 0.45
"""Default share of groups with signal, if others are replaced."""


@dataclass(frozen=True)
class Factors:
    """Measured slowness of each part, relative to its estimate. update: also the critic's;
    log_probs: a pass."""

    server: float = 1.0
    update: float = 1.0
    log_probs: float = 1.0
    hand_over: float = 1.0
    push: float = 1.0


@dataclass(frozen=True)
class Assumptions:
    """The inputs of a time plan, besides the config and the model's shape."""

    hardware: Hardware
    responses: Lengths
    prompt: int
    """Mean tokens."""
    acceptance: float
    """Share of groups that carry signal."""
    efficiency: Efficiency = Efficiency()
    server_tokens_per_s: float | None = None
    """Of one server with all slots in use; None: by the roofline."""
    hand_over_s: float = HAND_OVER_S
    """Per token of a step."""
    factors: Factors = Factors()
    """Of an earlier run."""
    rows: float = 1.0
    """Branches of an agent's trajectory; each is planned as a response."""
    tools_s: float = 0.0
    """Seconds of a trajectory outside servers."""

    @classmethod
    def usual(cls, config: Config, hardware: Hardware) -> "Assumptions":
        """Return the default assumptions for a run."""
        longest = config.data.max_response_length
        return cls(
            hardware,
            Lengths.with_mean(MEAN_SHARE * longest, SPREAD, longest),
            _usual_prompt(config),
            ACCEPTANCE if replaces_groups(config) and uses_servers(config) else 1.0,
        )


def _usual_prompt(config: Config) -> int:
    """Return the default mean tokens of a prompt."""
    longest = config.data.max_prompt_length
    return round(
        Lengths.with_mean(MEAN_SHARE * longest, SPREAD, longest).mean
        if config.trainer.synthetic_batch
        else min(PROMPT, longest)
    )


@dataclass(frozen=True)
class PhaseTimes:
    """The phases of a rollout step, trainer and servers separately, before the simulation combines
    them."""

    server: ServerSpeed
    """One of num_servers."""
    num_servers: int
    server_tp: int
    training: TrainingTime
    score: float
    """Old log-probs; in seconds of a rollout step, like the following ones."""
    reference: float
    critic: float
    hand_over: float
    push: float
    prefill_s: float
    """At a push with K above 0 each server prefills its running requests again, unless they keep
    their caches (weight_sync.pause_mode in_place)."""
    moving: float = 0.0
    """On shared GPUs: memory of the trainer to the host and back."""
    tools: float = 0.0
    """Of one trajectory."""
    places: float = 0.0
    """Of all trajectories of a step with agents in `agent.max_open` places, one after the other."""

    @property
    def train_s(self) -> float:
        """Return the seconds from a batch to the push."""
        return self.hand_over + self.score + self.reference + self.critic + self.training.update

    @property
    def controller_share(self) -> float:
        """Return the controller's share of a core while all servers write at full load."""
        return self.num_servers * self.server.tokens_per_s * CONTROLLER_S


@dataclass(frozen=True)
class StepTime:
    """A rollout step at one max_staleness."""

    max_staleness: int
    step: float
    sampling: float
    """Seconds that the trainer waits for the batch."""
    tail: float | None
    """Part of `sampling` with free slots at servers, weighted by their number. None with
    max_staleness above 0: the bound on age then holds slots back."""
    push: float
    """With the prefill of the running requests."""
    trainer_idle: float
    """Share of the time that the trainer waits for a batch."""
    servers_idle: float
    """Share of the servers' slots."""


def phase_times(config: Config, spec: ModelSpec, assumed: Assumptions, critic: ModelSpec | None = None) -> PhaseTimes:
    """Return the phase times of a config's step. critic: its spec, if its size differs."""
    hardware = assumed.hardware
    efficiency = assumed.efficiency
    work = training_work(config, assumed.responses, assumed.prompt, assumed.rows)
    factors = assumed.factors
    training = training_time(spec, trainer_layout(config, spec), work, hardware, efficiency).slower_by(
        factors.update, factors.log_probs
    )
    rate = push_rate(config, hardware, efficiency)
    critic_s = 0.0
    if uses_critic(config):
        critic_spec = (critic or spec).as_critic()
        sizes = critic_batching(config)
        layout = replace(trainer_layout(config, critic_spec), max_tokens=sizes.max_tokens_per_microbatch)
        mini_batches = ceil_div(config.data.train_batch_size, sizes.ppo_mini_batch_size)
        its_work = replace(work, mini_batches=mini_batches, epochs=sizes.ppo_epochs)
        its_time = training_time(critic_spec, layout, its_work, hardware, efficiency).slower_by(
            factors.update, factors.log_probs
        )
        critic_s = its_time.score + its_time.update  # values, and its update
    tp = config.actor_rollout_ref.rollout.server.tensor_model_parallel_size
    speed = server_of(config, spec, assumed)
    context = mean_context(assumed.responses, assumed.prompt)
    pushed_s = push_s(spec, config.weight_sync.bucket_size_mb, rate, in_blocks=holds_blocks(config))
    return PhaseTimes(
        server=speed,
        num_servers=num_servers(config),
        server_tp=tp,
        training=training,
        score=training.score if needs_old_log_probs(config) else 0.0,
        reference=training.score if needs_reference(config) else 0.0,
        critic=critic_s,
        hand_over=work.num_tokens * assumed.hand_over_s * factors.hand_over,
        push=pushed_s * factors.push if uses_servers(config) else 0.0,
        prefill_s=0.0 if config.weight_sync.pause_mode == "in_place" else speed.slots * context * speed.prefill_s,
        moving=2 * moving_s(config, moved_bytes(config, spec, critic), min(COPY_RATE, hardware.host_link_bandwidth))
        if shares_gpus(config)
        else 0.0,
        tools=assumed.tools_s,
        places=_seconds_in_places(config, speed, assumed),
    )


def _seconds_in_places(config: Config, speed: ServerSpeed, assumed: Assumptions) -> float:
    agent = config.actor_rollout_ref.rollout.agent
    if not agent.enable:
        return 0.0
    at_once = min(agent.max_open / max(num_servers(config), 1), speed.slots)
    writing = assumed.rows * assumed.responses.mean * (speed.token_s + at_once * speed.token_s_per_request)
    num_trajectories = samples_per_rollout_step(config) / assumed.acceptance
    return num_trajectories / agent.max_open * (writing + assumed.tools_s)


def num_servers(config: Config) -> int:
    """Return the number of a run's servers, as far as its config says."""
    if not uses_servers(config):
        return 0
    rollout = config.actor_rollout_ref.rollout
    return len(rollout.server_urls) or rollout.server.num_servers


def server_of(config: Config, spec: ModelSpec, assumed: Assumptions) -> ServerSpeed:
    """Return the speed of one of a config's servers. Its slots are limited by the keys and by its
    cache."""
    rollout = config.actor_rollout_ref.rollout
    limits = [rollout.max_concurrency, slots_in_cache(config, spec, assumed)]
    if rollout.server.max_running_requests:
        limits.append(rollout.server.max_running_requests)
    layout = ServerLayout(
        rollout.server.tensor_model_parallel_size,
        max(min(limits), 1),
        machines_per_server(config),
        holds_blocks(config),
        state_bytes(config, spec),
    )
    speed = server_speed(spec, layout, assumed.responses, assumed.prompt, assumed.hardware, assumed.efficiency)
    if assumed.server_tokens_per_s is not None:
        return speed.scaled_to(assumed.server_tokens_per_s)
    return speed.scaled_to(speed.tokens_per_s / assumed.factors.server)


def slots_in_cache(config: Config, spec: ModelSpec, assumed: Assumptions) -> int:
    """Return the requests of mean length that a server's cache holds at once, keys and values, and
    states of delta nets."""
    server = server_memory(config, spec)
    in_cache = int(server.num_tokens / mean_context(assumed.responses, assumed.prompt))
    return in_cache if server.num_requests is None else min(in_cache, server.num_requests)


def step_recipe(config: Config, max_staleness: int, rows: float = 1.0) -> Recipe:
    """Return a config's way to draw prompts and train on them, with as many responses as rows."""
    size = config.data.train_batch_size
    return Recipe(
        train_batch_size=size,
        gen_batch_size=gen_batch_size(config) if replaces_groups(config) else size,
        n=round(config.actor_rollout_ref.rollout.n * rows),
        max_staleness=max_staleness,
        num_steps=MEASURED_STEPS,
        warm_up=max(3, 2 * max_staleness + 1),
    )


Simulate = Callable[[Machines, Recipe, Lengths, float], Speed]
"""As `simulated`."""


def step_time(
    parts: PhaseTimes, recipe: Recipe, responses: Lengths, acceptance: float, simulate: Simulate | None = None
) -> StepTime:
    """Return a step's time by simulation of the program's own queue and admission. simulate: None:
    `simulated`."""
    push = parts.push + (parts.prefill_s if recipe.max_staleness else 0.0)
    still = push + parts.moving  # while no server writes
    machines = machines_of(parts, recipe, still)
    if recipe.max_staleness:
        speed = (simulate or simulated)(machines, recipe, responses, acceptance)
        step = max(1 / speed.steps_per_s, parts.places)
        sampling = step - (1 - speed.wait_share) / speed.steps_per_s
        used = speed.slots_used / speed.steps_per_s / step
    else:  # servers write while the trainer waits, and only then
        speed = (simulate or simulated)(replace(machines, train_s=0.0, push_s=0.0), recipe, responses, acceptance)
        sampling = max(1 / speed.steps_per_s + parts.tools, parts.places)
        step = sampling + parts.train_s + still
        used = speed.slots_used / speed.steps_per_s / step
    return StepTime(
        max_staleness=recipe.max_staleness,
        step=step,
        sampling=sampling,
        tail=None if recipe.max_staleness else (1 - speed.slots_used) * sampling,
        push=push,
        trainer_idle=sampling / step,
        servers_idle=1 - used,
    )


def machines_of(parts: PhaseTimes, recipe: Recipe, push: float) -> Machines:
    """Return trainer and servers as the simulation takes them. Slots that no request can ever use
    are left out."""
    most = recipe.gen_batch_size if not recipe.max_staleness else (recipe.max_staleness + 1) * recipe.train_batch_size
    slots = min(parts.server.slots, ceil_div(most * recipe.n, parts.num_servers))
    return Machines(
        parts.num_servers, slots, parts.server.token_s, parts.train_s, push, parts.server.token_s_per_request
    )


def simulated(
    machines: Machines, recipe: Recipe, responses: Lengths, acceptance: float, part_of_requests: float = 1.0
) -> Speed:
    """Return the simulated speed, if necessary of a part of the servers with the same part of the
    groups.

    Servers are independent, so a part behaves like the whole, except that the longest of fewer
    responses is shorter. Of a single server a part of the slots is simulated, with a
    correspondingly larger slowdown per request. part_of_requests: of SIMULATED_REQUESTS.
    """
    share = min(1.0, part_of_requests * SIMULATED_REQUESTS / (recipe.train_batch_size * recipe.n / acceptance))
    part = max(1, math.floor(machines.num_servers * share))
    slots = machines.slots_per_server
    if machines.num_servers * share < 1:
        slots = max(1, round(slots * machines.num_servers * share))
    share = part * slots / machines.num_slots
    groups = max(1, round(recipe.train_batch_size * share))
    reduced = replace(recipe, train_batch_size=groups, gen_batch_size=max(groups, round(recipe.gen_batch_size * share)))
    draws = random_draws(responses, acceptance, recipe.n, SEED)
    filter_reason = by_correctness("none" if acceptance == 1 else "strict")
    fewer = replace(
        machines,
        num_servers=part,
        slots_per_server=slots,
        token_s_per_request=machines.token_s_per_request * machines.slots_per_server / slots,
    )
    return Simulation(fewer, reduced, draws, filter_reason).run()


@dataclass(frozen=True)
class RunTime:
    """A run's time at each K, and its cost."""

    parts: PhaseTimes
    steps: tuple[StepTime, ...]
    num_gpus: int
    num_trainer_gpus: int
    num_optimizer_steps: int
    tokens_per_s: tuple[float, ...]
    """Trained tokens (responses and prompts) per second of a step and GPU, by K."""
    gpu_hours: tuple[float, ...]
    """Of the whole run, without validation and saves."""


def run_time(
    config: Config,
    spec: ModelSpec,
    assumed: Assumptions,
    staleness: Sequence[int],
    critic: ModelSpec | None = None,
) -> RunTime:
    """Return the time of a config's run at each max_staleness.

    Without servers only at the config's own: it has no effect then.
    """
    parts = phase_times(config, spec, assumed, critic)
    if uses_servers(config):
        steps = tuple(
            step_time(parts, step_recipe(config, age, assumed.rows), assumed.responses, assumed.acceptance)
            for age in staleness
        )
    else:
        age = config.actor_rollout_ref.rollout.max_staleness
        steps = (StepTime(age, parts.train_s, 0.0, None, 0.0, trainer_idle=0.0, servers_idle=0.0),)
    num_gpus = world_size(config) + (0 if shares_gpus(config) else parts.num_servers * parts.server_tp)
    tokens = training_work(config, assumed.responses, assumed.prompt, assumed.rows).num_tokens
    return RunTime(
        parts=parts,
        steps=steps,
        num_gpus=num_gpus,
        num_trainer_gpus=world_size(config),
        num_optimizer_steps=num_optimizer_steps_per_rollout_step(config),
        tokens_per_s=tuple(tokens / step.step / num_gpus for step in steps),
        gpu_hours=tuple(step.step * config.trainer.total_training_steps * num_gpus / 3600 for step in steps),
    )
