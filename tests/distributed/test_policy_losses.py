"""CISPO, GSPO, SAPO and DPPO: the same loss, metrics, gradients and weights in every kind of layout
and cut, SAPO's and DPPO's those of their papers in float64, with transformers' log-probs."""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.distributed.layout_runs import assert_same, by_world_size, cases_of, run_layouts
from tests.distributed.test_layouts import CUTS, WORLD_SIZES
from tests.distributed.test_layouts import LAYOUTS as ALL_LAYOUTS
from tests.proofs import proof
from tests.synthetic import synthetic_groups
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.distributed

VOCAB, TEMPERATURE = 67, 0.9  # the temperature of layout_worker.COMMON
ACTOR = "actor_rollout_ref.actor"
KL = [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.1", "actor_rollout_ref.ref.path=REFERENCE"]
CISPO = [f"{ACTOR}.policy_loss=cispo", f"{ACTOR}.clip_ratio_low=1", f"{ACTOR}.clip_ratio_high=0.02"]
CISPO += ["exp_manager.experience_replay.enable=true", "algorithm.rollout_correction.rollout_is=token", *KL]
GSPO = [f"{ACTOR}.policy_loss=gspo", f"{ACTOR}.clip_ratio_low=3e-3", f"{ACTOR}.clip_ratio_high=4e-3"]
GSPO += [f"{ACTOR}.clip_ratio_c=1.1", f"{ACTOR}.ppo_epochs=2"]
MEAN = [*GSPO, f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", "algorithm.rollout_correction.rollout_is=sequence"]
FULL_KL = [*GSPO, "algorithm.rollout_correction.rollout_is=token", *KL, f"{ACTOR}.kl_loss_type=full"]
# one optimizer step, against the servers' log-probs: ratios far from 1 before any update
BYPASS = [f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.entropy_coef=0", f"{ACTOR}.use_dapo=false"]
BYPASS += ["algorithm.rollout_correction.bypass_mode=true"]
OF_PAPERS = {
    "sapo": [*BYPASS, f"{ACTOR}.policy_loss=sapo", f"{ACTOR}.tau_pos=0.5", f"{ACTOR}.tau_neg=2.0"],
    "dppo_tv": [*BYPASS, f"{ACTOR}.policy_loss=dppo_tv", f"{ACTOR}.dppo_threshold=0.02"],
    "dppo_kl": [*BYPASS, f"{ACTOR}.policy_loss=dppo_kl", f"{ACTOR}.dppo_threshold=0.01"],
}
SMALL = {name: [*overrides, *CUTS["small"]] for name, overrides in OF_PAPERS.items()}
LAYOUTS = {
    1: {"tp1": ({}, {"cispo": CISPO, "gspo": GSPO, "gspo_mean": MEAN, "gspo_kl": FULL_KL, **OF_PAPERS})},
    2: {
        "tp2_sp": (
            {"tp": 2, "sp": True},
            {
                "cispo": CISPO,
                "gspo_mean": [*MEAN, *CUTS["small"]],
                "gspo_kl": FULL_KL,
                "sapo": SMALL["sapo"],
                "dppo_kl": OF_PAPERS["dppo_kl"],
            },
        ),
        "pp2": (
            {"pp": 2},
            {
                "gspo": [*GSPO, *CUTS["padded"]],
                "gspo_kl": [*FULL_KL, *CUTS["small"]],
                "dppo_tv": [*OF_PAPERS["dppo_tv"], *CUTS["padded"]],
            },
        ),
        "dp2": (
            {},
            {
                "cispo": [*CISPO, *CUTS["small"]],
                "gspo_mean": [*MEAN, *CUTS["single"]],
                "sapo": OF_PAPERS["sapo"],
                "dppo_tv": SMALL["dppo_tv"],
            },
        ),
    },
    4: {
        "tp2_sp_pp2_vpp2": (
            {"tp": 2, "sp": True, "pp": 2, "vpp": 2},
            {"gspo_kl": [*FULL_KL, *CUTS["small"]], "dppo_kl": SMALL["dppo_kl"]},
        )
    },
}
CASES = cases_of(LAYOUTS)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """The actor and the reference."""
    folder = tmp_path_factory.mktemp("policy_losses")
    shape = dict(vocab=VOCAB, layers=4, hidden=32, heads=8, kv_heads=4)  # for four tensor ranks
    return make_tiny(folder / "model", "qwen3", **shape), make_tiny(folder / "reference", "qwen3", seed=1, **shape)


@pytest.fixture(scope="module")
def results(models, tmp_path_factory) -> dict[str, dict]:
    """ "layout/variant" -> the run's results."""
    model, reference = models
    return run_layouts(tmp_path_factory.mktemp("layouts"), model, LAYOUTS, reference)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("tp1/")])
def test_loss_metrics_gradients_and_weights_are_those_of_one_process(results, case):
    assert_same(results[case], results[f"tp1/{case.split('/')[1]}"])


def test_ratios_were_clipped_and_some_were_not(results):
    """Otherwise the comparison above would be that of a policy gradient."""
    for name in ("cispo", "gspo", "gspo_mean", "gspo_kl", "dppo_tv", "dppo_kl"):
        assert 0.0 < results[f"tp1/{name}"]["metrics"]["actor/on_pg_clipfrac"] < 1.0, name
    assert results["tp1/gspo"]["metrics"]["actor/loss"] != results["tp1/gspo_mean"]["metrics"]["actor/loss"]


# ------------------------------------------------------------------------- the papers, in float64


def sapo(new: Tensor, old: Tensor, advantage: float) -> Tensor:
    """arXiv 2511.20347, with temperatures 0.5 and 2."""
    tau = 0.5 if advantage > 0 else 2.0
    return -4 / tau * torch.sigmoid(tau * ((new - old).exp() - 1)) * advantage


def dppo(new: Tensor, old: Tensor, advantage: float, divergence: Tensor, threshold: float) -> Tensor:
    """arXiv 2602.04879, binary forms."""
    ratio = (new - old).exp()
    leaves = ratio > 1 if advantage > 0 else ratio < 1
    return torch.where(leaves & (divergence > threshold), 0.0, -ratio * advantage)


def dppo_tv(new: Tensor, old: Tensor, advantage: float) -> Tensor:
    """Eq. 13."""
    return dppo(new, old, advantage, (new.exp() - old.exp()).abs(), 0.02)


def dppo_kl(new: Tensor, old: Tensor, advantage: float) -> Tensor:
    """Eq. 14."""
    of_others = -old.expm1() * (old.expm1() / new.expm1()).log()
    return dppo(new, old, advantage, old.exp() * (old - new) + of_others, 0.01)


FORMULAS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {"sapo": sapo, "dppo_tv": dppo_tv, "dppo_kl": dppo_kl}


@pytest.fixture(scope="module")
def by_papers(models) -> dict[str, tuple[float, dict[str, Tensor]]]:
    """Loss -> its mean over the step's tokens, and the gradients by name, in float64."""
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float64).eval()
    losses: dict[str, list[Tensor]] = {name: [] for name in FORMULAS}
    for group in synthetic_groups(VOCAB):
        rewards = [sample.reward for sample in group.samples]
        for sample in group.samples:
            tokens = torch.tensor([[*sample.prompt_tokens, *sample.response_tokens]])
            log_p = (model(tokens).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
            new = log_p.gather(1, tokens[0, 1:, None])[len(sample.prompt_tokens) - 1 :, 0]
            old = torch.tensor(sample.rollout_log_probs, dtype=torch.float64)
            counted = torch.tensor(sample.loss_mask, dtype=torch.bool)
            advantage = (sample.reward - fmean(rewards)) / (stdev(rewards) + 1e-6)
            for name, formula in FORMULAS.items():
                losses[name].append(formula(new[counted], old[counted], advantage))
    names, parameters = zip(*model.named_parameters(), strict=True)
    expected = {}
    for name, of_samples in losses.items():
        mean = torch.cat(of_samples).mean()
        gradients = torch.autograd.grad(mean, parameters, retain_graph=True)
        expected[name] = mean.item(), dict(zip(names, gradients, strict=True))
    return expected


def assert_that_of_its_paper(result: dict, expected: tuple[float, dict[str, Tensor]]) -> None:
    loss, gradients = expected
    assert result["metrics"]["actor/loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert result["gradients"].keys() == gradients.keys()
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for name, gradient in gradients.items():
        error = (result["gradients"][name] - gradient).abs().max()
        assert error < 1e-4 * gradient.abs().max() + 1e-5 * largest, f"{name}: {error:.1e}"


@pytest.mark.parametrize("case", [case for case in CASES if case.split("/")[1] in OF_PAPERS])
def test_loss_and_gradients_are_those_of_the_paper_in_float64(results, by_papers, case):
    assert_that_of_its_paper(results[case], by_papers[case.split("/")[1]])


@proof
@pytest.mark.timeout(900)
def test_loss_and_gradients_are_those_of_the_paper_at_every_layout(models, by_papers, tmp_path):
    layouts = by_world_size(ALL_LAYOUTS, WORLD_SIZES, lambda layout: SMALL)
    for case, result in run_layouts(tmp_path, models[0], layouts).items():
        assert_that_of_its_paper(result, by_papers[case.split("/")[1]])
