"""Judges the files of a rung's programs: pure functions that return a verdict or raise Red.

Tolerances: on CPUs the runs compute in float32, on GPUs in bfloat16 (`megatron.dtype` auto).
"""

import math
import re
from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

from launch.acceptance.rung import Red, RungVerdict
from launch.acceptance.server_kills import StartedServer, was_left_out
from megatron_dapo.checkpointing.folders import newest_first, step_of
from megatron_dapo.telemetry.closing_table import read_metrics

COMPARED = ("actor/rollout_kl", "actor/entropy", "actor/grad_norm", "actor/loss", "actor/ppo_kl")
"""Of a step: the mean log-prob (a synthetic batch's own log-probs are one number), the mean
entropy, gradients. Of its second optimizer step the clipped loss, and the log-probs' distance from
the old ones."""

LAYOUT_TOLERANCE = {False: (1e-4, 1e-6), True: (3e-2, 1e-2)}
"""Whether on GPUs -> (relative, absolute). Layouts add in other orders. In float32 a sum keeps 1e-6
of its largest terms, and a gradient's terms cancel to a hundredth of them. In bfloat16 each
activation is rounded by 2^-9. Over the few layers of the demo's model, and in the mean of hundreds
of tokens, less than 1 % is left of it. The second optimizer step begins at other weights: Adam
moves each by lr for any size of its gradient. Weights with only rounding in their gradient then
differ by up to 2 lr. To first order no compared value depends on those. Measured on a CPU, TP 2, PP
2, DP 2 beside one process: in float32 1.2e-6 of the gradient norm and 1e-6 of ppo_kl."""

GPU_GRAD_NORM_TOLERANCE = 0.2
"""Relative. Few tokens make most of the norm, and those near the clip range may fall on either
side. In bfloat16 on a CPU TP 2 and one process differed by 6 %. A missing reduction over 2 ranks
changes it by at least 1 - 1/sqrt(2)."""

SERVER_TOLERANCE = {False: 1e-5, True: 2e-2}
"""Mean |server's - trainer's log-prob|. Two float32 programs differ by 2e-7 in the mean, at most by
2e-4. On GPUs both compute logits in float32 (the supervisor passes --enable-fp32-lm-head) from
bfloat16 layers with different kernels; logits rounded to bfloat16 would add 7e-3. Weights of the
last step differ by 0.3 and more."""

HEAD_BOUNDS = {
    "float32": {"log_prob_max": 2e-5, "entropy_max": 2e-5, "grad_hidden_rel": 2e-5, "grad_weight_rel": 2e-5},
    "bfloat16": {"log_prob_max": 2e-4, "entropy_max": 2e-4, "grad_hidden_rel": 4e-3, "grad_weight_rel": 3e-3},
}
"""Against float64 on the same rounded inputs, as in the kernels' tests. They hold the rounding of
float32 sums, and in bfloat16 of gradients to the inputs' type."""

LOSS_BOUNDS = {
    "float32": {"loss_sum_rel": 2e-5, "grad_log_probs_rel": 2e-5, "grad_entropy_rel": 2e-5},
}
"""The loss of tokens is computed in float32 everywhere: a ratio exp(x) with |x| <= 20 keeps 20
roundings of 6e-8."""


_FILES_OF_A_MODEL = ("*.safetensors", "config.json", "generation_config.json", "tokenizer*")
_PHASES_OF_A_TURN = ("sleep", "park", "wake", "send")
ASLEEP_GB, RANK_GB, RANKS_GB, PARKED_GB = 5.0, 1.5, 9.0, 1.0
"""Memory of a GPU, at most: of a server asleep; of a trainer's rank beside its tensors, alone and of
several (CUDA, NCCL); of the allocator of a parked one."""

GROWTH_GB = 0.064
"""Memory may grow by so much over the turns: a few blocks of an allocator."""

_NAMED_TESTS = 5


def records(metrics: Path, num_steps: int | None) -> list[dict[str, Any]]:
    """Return a run's metrics of each step; nulls become NaN, out of any bound.

    Raises:
        Red: if they are not those of steps 1 to num_steps (None: the newest), or if a loss or
            gradient is not finite.
    """
    try:
        lines = [line for line in read_metrics(metrics) if "actor/loss" in line]
    except FileNotFoundError:
        raise Red(f"the run wrote no {metrics}") from None
    steps = [line["step"] for line in lines]
    last = max(steps, default=0) if num_steps is None else num_steps
    if steps != list(range(1, last + 1)):
        raise Red(f"{metrics} has the steps {steps}, not 1 to {last}")
    numbers = [{name: math.nan if value is None else value for name, value in line.items()} for line in lines]
    for line in numbers:
        for name in ("actor/loss", "actor/grad_norm"):
            if not math.isfinite(line[name]):
                raise Red(f"{name} of step {line['step']} is no finite number")
    return numbers


def environment(content: Mapping[str, Any], num_gpus: int) -> RungVerdict:
    """Judge the output of `launch.acceptance.environment`: the children must see the ladder's
    GPUs."""
    gpus = content["gpus"]
    if len(gpus) < num_gpus or (gpus and not num_gpus):
        raise Red(f"its programs see {len(gpus)} GPUs, the ladder was planned for {num_gpus}")
    shown = "torch megatron-core sglang transformer-engine".split()
    versions = content["versions"]
    kinds = " and ".join(sorted(set(gpus)))
    devices = f"{len(gpus)} x {kinds}" if gpus else "CPU"
    return RungVerdict(f"{devices}; " + ", ".join(f"{name} {versions[name]}" for name in shown), versions)


def node(findings: Sequence[Mapping[str, Any]]) -> RungVerdict:
    """Judge the output of a `launch.preflight --report` that ended with exit code 0."""
    by_check = {finding["check"]: finding["found"] for finding in findings}
    problems = [finding["problem"] for finding in findings if finding["problem"]]
    if problems:
        raise Red("; ".join(problems))
    if "all-reduce" not in by_check:
        raise Red("the preflight measured no all-reduce")
    return RungVerdict(f"all-reduce {by_check['all-reduce']}", by_check)


def kernels(head: Mapping[str, Any], loss: Mapping[str, Any]) -> RungVerdict:
    """Judge the errors that the benchmarks of head and loss measured against float64."""
    largest: dict[str, float] = {}
    for name, content, bounds in (("head", head, HEAD_BOUNDS), ("loss", loss, LOSS_BOUNDS)):
        measured = [(result, row) for result in content["results"] for row in result["rows"]]
        if not any(row["errors"] for _, row in measured):
            raise Red(f"the {name} was not compared with float64")
        for result, row in measured:
            where = f"{row['provider']} at {result['shape']['name']}"
            if row["failure"]:
                raise Red(f"{where}: {row['failure']}")
            for error, bound in bounds[result["dtype"]].items():
                value = row["errors"].get(error, 0.0)
                if not value <= bound:  # true for NaN
                    raise Red(f"{where}: {error} is {value:.1e} from float64, above {bound:g}")
                largest[f"{name}/{error}"] = max(largest.get(f"{name}/{error}", 0.0), value)
    log_prob, gradient = largest["head/log_prob_max"], largest["head/grad_weight_rel"]
    return RungVerdict(f"from float64: log-probs {log_prob:.1e}, gradients {gradient:.1e} at most", largest)


def gpu_tests(junit_xml: Path) -> RungVerdict:
    """Judge pytest's record of GPU tests with exit code 0: there are some, and none was skipped."""
    cases = list(ElementTree.parse(junit_xml).iter("testcase"))
    skipped = [
        f"{case.get('classname') or ''}.{case.get('name')} ({reason.get('message')})".removeprefix(".")
        for case in cases
        for reason in case.iter("skipped")
    ]
    if skipped:
        more = f"; and {len(skipped) - _NAMED_TESTS} more" if len(skipped) > _NAMED_TESTS else ""
        named = "; ".join(skipped[:_NAMED_TESTS])
        raise Red(f"{len(skipped)} of {len(cases)} tests were skipped: {named}{more}")
    if not cases:
        raise Red("no test ran on a GPU")
    return RungVerdict(f"{len(cases)} tests passed, none skipped", {"tests": len(cases)})


def round_trip(source: Path, back: Path) -> RungVerdict:
    """Judge a model converted there and back: each file is the source's, byte for byte. No weights,
    configuration or tokenizer are missing."""
    there = {file.name for file in back.iterdir()}
    missing = {file.name for pattern in _FILES_OF_A_MODEL for file in source.glob(pattern)}
    if lost := sorted(missing - there):
        raise Red(f"{', '.join(lost)} of {source} did not come back")
    num_bytes = 0
    for name in sorted(there):
        if not (source / name).is_file() or (source / name).read_bytes() != (back / name).read_bytes():
            raise Red(f"{back / name} is not {source / name} byte for byte")
        num_bytes += (back / name).stat().st_size
    return RungVerdict(f"{len(there)} files, {num_bytes / 1e6:.1f} MB, equal to the byte", {"bytes": num_bytes})


def layout(split: Sequence[Mapping[str, float]], alone: Sequence[Mapping[str, float]], on_gpus: bool) -> RungVerdict:
    """Judge the first step of the same batches at a layout and on one process."""
    absolute = LAYOUT_TOLERANCE[on_gpus][1]
    largest = 0.0
    if alone[0]["actor/ppo_kl"] == 0.0:
        raise Red("on one process no ratio moved from 1, so that neither old log-probs nor clipping were compared")
    for name in COMPARED:
        here, there = split[0][name], alone[0][name]
        difference = abs(here - there)
        relative = _relative(name, on_gpus)
        if not difference <= relative * abs(there) + absolute:
            raise Red(f"{name} is {here:.6g}, on one process {there:.6g}")
        largest = max(largest, difference / max(abs(there), absolute / relative))
    return RungVerdict(
        f"log-probs, entropy, gradients and loss differ by {largest:.1e} at most",
        {"largest_relative_difference": largest, "grad_norm": split[0]["actor/grad_norm"]},
    )


def _relative(name: str, on_gpus: bool) -> float:
    is_norm = name == "actor/grad_norm"
    return GPU_GRAD_NORM_TOLERANCE if on_gpus and is_norm else LAYOUT_TOLERANCE[on_gpus][0]


def servers(lines: Sequence[Mapping[str, float]], num_servers: int, on_gpus: bool) -> RungVerdict:
    """Judge a run with servers: each push reached all of them and was read back, and their
    log-probs are the trainer's."""
    for line in lines:
        if line.get("weight_sync/num_servers") != num_servers or "weight_sync/verify_s" not in line:
            raise Red(
                f"after step {line['step']} {line.get('weight_sync/num_servers', 0):g} of {num_servers} servers held "
                f"the weights, {'' if 'weight_sync/verify_s' in line else 'not '}read back"
            )
    largest = _largest_difference(lines, on_gpus)
    speed = max(line.get("rollout/tokens_per_s", 0.0) for line in lines)
    push_s = median(line["time/weight_sync"] for line in lines)
    pushed = f"{len(lines)} steps, {num_servers} servers, each push read back"
    return RungVerdict(
        f"{pushed}; log-probs differ by {largest:.1e} in the mean",
        {"rollout_abs_diff": largest, "tokens_per_s": speed, "push_s": push_s, "reward": lines[-1]["reward/mean"]},
    )


def shared_gpus(lines: Sequence[Mapping[str, float]], num_servers: int, num_ranks: int, on_gpus: bool) -> RungVerdict:
    """Judge a run whose servers share its GPUs, all killed asleep in the last step but one: all other
    pushes as `servers`. While one side trains or samples the other holds little, and before the
    kill the same in each turn but for GROWTH_GB."""
    *quiet, without, _ = lines
    if left := without["weight_sync/num_servers"]:
        raise Red(f"after step {without['step']} {left:g} servers held the weights: not all died asleep")
    verdict = servers([line for line in lines if line is not without], num_servers, on_gpus)
    numbers = dict(verdict.numbers)
    bounds = {"asleep_used": ASLEEP_GB + (RANK_GB if num_ranks == 1 else RANKS_GB), "parked_kept": PARKED_GB}
    for name, bound in bounds.items() if on_gpus else ():
        held = [line.get(f"weight_sync/{name}_gb", nan) for line in lines]
        if (worst := next((each for each in held if not each <= bound), None)) is not None:
            raise Red(f"weight_sync/{name}_gb is {worst:.2f}, at most {bound:g} was expected")
        if (most := max(held[: len(quiet)])) - held[0] > GROWTH_GB:
            raise Red(f"weight_sync/{name}_gb grows from {held[0]:.3f} to {most:.3f}: something is kept")
        numbers[f"{name}_gb"] = max(held)
    seconds = {phase: median(line[f"weight_sync/{phase}_s"] for line in quiet) for phase in _PHASES_OF_A_TURN}
    numbers |= {f"{phase}_s": each for phase, each in seconds.items()}
    # the phase covers both ways
    turn = f"a turn costs {verdict.numbers['push_s']:.1f} s; servers killed asleep came back"
    return RungVerdict(f"{verdict.text}; {turn}", numbers)


def lost_servers(
    lines: Sequence[Mapping[str, float]],
    log: Path,
    in_push: StartedServer | None,
    num_kills: int,
    away_s: Sequence[float],
    on_gpus: bool,
) -> RungVerdict:
    """Judge a run with killed and restarted servers.

    A push left out its victim, all servers' weights were read back, and their log-probs are the
    trainer's.

    Args:
        lines: its metrics of each step.
        log: of the trainer's rank 0.
        in_push: the server dead in a push.
        num_kills: of that server until a push lost it.
        away_s: seconds until it was back, and the one killed between two pushes.
        on_gpus: whether the run was on GPUs.
    """
    if in_push is None or not was_left_out(log, in_push.url):
        raise Red(f"no push left out {in_push.url if in_push else 'a server'}, so it did not die in one ({log})")
    if unread := [line["step"] for line in lines if "weight_sync/verify_s" not in line]:
        raise Red(f"after step {unread[0]} no server's weights were read back")
    largest = _largest_difference(lines, on_gpus)
    seconds = " and ".join(f"{each:.0f} s" for each in away_s)
    died = f"{in_push.name} died in a push" + (f" at kill {num_kills}" if num_kills > 1 else "")
    without = f"{len(lines)} steps without a stop; {died}; back after {seconds}"
    return RungVerdict(
        f"{without}; log-probs differ by {largest:.1e} in the mean",
        {
            "rollout_abs_diff": largest,
            "longest_away_s": max(away_s),
            "steps": len(lines),
            "kills_until_one_in_a_push": num_kills,
        },
    )


def _largest_difference(lines: Sequence[Mapping[str, float]], on_gpus: bool) -> float:
    """Return the largest of the steps' mean differences of log-probs. Raises Red if one is out of
    bounds."""
    differences = [line["actor/rollout_abs_diff"] for line in lines if "actor/rollout_abs_diff" in line]
    if not differences:
        raise Red("no step had tokens with comparable log-probs")
    for difference in differences:
        if not difference <= SERVER_TOLERANCE[on_gpus]:  # true for NaN
            raise Red(
                f"servers and trainer differ by {difference:.1e} in the mean, above {SERVER_TOLERANCE[on_gpus]:g}"
            )
    return max(differences)


def saved_before_the_kill(checkpoints: Path, num_steps: int) -> int:
    """Return the step of the newest checkpoint of a killed run. Raises Red if no step is left to
    train."""
    saved = max((step_of(folder) or 0 for folder in newest_first(checkpoints)), default=0)
    if not 0 < saved < num_steps:
        raise Red(f"the run was killed with a checkpoint of step {saved} of {num_steps}: its resume would show nothing")
    return saved


def resumed_after(log: Path, saved: int) -> None:
    """Raise Red if a run's log of checkpoints does not show its resume from that step."""
    steps = [int(step) for step in re.findall(r"^.*Resumed after step (\d+)", log.read_text(), re.MULTILINE)]
    if steps != [saved]:
        said = f"after step {steps[-1]}" if steps else "nowhere"
        raise Red(f"the run resumed {said}, its newest checkpoint is that of step {saved} ({log})")


def resumed(
    after: Sequence[Mapping[str, float]], whole: Sequence[Mapping[str, float]], saved: int, on_gpus: bool
) -> RungVerdict:
    """Judge a run killed and resumed after step `saved` beside an undisturbed one: on CPUs the same
    bits; GPU kernels add in varying order."""
    absolute = LAYOUT_TOLERANCE[True][1] if on_gpus else 0.0
    for here, there in zip(after, whole, strict=True):
        for name in COMPARED:
            relative = _relative(name, on_gpus) if on_gpus else 0.0
            if not abs(here[name] - there[name]) <= relative * abs(there[name]) + absolute:
                raise Red(f"{name} of step {here['step']} is {here[name]!r}, without the kill it is {there[name]!r}")
    what = "the same numbers but for rounding" if on_gpus else "the same bits"
    return RungVerdict(
        f"{len(whole)} steps, resumed after {saved}: {what} as without the kill",
        {"resumed_after_step": saved, "grad_norm": after[-1]["actor/grad_norm"]},
    )


THROUGHPUT = {
    "perf/throughput": "tokens/s per rank of whole steps",
    "perf/update_tokens_per_s_per_gpu": "tokens/s per rank of updates",
    "perf/mfu/actor": "MFU of updates",
    "perf/mfu/actor_infer": "MFU of old log-probs",
    "perf/max_memory_allocated_gb": "GiB of GPU memory",
    "time/update": "s per update",
}


def throughput(lines: Sequence[Mapping[str, float]], what: str) -> RungVerdict:
    """Report a run's speed: medians over its steps but the first, in which kernels are compiled."""
    measured = {
        name: median(line[name] for line in lines[1:]) for name in THROUGHPUT if all(name in line for line in lines[1:])
    }
    if not measured.get("perf/update_tokens_per_s_per_gpu", 0.0) > 0.0:
        raise Red("the run reports no tokens per second")
    shown = ("perf/update_tokens_per_s_per_gpu", "perf/mfu/actor", "perf/max_memory_allocated_gb")
    parts = [f"{measured[name]:.4g} {THROUGHPUT[name]}" for name in shown if name in measured]
    return RungVerdict(f"{what}: {', '.join(parts)}", measured)
