"""A trajectory in several rows is the same as in one: loss, metrics, gradients and weights.

The same 16 trajectories, as one row each and cut into one to four branches, whose rows lie in
different micro-batches and on different ranks. Every case is compared with one row each on one
process.
"""

import pytest

from tests.distributed.layout_runs import HALF_A_STEP, assert_same, run_layouts
from tests.distributed.test_layouts import CUTS, KL, LAYOUTS, MODES, mode
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.distributed

AGENT = ["actor_rollout_ref.rollout.agent.enable=true", *CUTS["small"]]
PENALTY = [key for key in KL if "dump" not in key]  # of a trajectory, over all of its rows
ONE_ROW = {**{name: mode(name) for name in MODES}, "kl": PENALTY}
ROWS = {f"rows_{name}": [*overrides, *AGENT] for name, overrides in ONE_ROW.items()}
PADDED = {"rows_padded": [*mode("seq-mean-token-mean"), *AGENT, *CUTS["padded"]]}
DUMPED = {"rows_dumped": [*AGENT, "actor_rollout_ref.rollout.dump_samples=3"]}
MIXTURE = ["actor_rollout_ref.model.path=OTHER(moe)", "actor_rollout_ref.actor.router_replay=rollout"]
SEVERAL = ("tp2_sp", "pp2", "cp2", "dp2")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("rows")
    model = make_tiny(folder / "model", "qwen3", vocab=67, layers=2, hidden=32, heads=4, kv_heads=2)
    reference = make_tiny(folder / "reference", "qwen3", seed=1, vocab=67, layers=2, hidden=32, heads=4, kv_heads=2)
    moe = make_tiny(folder / "moe", "qwen3_moe", vocab=67, layers=2, hidden=32, heads=4, kv_heads=2)
    experts = {"rows_experts": [*MIXTURE, *AGENT]}
    extra = {"pp2": DUMPED | experts, "dp2": DUMPED, "cp2": experts}
    of_several = {name: (LAYOUTS[name], ROWS | extra.get(name, {})) for name in SEVERAL}
    of_one = ONE_ROW | ROWS | PADDED | DUMPED | experts | {"experts": MIXTURE}
    layouts = {1: {"tp1": ({}, of_one)}, 2: of_several}
    return run_layouts(folder, model, layouts, reference, {"moe": moe}, overrides=HALF_A_STEP)


@pytest.mark.parametrize("layout", ["tp1", *SEVERAL])
@pytest.mark.parametrize("name", ONE_ROW)
def test_rows_have_the_loss_and_the_gradient_of_one_row(results, layout, name):
    assert_same(results[f"{layout}/rows_{name}"], results[f"tp1/{name}"])


def test_padded_rows_have_the_loss_and_the_gradient_of_one_row(results):
    assert_same(results["tp1/rows_padded"], results["tp1/seq-mean-token-mean"])


@pytest.mark.parametrize("layout", ["tp1", "pp2", "cp2"])
def test_each_row_replays_the_servers_experts_of_its_own_tokens(results, layout):
    rows, one = results[f"{layout}/rows_experts"], results["tp1/experts"]
    # of all tokens that are read, and branches read some again
    differing = ("actor/router_mismatch", "actor/expert_load_max", "actor/expert_load_entropy")
    kept = {name: value for name, value in one["metrics"].items() if name not in differing}
    assert_same({**rows, "metrics": {name: rows["metrics"][name] for name in kept}}, {**one, "metrics": kept})
    assert one["metrics"]["actor/router_mismatch"] > 0


@pytest.mark.parametrize("layout", ["tp1", "pp2", "dp2"])
def test_the_values_of_all_branches_of_a_kept_group_are_dumped(results, layout):
    """Three groups of four trajectories, on one process and from two."""
    dump, one = results[f"{layout}/rows_dumped"]["dump"], results["tp1/rows_dumped"]["dump"]
    assert len(dump["lengths"]) > 12 and dump["lengths"].tolist() == one["lengths"].tolist()
    assert dump["tokens"].tolist() == one["tokens"].tolist()
    counted = dump["loss_mask"] != 0
    assert counted.any() and (dump["advantages"].isnan() == ~counted).all()
    assert dump["advantages"][counted].tolist() == one["advantages"][counted].tolist()
