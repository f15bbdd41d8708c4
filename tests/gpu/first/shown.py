"""The results of a part, from its files, in lines that begin with >>.

shown.py heads head.json | step METRICS PLAN | demo RESULTS | ranks RESULTS
"""

import json
import math
import sys
from pathlib import Path


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def heads(path: Path) -> int:
    for result in json.loads(path.read_text())["results"]:
        g3 = result["yardsticks"]["G3"]
        print(f">> {result['shape']['name']}: three products {1e3 * g3:.2f} ms")
        for row in result["rows"]:
            if row["failure"]:
                print(f">>   {row['provider']}: {row['failure']}")
                continue
            peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f} MiB"
            print(f">>   {row['provider']:<18} {1e3 * row['total_s']:8.2f} ms  {row['ratios']['G3']:.2f} of G3  {peak}")
    return 0


STEP = ("perf/update_tokens_per_s_per_gpu", "perf/mfu/actor", "perf/mfu/actor_infer", "perf/max_memory_allocated_gb",
        "perf/max_memory_reserved_gb", "actor/loss", "actor/grad_norm")  # fmt: skip


def step(metrics: Path, plan: Path) -> int:
    for number, line in enumerate(lines(metrics), 1):
        times = {k: v for k, v in line.items() if k.startswith("time") and ("update" in k or "old_log" in k)}
        values = {k: line[k] for k in STEP if k in line} | times
        print(f">> step {number}: " + ", ".join(f"{k} {v:.4g}" for k, v in values.items()))
    for text in plan.read_text().splitlines():
        if any(word in text for word in ("trainer:", "recomputed", "update, MFU", "old log-probs")):
            print(f">> plan: {text.strip()}")
    return 0


COMPARED = ("actor/loss", "actor/pg_loss", "actor/entropy", "actor/grad_norm", "actor/ppo_kl", "actor/ratio_max")


def compare(name: str, got: Path, base: Path, bounds: dict[str, float]) -> int:
    """bounds: metric -> relative difference allowed in the first step, above a floor of 1e-6; later
    steps are shown."""
    if not got.exists():
        print(f">> {name}: there is no such run")
        return 1
    a, b = lines(got), lines(base)
    bad = len(a) != len(b)
    if bad:
        print(f">> {name}: {len(a)} of {len(b)} steps")
    for number, (x, y) in enumerate(zip(a, b, strict=False), 1):
        shown = []
        for key in COMPARED:
            if key not in x or key not in y:
                continue
            off = abs(x[key] - y[key]) / max(abs(y[key]), 1e-6)
            wrong = number == 1 and key in bounds and not off <= bounds[key] or not math.isfinite(x[key])
            bad += wrong
            shown.append(f"{key.removeprefix('actor/')} {x[key]:.6g} ({off:.1e}{' TOO FAR' if wrong else ''})")
        print(f">> {name}, step {number}: " + ", ".join(shown))
    return bad


def demo(results: Path) -> int:
    """Entropy and norm of the gradient count; the loss is a small difference of large sums.
    bfloat16 on a CPU is off by up to 6e-3 and 5e-2 from float32 there."""
    base = results / "demo-cpu.metrics.jsonl"
    print(f">> CPU: {len(lines(base))} steps")
    if not (results / "demo-gpu-float32.metrics.jsonl").exists():
        return 0
    exact = compare("float32 on the GPU", results / "demo-gpu-float32.metrics.jsonl", base,
                    {"actor/entropy": 1e-3, "actor/grad_norm": 1e-2})  # fmt: skip
    half = compare("bfloat16 on the GPU", results / "demo-gpu-bfloat16.metrics.jsonl", base,
                   {"actor/entropy": 2e-2, "actor/grad_norm": 1e-1})  # fmt: skip
    return exact + half


def ranks(results: Path) -> int:
    base = results / "one.metrics.jsonl"
    bounds = {"actor/entropy": 2e-2, "actor/grad_norm": 1e-1}
    return sum(compare(name, results / f"{name}.metrics.jsonl", base, bounds) for name in ("tp2", "pp2", "dp2"))


if __name__ == "__main__":
    kind, *paths = sys.argv[1:]
    sys.exit(min(1, {"heads": heads, "step": step, "demo": demo, "ranks": ranks}[kind](*map(Path, paths))))
