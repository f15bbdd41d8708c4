"""The time plan as text: its assumptions, and a table of the parts of a step for each K."""

from collections.abc import Iterator, Sequence

from megatron_dapo.commands.plan.cost import DAY, JobLimit, cost_lines, in_hours, run_seconds
from megatron_dapo.commands.plan.step_time import Assumptions, Factors, RunTime
from megatron_dapo.common.sizes import GB
from megatron_dapo.config.derived import machines_per_server, parallel_sizes, shares_gpus, uses_servers
from megatron_dapo.config.schema.config import Config

LABEL_WIDTH = 14
COLUMN = 12
MAX_STALENESS = "max_staleness K"
SAMPLING, TAIL = "sampling, as long as the trainer waits", "  with slots free (the tail)"
MOVING = "memory moved, both ways"
WEIGHT_SYNC, OLDEST = "weight sync", "oldest token, in optimizer steps"
TRAINER_IDLE, SERVERS_IDLE = "trainer idle", "servers idle"
OF_SERVERS = {MAX_STALENESS, SAMPLING, TAIL, WEIGHT_SYNC, OLDEST, TRAINER_IDLE, SERVERS_IDLE}
"""Rows that a run without servers has not."""


def time_plan(config: Config, model: str, assumed: Assumptions, run: RunTime, limit: JobLimit) -> str:
    """Return the plan as aligned lines: layout, assumptions, seconds per step by part, and the cost
    of the run."""
    sections = [("layout", list(_layout(config, model, assumed, run))), ("assumed", list(_assumed(assumed, run)))]
    lines = ["Plan of time: an estimate (docs/plan.md), without validation and saves"]
    lines += [line for label, texts in sections for line in labelled(label, texts)]
    lines += ["", *_table(config, run, limit)]
    configured = [step for step in run.steps if step.max_staleness == config.actor_rollout_ref.rollout.max_staleness]
    for step in configured:
        cost = cost_lines(config, step, run.num_gpus, limit, assumed.hardware.name)
        lines += ["", *labelled("this config", list(cost))]
    return "\n".join(lines)


def labelled(label: str, texts: Sequence[str]) -> list[str]:
    """Return lines with the label before the first."""
    return [f"  {label if i == 0 else '':<{LABEL_WIDTH}}{text}" for i, text in enumerate(texts)]


def _layout(config: Config, model: str, assumed: Assumptions, run: RunTime) -> Iterator[str]:
    sizes = parallel_sizes(config)
    context = f"CP {sizes.cp}, " if sizes.cp > 1 else ""
    parts = run.parts
    yield f"{model} on {run.num_gpus} {assumed.hardware.name.upper()}"
    servers = f"{parts.num_servers} server{'' if parts.num_servers == 1 else 's'} x TP {parts.server_tp}"
    nodes = machines_per_server(config)
    servers += f" over {nodes} nodes" if nodes > 1 else ""
    trainers = f"{sizes.world} train (TP {sizes.tp}, PP {sizes.pp}, {context}DP {sizes.dp})"
    if shares_gpus(config):
        yield f"{trainers} and sample in turns ({servers})"
    elif uses_servers(config):
        yield f"{trainers}, {run.num_gpus - sizes.world} sample ({servers})"
    else:
        yield f"{trainers} on synthetic batches, without servers"


def _assumed(assumed: Assumptions, run: RunTime) -> Iterator[str]:
    lengths = assumed.responses
    speed = run.parts.server
    hardware = assumed.hardware
    yield (
        f"responses of {lengths.mean:.0f} tokens on average (spread {lengths.sigma:g}, {lengths.cut_share:.0%} are cut "
        f"at {lengths.longest}), prompts of {assumed.prompt}"
    )
    if run.parts.num_servers:
        yield f"{assumed.acceptance:.0%} of the groups carry signal"
        if run.parts.places:
            of_each = f"{assumed.rows:g} rows and {assumed.tools_s:g} s of tools"
            yield f"trajectories have {of_each}; agent.max_open lets a step's through in {run.parts.places:.0f} s"
        yield f"a server decodes {speed.slots} requests at once, {speed.tokens_per_s:.0f} tokens/s then"
        yield f"the controller takes {run.parts.controller_share:.0%} of a core then, on rank 0's node"
    yield (
        f"per GPU {hardware.flops / 1e12:.3g} TFLOP/s, memory {hardware.memory_bandwidth / 1e12:.3g} TB/s, links "
        f"{hardware.link_bandwidth / GB:.0f} GB/s, network {hardware.network_bandwidth / GB:.0f} GB/s; of these "
        f"{assumed.efficiency.matmul:.0%}, {assumed.efficiency.memory:.0%}, {assumed.efficiency.link:.0%} and "
        f"{assumed.efficiency.link:.0%}"
    )
    if assumed.factors != Factors():
        factors = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in vars(assumed.factors).items())
        yield f"measured / estimated, by which the estimates are multiplied: {factors}"


def _table(config: Config, run: RunTime, limit: JobLimit) -> list[str]:
    """Return the lines of the table: a row per part, a column per K."""
    steps = run.steps
    parts = run.parts
    training = parts.training
    same = len(steps)
    seconds = [run_seconds(config, step) for step in steps]
    jobs = [limit.jobs(value) for value in seconds]
    rows = [
        (MAX_STALENESS, [str(step.max_staleness) for step in steps]),
        (SAMPLING, _seconds([step.sampling for step in steps])),
        (TAIL, _seconds([step.tail for step in steps])),
        ("hand-over of the batch", _seconds([parts.hand_over] * same)),
        ("old log-probs", _seconds([parts.score] * same)),
        ("reference", _seconds([parts.reference] * same)),
        ("critic", _seconds([parts.critic] * same)),
        (f"update, MFU {training.mfu:.0%}", _seconds([training.update] * same)),
        ("  collectives in the layers", _seconds([training.tensor] * same)),
        ("  pipeline bubble", _seconds([training.bubble] * same)),
        ("  gradients over DP, Adam, weights", _seconds([training.optimizer] * same)),
        (WEIGHT_SYNC, _seconds([step.push for step in steps])),
        (MOVING, _seconds([parts.moving] * same)),
        ("step", _seconds([step.step for step in steps])),
        ("", [""] * same),
        ("trained tokens/s per GPU", [f"{value:.0f}" for value in run.tokens_per_s]),
        (TRAINER_IDLE, [f"{step.trainer_idle:.0%}" for step in steps]),
        (SERVERS_IDLE, [f"{max(step.servers_idle, 0.0):.0%}" for step in steps]),
        (OLDEST, [str(step.max_staleness * run.num_optimizer_steps) for step in steps]),
        (
            f"GPU-hours of {config.trainer.total_training_steps} steps",
            [f"{hours:.0f}" if hours >= 10 else f"{hours:.2g}" for hours in run.gpu_hours],
        ),
        ("  days", [f"{value / DAY:.1f}" if value >= DAY / 10 else f"{value / DAY:.2g}" for value in seconds]),
        (f"  jobs of {in_hours(limit.limit_s)}", ["-" if number is None else str(number) for number in jobs]),
    ]
    unused = {
        name
        for name, value in (
            ("old log-probs", parts.score),
            ("reference", parts.reference),
            ("critic", parts.critic),
            (MOVING, parts.moving),
        )
        if not value
    }
    if not uses_servers(config):
        unused |= OF_SERVERS
    width = max(len(label) for label, _ in rows) + 2
    return [
        (f"  {label:<{width}}" + "".join(f"{cell:>{COLUMN}}" for cell in cells)).rstrip()
        for label, cells in rows
        if label not in unused
    ]


def _seconds(values: Sequence[float | None]) -> list[str]:
    """Return seconds with three digits, and none below a millisecond; "-" for None."""
    return ["-" if value is None else f"{value:.{_digits(value)}f} s" for value in values]


def _digits(seconds: float) -> int:
    if seconds >= 100 or seconds < 0.0005:
        return 0
    return 1 if seconds >= 10 else 2 if seconds >= 1 else 3
