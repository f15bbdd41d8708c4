"""The KL over the whole vocabulary, in the loss and in the reward, at every layout and head.

The same number and gradients everywhere, and transformers' number.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.distributed.layout_runs import assert_same_as, cases_of, run_layouts
from tests.distributed.test_layouts import CUTS, HEADS
from tests.synthetic import synthetic_groups
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.distributed

VOCAB, TEMPERATURE = 67, 0.9  # the temperature of layout_worker.COMMON
FULL = [
    "actor_rollout_ref.ref.path=REFERENCE",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.1",
    "actor_rollout_ref.actor.kl_loss_type=full",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.kl_coef=0.05",
    "algorithm.kl_penalty=full",
]
VARIANTS = {
    "whole": FULL,
    "padded": [*FULL, *CUTS["padded"]],
    **{name: [*FULL, *extra, *CUTS["small"]] for name, extra in HEADS.items()},
}
LAYOUTS = {
    1: {"tp1": ({}, VARIANTS)},
    2: {"tp2": ({"tp": 2}, VARIANTS), "tp2_sp": ({"tp": 2, "sp": True}, VARIANTS), "pp2": ({"pp": 2}, VARIANTS)},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """Actor and reference, of different sizes."""
    folder = tmp_path_factory.mktemp("models")
    actor = make_tiny(folder / "actor", "qwen3", vocab=VOCAB, layers=2, hidden=32, heads=4, kv_heads=2)
    return actor, make_tiny(folder / "ref", "qwen2", seed=1, vocab=VOCAB, layers=2, hidden=48, heads=4, kv_heads=2)


@pytest.fixture(scope="module")
def results(models, tmp_path_factory) -> dict[str, dict]:
    """ "layout/variant" -> the run's results."""
    actor, reference = models
    return run_layouts(tmp_path_factory.mktemp("full_kl"), actor, LAYOUTS, reference)


@pytest.mark.parametrize("case", cases_of(LAYOUTS))
def test_loss_metrics_gradients_and_weights_are_those_of_one_process(results, case):
    assert_same_as(results, case, "tp1/whole")
    assert results[case]["metrics"]["actor/kl_loss"] > 0.1


def test_the_penalty_equals_that_of_transformers(models, results):
    """sum_v p (log p - log q) of all logits in float64,
    the mean of the responses' means over their tokens."""
    actor, reference = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval() for path in models)
    means = []
    for sample in (sample for group in synthetic_groups(VOCAB) for sample in group.samples):
        tokens = torch.tensor([[*sample.prompt_tokens, *sample.response_tokens]])
        with torch.no_grad():
            log_p, log_q = ((m(tokens).logits[0, :-1] / TEMPERATURE).log_softmax(-1) for m in (actor, reference))
        counted = torch.tensor(sample.loss_mask, dtype=torch.bool)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)[len(sample.prompt_tokens) - 1 :][counted]
        means.append(float(kl.mean()))
    assert results["tp1/whole"]["metrics"]["actor/reward_kl_penalty"] == pytest.approx(
        sum(means) / len(means), rel=1e-5
    )
