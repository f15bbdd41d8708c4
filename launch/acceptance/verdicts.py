"""What the files of a rung's programs say: pure functions that return a verdict or raise Red.

Tolerances: on CPUs the runs compute in float32, on GPUs in bfloat16 (`megatron.dtype` auto).
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from launch.acceptance.rung import Red, RungVerdict
from megatron_dapo.telemetry.report import read_metrics

COMPARED = ("actor/rollout_kl", "actor/entropy", "actor/grad_norm", "actor/loss")
"""Of a step: the mean log-prob (a synthetic batch's own log-probs are one number), the mean entropy, gradients."""

LAYOUT_TOLERANCE = {False: (1e-4, 1e-6), True: (3e-2, 1e-2)}
"""Whether on GPUs -> (relative, absolute). Layouts add in other orders. In float32 a sum keeps 1e-6 of its largest
terms, and a gradient's terms cancel to a hundredth of them. In bfloat16 each activation is rounded by 2^-9; over the
few layers of the demo's model, and in the mean of hundreds of tokens, less than 1 % is left of it."""

SERVER_TOLERANCE = {False: 1e-5, True: 2e-2}
"""Mean |server's - trainer's log-prob|. Two float32 programs differ by 2e-7 in the mean, at the largest by 2e-4. SGLang
rounds logits to bfloat16, which is 7e-3 in the mean. Weights that are a step old differ by 0.3 and more."""

HEAD_BOUNDS = {
    "float32": {"log_prob_max": 2e-5, "entropy_max": 2e-5, "grad_hidden_rel": 2e-5, "grad_weight_rel": 2e-5},
    "bfloat16": {"log_prob_max": 2e-4, "entropy_max": 2e-4, "grad_hidden_rel": 4e-3, "grad_weight_rel": 3e-3},
}
"""Against float64 on the same rounded inputs, as the tests of the kernels have them: what is left is the rounding of
float32 sums, and in bfloat16 that of gradients to the inputs' type."""

LOSS_BOUNDS = {
    "float32": {"loss_sum_rel": 2e-5, "grad_log_probs_rel": 2e-5, "grad_entropy_rel": 2e-5},
}
"""The loss of tokens is computed in float32 everywhere: a ratio exp(x) with |x| <= 20 keeps 20 roundings of 6e-8."""


def records(metrics: Path, num_steps: int) -> list[dict[str, Any]]:
    """Return a run's metrics of each step. Raises Red where they are not those of steps 1 to num_steps, or where a loss
    or gradient is no finite number."""
    try:
        lines = [line for line in read_metrics(metrics) if "actor/loss" in line]
    except FileNotFoundError:
        raise Red(f"the run wrote no {metrics}") from None
    steps = [line["step"] for line in lines]
    if steps != list(range(1, num_steps + 1)):
        raise Red(f"{metrics} has the steps {steps}, not those from 1 to {num_steps}")
    for line in lines:
        for name in ("actor/loss", "actor/grad_norm"):
            if not math.isfinite(line[name]):
                raise Red(f"{name} of step {line['step']} is {line[name]}")
    return lines


def environment(content: Mapping[str, Any], num_gpus: int) -> RungVerdict:
    """Judge what `launch.acceptance.environment` wrote: the children see the GPUs that the ladder counts on."""
    gpus = content["gpus"]
    if len(gpus) < num_gpus or (gpus and not num_gpus):
        raise Red(f"its programs see {len(gpus)} GPUs, the ladder was planned for {num_gpus}")
    shown = "torch megatron-core sglang transformer-engine".split()
    versions = content["versions"]
    kinds = " and ".join(sorted(set(gpus)))
    devices = f"{len(gpus)} x {kinds}" if gpus else "CPU"
    return RungVerdict(f"{devices}; " + ", ".join(f"{name} {versions[name]}" for name in shown), versions)


def node(findings: Sequence[Mapping[str, Any]]) -> RungVerdict:
    """Judge what `launch.preflight --report` wrote, which ended with exit code 0."""
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
                if not value <= bound:  # so that NaN is above it
                    raise Red(f"{where}: {error} is {value:.1e} from float64, above {bound:g}")
                largest[f"{name}/{error}"] = max(largest.get(f"{name}/{error}", 0.0), value)
    log_prob, gradient = largest["head/log_prob_max"], largest["head/grad_weight_rel"]
    return RungVerdict(f"from float64: log-probs {log_prob:.1e}, gradients {gradient:.1e} at most", largest)


def round_trip(source: Path, back: Path) -> RungVerdict:
    """Judge a model that was converted and converted back: each file is the source's, byte for byte, and none of its
    weights is missing."""
    there = {file.name for file in back.iterdir()}
    missing = {file.name for file in source.glob("*.safetensors")} | {"config.json"}
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
    relative, absolute = LAYOUT_TOLERANCE[on_gpus]
    largest = 0.0
    for name in COMPARED:
        here, there = split[0][name], alone[0][name]
        difference = abs(here - there)
        if not difference <= relative * abs(there) + absolute:
            raise Red(f"{name} is {here:.6g}, on one process {there:.6g}")
        largest = max(largest, difference / max(abs(there), absolute / relative))
    return RungVerdict(
        f"log-probs, entropy, gradients and loss differ by {largest:.1e} at most",
        {"largest_relative_difference": largest, "grad_norm": split[0]["actor/grad_norm"]},
    )


def servers(lines: Sequence[Mapping[str, float]], num_servers: int, on_gpus: bool) -> RungVerdict:
    """Judge a run with servers: each push reached all of them and was read back, and their log-probs are the
    trainer's."""
    for line in lines:
        if line.get("weight_sync/num_servers") != num_servers or "weight_sync/verify_s" not in line:
            raise Red(
                f"after step {line['step']} {line.get('weight_sync/num_servers', 0):g} of {num_servers} servers held "
                f"the weights, {'' if 'weight_sync/verify_s' in line else 'not '}read back"
            )
    compared = [line for line in lines if "actor/rollout_abs_diff" in line]
    if not compared:
        raise Red("no step had tokens whose log-probs could be compared")
    largest = max(line["actor/rollout_abs_diff"] for line in compared)
    if not largest <= SERVER_TOLERANCE[on_gpus]:
        raise Red(f"servers and trainer differ by {largest:.1e} in the mean, above {SERVER_TOLERANCE[on_gpus]:g}")
    speed = max(line.get("rollout/tokens_per_s", 0.0) for line in lines)
    push_s = median(line["time/weight_sync"] for line in lines)
    pushed = f"{len(lines)} steps, {num_servers} servers, each push read back"
    return RungVerdict(
        f"{pushed}; log-probs differ by {largest:.1e} in the mean",
        {"rollout_abs_diff": largest, "tokens_per_s": speed, "push_s": push_s, "reward": lines[-1]["reward/mean"]},
    )


def resumed(after: Sequence[Mapping[str, float]], whole: Sequence[Mapping[str, float]], on_gpus: bool) -> RungVerdict:
    """Judge the run that was killed and resumed beside one that was not: on CPUs the same bits; kernels of GPUs add in
    an order of their own each time."""
    relative, absolute = LAYOUT_TOLERANCE[True] if on_gpus else (0.0, 0.0)
    for here, there in zip(after, whole, strict=True):
        for name in COMPARED:
            if not abs(here[name] - there[name]) <= relative * abs(there[name]) + absolute:
                raise Red(f"{name} of step {here['step']} is {here[name]!r}, without the kill it is {there[name]!r}")
    what = "the same numbers but for rounding" if on_gpus else "the same bits"
    return RungVerdict(f"{len(whole)} steps, {what} as without the kill", {"grad_norm": after[-1]["actor/grad_norm"]})


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
