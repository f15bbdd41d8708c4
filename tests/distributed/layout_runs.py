"""One rollout step at many layouts, and the comparison of two results."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from tests.forked_ranks import run_ranks
from tests.proofs import covering

Layouts = dict[int, dict[str, tuple[dict, dict[str, list[str]]]]]
"""Number of processes -> name of a layout -> (its sizes, variant -> overrides of the config)."""

HALF_A_STEP = ("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
"""Overrides for two optimizer steps of two groups of four samples, half of the default."""


def run_layouts(
    folder: Path,
    model: Path,
    layouts: Layouts,
    reference: Path | None = None,
    others: Mapping[str, Path] | None = None,
    start: Callable[[Path, int, str], str] = run_ranks,
    overrides: Sequence[str] = (),
) -> dict[str, dict]:
    """Return the results of `layout_worker`, under "layout/variant". One start per number of
    processes runs all its layouts.

    REFERENCE in an override stands for the path of the reference model, OTHER(name) for that of
    another one. overrides: of all cases. The variable LAYOUT_CASES restricts the runs to some
    names, for one quick comparison.
    """
    if only := os.environ.get("LAYOUT_CASES", "").split():
        layouts = restricted(layouts, only)
    paths = {"REFERENCE": reference} | {f"OTHER({name})": path for name, path in (others or {}).items()}
    results: dict[str, dict] = {}
    for world, of_world in layouts.items():
        out, task = folder / f"{model.name}{world}.pt", folder / f"{model.name}{world}.json"
        rows = [
            (name, sizes, {variant: [*overrides, *own] for variant, own in variants.items()})
            for name, (sizes, variants) in of_world.items()
        ]
        text = json.dumps({"model": str(model), "out": str(out), "layouts": rows})
        for name, path in paths.items():
            text = text.replace(name, str(path))
        task.write_text(text)
        start(Path(__file__).with_name("layout_worker.py"), world, str(task))
        results |= torch.load(out, map_location="cpu")
    return results


def restricted(layouts: Layouts, only: Iterable[str]) -> Layouts:
    """Return the layouts with only these cases."""
    chosen = {
        world: {
            name: (sizes, {variant: what for variant, what in variants.items() if f"{name}/{variant}" in only})
            for name, (sizes, variants) in of_world.items()
        }
        for world, of_world in layouts.items()
    }
    filled = {world: {name: row for name, row in of.items() if row[1]} for world, of in chosen.items()}
    return {world: of_world for world, of_world in filled.items() if of_world}


def by_world_size(layouts: dict[str, dict], sizes: dict[str, int], variants: Callable) -> Layouts:
    """Return layouts by their numbers of processes. variants: of a layout, from its name."""
    return {
        world: {name: (layouts[name], variants(name)) for name in layouts if sizes[name] == world}
        for world in sorted({sizes[name] for name in layouts})
    }


def in_short(layouts: Layouts) -> Layouts:
    """Return the cases of `make test`; all of them in proofs."""
    return restricted(layouts, covering(cases_of(layouts)))


def with_others(others: Iterable[str], variants: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return them, and the same of each of these models in place of the model."""
    of_others = {
        f"{other}_{name}": [f"actor_rollout_ref.model.path=OTHER({other})", *overrides]
        for other in others
        for name, overrides in variants.items()
    }
    return variants | of_others


def cases_of(layouts: Layouts) -> list[str]:
    """Return the names of all results."""
    rows = [row for of_world in layouts.values() for row in of_world.items()]
    return [f"{layout}/{variant}" for layout, (_, variants) in rows for variant in variants]


def assert_same(got: dict, expected: dict) -> None:
    """Assert that metrics, gradients and weights of two runs are equal but for rounding."""
    assert got is not expected, "it would be compared with itself"
    assert got["metrics"].keys() == expected["metrics"].keys()
    for name, value in expected["metrics"].items():
        # means of terms of order 1 (sums of up to 24 of them) cancel: a few float32 roundings
        # remain, 6e-8 each. A largest ratio is of one token: exp of the difference of two
        # log-probs, each exact to 1e-5 (test_parity.py)
        rel = 2e-5 if name.endswith("ratio_max") else 1e-5
        assert got["metrics"][name] == pytest.approx(value, rel=rel, abs=1e-6), name
    for what in ("gradients", "weights"):
        if what in got:
            assert got[what].keys() == expected[what].keys()
            # advantages of a group sum to zero, so gradients are small differences of large terms.
            # The rounding goes with the largest gradient of the model as well as with the
            # parameter's own
            largest = max(tensor.abs().max() for tensor in expected[what].values())
            for name, tensor in expected[what].items():
                error = (got[what][name] - tensor).abs().max()
                assert error < 1e-5 * tensor.abs().max() + 1e-6 * largest, f"{what} of {name}: {error:.1e}"


def assert_same_as(results: Mapping[str, dict], case: str, base: str) -> None:
    """Assert that two runs gave the same; a comparison of the other with itself is skipped."""
    if case != base:
        assert_same(results[case], results[base])
