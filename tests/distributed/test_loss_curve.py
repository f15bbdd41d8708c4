"""Training with fused kernels is the training without them."""

from pathlib import Path

import pytest
import torch

from tests.forked_ranks import run_ranks
from tests.proofs import few

pytestmark = pytest.mark.distributed


LAYOUTS = few(["tp2_sp", "pp2"], 1)


@pytest.fixture(scope="module")
def curves(tmp_path_factory) -> dict[str, dict]:
    out = tmp_path_factory.mktemp("curves") / "curves.pt"
    run_ranks(Path(__file__).with_name("curve_worker.py"), 2, str(out), *LAYOUTS)
    return torch.load(out)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_curve_is_the_same_with_fused_kernels_on_and_off(curves, layout):
    on, off = curves[f"{layout}/auto"]["curve"], curves[f"{layout}/off"]["curve"]
    assert len(on) == len(off) == 20
    for step, (fused, composed) in enumerate(zip(on, off, strict=True)):
        assert fused.keys() == composed.keys()
        for name in ("actor/loss", "actor/pg_loss", "actor/entropy", "actor/ppo_kl", "actor/on_pg_clipfrac"):
            # a ratio at the edge of the clipping range may be rounded to either side:
            # one token of some hundred
            slack = 5e-3 if name == "actor/on_pg_clipfrac" else 1e-5
            assert fused[name] == pytest.approx(composed[name], rel=1e-5, abs=slack), f"{name} at step {step}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_two_ways_are_really_two_and_the_policy_moves(curves, layout):
    """Otherwise the comparison above would compare a thing with itself, or a constant one."""
    (fused, composed), (not_fused, all_composed) = (curves[f"{layout}/{way}"]["calls"] for way in ("auto", "off"))
    # two optimizer steps in each of 20
    assert fused >= 40 and composed == 0 and not_fused == 0 and all_composed >= 80
    on = curves[f"{layout}/auto"]["curve"]
    # so the second step's policy is not the first's
    assert any(metrics["actor/on_pg_clipfrac"] > 0 for metrics in on)
    assert any(metrics["actor/ppo_kl"] > 1e-4 for metrics in on)
