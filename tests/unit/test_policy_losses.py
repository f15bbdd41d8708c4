"""The policy losses beside DAPO's: CISPO's and GSPO's formulas, and the refusals of all."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_dapo.algorithms.aggregation import AGGREGATIONS, token_weights
from megatron_dapo.algorithms.dapo_loss import LossConfig, TokenBatch, TokenOutputs, dapo_loss
from megatron_dapo.algorithms.metrics import finalize
from megatron_dapo.algorithms.policy_loss import LOSS_FORMULAS, Clip, policy_loss
from megatron_dapo.checks.algorithm_checks import ALGORITHM_CHECKS
from megatron_dapo.checks.known_mistakes import known_mistakes
from megatron_dapo.checks.unused_keys import unused_keys
from megatron_dapo.commands.plan.process_plan import process_plan
from megatron_dapo.config.derived import needs_old_log_probs, needs_reference
from megatron_dapo.config.keys import known_keys
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.actor_rollout_ref import ActorConfig
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.batching import TrainSample
from megatron_dapo.data.packing import collate
from megatron_dapo.training.loss_config import loss_config
from megatron_dapo.training.losses import SequenceRatioLoss, TokenSumLoss, make_loss, sequence_log_ratio
from megatron_dapo.training.reference import Reference
from tests import training_checks as checks
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.unit

ACTOR = checks.ACTOR
MODES = list(AGGREGATIONS)
LONGEST = 9


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_policy_losses_are_those_of_the_config():
    assert set(ActorConfig.model_fields["policy_loss"].annotation.__args__) == set(LOSS_FORMULAS)
    assert LossConfig().policy_loss == ActorConfig().policy_loss == "dapo"


# ----------------------------------------------------------------- the formulas, [B, S] and float64


class Responses:
    """Random responses with some uncounted tokens, and at least one counted one each."""

    def __init__(self, seed: int, spread: float) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.mask = (torch.rand(6, 8, generator=generator) < 0.6).double()
        self.mask[:, 2] = 1.0
        self.log_probs = (-normal(6, 8).abs()).requires_grad_()
        self.old = self.log_probs.detach() + spread * normal(6, 8)
        self.advantages = normal(6, 1).expand(6, 8)
        self.lengths = self.mask.sum(-1)

    def ratios_of_responses(self) -> Tensor:
        """Of each response, with gradient through all of its tokens."""
        return (((self.log_probs - self.old) * self.mask).sum(-1) / self.lengths).exp()

    def loss_of(self, mode: str, clip: Clip, kind: str, importance: Tensor | None = None) -> tuple[Tensor, dict]:
        segments = torch.arange(6)[:, None].expand(6, 8)
        weights, count = token_weights(mode, self.mask, segments, 6, LONGEST, dtype=torch.float64)
        means = self.ratios_of_responses().detach().log()[:, None].expand(6, 8)
        result = policy_loss(
            self.log_probs,
            self.old,
            self.advantages,
            weights,
            count,
            clip,
            kind=kind,
            sequence_log_ratio=means if kind == "gspo" else None,
            importance=importance,
        )
        return result.loss_sum / count, finalize(result.sums, result.maxima)

    def mean(self, losses: Tensor, mode: str) -> Tensor:
        """Aggregate token losses as the mode's name says."""
        sums = (losses * self.mask).sum(-1)
        return {
            "token-mean": sums.sum() / self.mask.sum(),
            "seq-mean-token-sum": sums.mean(),
            "seq-mean-token-mean": (sums / self.lengths).mean(),
            "seq-mean-token-sum-norm": (sums / LONGEST).mean(),
        }[mode]

    def assert_same(self, ours: Tensor, expected: Tensor, rtol: float = 1e-12) -> None:
        torch.testing.assert_close(ours, expected, rtol=rtol, atol=1e-14)
        gradients = [torch.autograd.grad(loss, self.log_probs)[0] for loss in (ours, expected)]
        torch.testing.assert_close(*gradients, rtol=rtol, atol=1e-14)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_cispo_is_the_formula_of_its_paper(mode, seed):
    """Token-mean is the paper's: sum of sg(clip(r)) A log p over all tokens of the batch,
    by their number."""
    responses = Responses(seed, spread=0.8)
    ours, shown = responses.loss_of(mode, Clip(0.4, 0.3), "cispo")
    ratio = (responses.log_probs - responses.old).exp().detach()
    losses = -ratio.clamp(0.6, 1.3) * responses.advantages * responses.log_probs
    responses.assert_same(ours, responses.mean(losses, mode))
    share = lambda where: float((where * responses.mask).sum() / responses.mask.sum())  # noqa: E731
    assert shown["actor/on_pg_clipfrac"] == pytest.approx(share(ratio > 1.3)) and share(ratio > 1.3) > 0
    assert shown["actor/on_pg_clipfrac_lower"] == pytest.approx(share(ratio < 0.6)) and share(ratio < 0.6) > 0
    assert shown["actor/pg_loss"] == pytest.approx(ours.item())


@pytest.mark.parametrize("seed", range(3))
def test_gspo_is_the_formula_of_its_paper(seed):
    """arXiv 2507.18071, eq. 5 and 7: a mean over responses,
    the gradient through every token of a response."""
    responses = Responses(seed, spread=0.3)
    ours, shown = responses.loss_of("seq-mean-token-mean", Clip(0.05, 0.08), "gspo")
    ratio, advantage = responses.ratios_of_responses(), responses.advantages[:, 0]
    objective = torch.minimum(ratio * advantage, ratio.clamp(0.95, 1.08) * advantage)
    responses.assert_same(ours, -objective.mean())
    num_above = (((advantage > 0) & (ratio > 1.08)) * responses.lengths).sum()
    assert shown["actor/on_pg_clipfrac"] == pytest.approx(float(num_above / responses.lengths.sum()))
    assert shown["actor/ratio_max"] == pytest.approx(float(ratio.detach().max()))


def test_a_response_of_gspo_is_clipped_whole_and_others_are_not():
    responses = Responses(3, spread=0.3)
    ours, _ = responses.loss_of("token-mean", Clip(0.05, 0.08), "gspo")
    gradient = torch.autograd.grad(ours, responses.log_probs)[0]
    ratio, advantage = responses.ratios_of_responses(), responses.advantages[:, 0]
    clipped = ((advantage > 0) & (ratio > 1.08)) | ((advantage < 0) & (ratio < 0.95))
    assert 0 < clipped.sum() < 6
    assert not gradient[clipped].any()
    assert torch.equal(gradient[~clipped] != 0, responses.mask[~clipped] != 0)


@pytest.mark.parametrize("mode", MODES)
def test_any_aggregation_weighs_the_responses_of_gspo_as_it_weighs_their_tokens(mode):
    responses = Responses(4, spread=0.3)
    ours, _ = responses.loss_of(mode, Clip(0.05, 0.08, 1.1), "gspo")
    ratio, advantage = responses.ratios_of_responses()[:, None], responses.advantages
    losses = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.95, 1.08))
    losses = torch.where(advantage < 0, torch.minimum(losses, -1.1 * advantage), losses)  # dual clip
    responses.assert_same(ours, responses.mean(losses.expand(6, 8), mode))


@pytest.mark.parametrize("kind", LOSS_FORMULAS)
def test_at_the_old_policy_all_of_them_are_the_policy_gradient(kind):
    """With one optimizer step per rollout step: the gradient of -A log p,
    weighed as the mode says."""
    responses = Responses(5, spread=0.0)
    ours, shown = responses.loss_of("seq-mean-token-mean", Clip(3e-4, 4e-4), kind)
    gradient = torch.autograd.grad(ours, responses.log_probs)[0]
    losses = responses.mean(-responses.advantages * responses.log_probs, "seq-mean-token-mean")
    torch.testing.assert_close(gradient, torch.autograd.grad(losses, responses.log_probs)[0], rtol=1e-12, atol=1e-14)
    assert shown["actor/ratio_max"] == 1.0
    assert shown["actor/on_pg_clipfrac"] == shown["actor/on_pg_clipfrac_lower"] == 0.0


@pytest.mark.parametrize("kind", LOSS_FORMULAS)
def test_a_weight_against_the_server_multiplies_the_loss_of_its_token(kind):
    responses = Responses(6, spread=0.3)
    weight = 0.5 + torch.rand(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole, _ = responses.loss_of("token-mean", Clip(0.05, 0.08), kind)
    weighed, _ = responses.loss_of("token-mean", Clip(0.05, 0.08), kind, importance=weight)
    gradients = [torch.autograd.grad(loss, responses.log_probs)[0] for loss in (whole, weighed)]
    torch.testing.assert_close(gradients[1], gradients[0] * weight, rtol=1e-12, atol=1e-14)


def test_with_equal_weights_in_a_response_gspo_weighs_the_objective_of_the_response():
    """The effect of a correction per sequence, and of a rejection of whole sequences."""
    responses = Responses(7, spread=0.3)
    of_response = tensor(0.0, 1.0, 0.5, 2.0, 1.0, 0.0)
    importance = of_response[:, None].expand(6, 8)
    ours, _ = responses.loss_of("seq-mean-token-mean", Clip(0.05, 0.08), "gspo", importance=importance)
    ratio, advantage = responses.ratios_of_responses(), responses.advantages[:, 0]
    objective = torch.minimum(ratio * advantage, ratio.clamp(0.95, 1.08) * advantage)
    responses.assert_same(ours, -(of_response * objective).mean())


# advantage, ratio -> weight, clipped above, clipped below; low 0.2, high 0.28, log-prob -2
WEIGHTS = {
    "good, inside": (1.0, 1.1, 1.1, 0, 0),
    "good, above": (1.0, 1.5, 1.28, 1, 0),
    "good, below: weighed up": (2.0, 0.5, 0.8, 0, 1),
    "bad, above: weighed down": (-1.0, 4.0, 1.28, 1, 0),
    "bad, below": (-2.0, 0.5, 0.8, 0, 1),
    "far beyond the clamp of the log-ratio": (1.0, math.exp(25), 1.28, 1, 0),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_no_token_of_cispo_loses_its_gradient(name):
    advantage, ratio, weight, above, below = WEIGHTS[name]
    log_prob = tensor(-2.0).requires_grad_()
    batch = TokenBatch(tensor(1.0), torch.tensor(1), tensor(advantage), log_prob.detach() - math.log(ratio))
    result = dapo_loss(TokenOutputs(log_prob), batch, LossConfig(policy_loss="cispo", report_mismatch=False))
    result.loss_sum.backward()
    assert result.loss_sum.item() == pytest.approx(2.0 * weight * advantage)
    assert log_prob.grad.item() == pytest.approx(-weight * advantage)
    shown = finalize(result.sums)
    assert (shown["actor/on_pg_clipfrac"], shown["actor/on_pg_clipfrac_lower"]) == (above, below)
    assert shown["actor/dual_clipfrac"] == 0


def test_a_ratio_of_sequences_cannot_be_had_without_their_means():
    batch = TokenBatch(tensor(1.0), torch.tensor(1), tensor(1.0), tensor(-1.0))
    with pytest.raises(AssertionError, match="mean of their log-ratios"):
        dapo_loss(TokenOutputs(tensor(-1.0)), batch, LossConfig(policy_loss="gspo", report_mismatch=False))


def test_no_other_loss_reads_the_means_of_sequences():
    batch = TokenBatch(tensor(1.0), torch.tensor(1), tensor(1.0), tensor(-1.0), sequence_log_ratio=tensor(3.0))
    for kind in LOSS_FORMULAS.keys() - {"gspo"}:
        result = dapo_loss(TokenOutputs(tensor(-1.0)), batch, LossConfig(policy_loss=kind, report_mismatch=False))
        assert finalize(result.sums)["actor/ratio_mean"] == 1.0


# --------------------------------------------------------------------------------- in a micro-batch


def sample(index: int, mask: list[int], log_prob: float) -> TrainSample:
    mask = np.array([*mask, 0], dtype=np.float32)  # of the position that predicts
    tokens = np.arange(len(mask), dtype=np.int64)
    return TrainSample(index, str(index), tokens, mask, log_prob * mask, 1.0, 0 * tokens)


@pytest.mark.parametrize("packed", [True, False])
def test_every_token_has_the_mean_log_ratio_of_its_own_sequence(packed):
    samples = [sample(3, [0, 1, 1, 0, 1], -1.0), sample(5, [0, 0], 0.0), sample(4, [1], -4.0)]
    batch = collate(samples, pad_multiple=4, packed=packed)
    log_probs = torch.full_like(batch.loss_mask, math.nan)  # without counted tokens it is not read
    log_probs[batch.loss_mask != 0] = torch.tensor([-1.0, -2.0, -0.25, -1.5])
    # no old log-probs: those of the policy itself
    assert not sequence_log_ratio(batch.loss_mask, None, batch).any()
    means = sequence_log_ratio(log_probs.requires_grad_(), batch.rollout_log_probs, batch)
    assert means.shape == batch.tokens.shape and means.dtype == torch.float32 and not means.requires_grad
    by_sample = {i: values.tolist() for i, values in batch.by_sample(means).items()}
    assert by_sample[5] == [0.0] * 3 and by_sample[4] == [2.5, 0.0]
    assert by_sample[3] == pytest.approx([0.0, *[-0.25 / 3] * 2, 0.0, -0.25 / 3, 0.0])
    assert means.sum() == pytest.approx(2.5 - 0.25)  # nothing in the padding


NO_ENTROPY = f"{ACTOR}.entropy_coef=0"
BUILT_IN = {
    "gspo": [f"{ACTOR}.clip_ratio_low=3e-4", f"{ACTOR}.clip_ratio_high=4e-4", f"{ACTOR}.clip_ratio_c=null"]
    + [f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"],
    "cispo": [f"{ACTOR}.clip_ratio_low=1", f"{ACTOR}.clip_ratio_high=0.02"],
    "sapo": [f"{ACTOR}.use_dapo=false", f"{ACTOR}.tau_pos=0.5", f"{ACTOR}.tau_neg=2.0"],
    "dppo_tv": [f"{ACTOR}.use_dapo=false", f"{ACTOR}.dppo_threshold=1e-4"],
}


def step(layout, model_path, overrides: list[str], num_updates: int = 1) -> tuple[dict, list[Tensor]]:
    """Metrics and gradients of a mini-batch, after updates so that ratios are not 1."""
    policy, mini_batches = checks.policy_and_mini_batches(layout, model_path, [*overrides, f"{ACTOR}.optim.lr=1e-4"])
    config = load_config(None, [*checks.COMMON, f"actor_rollout_ref.model.path={model_path}", *overrides])
    if needs_reference(config):
        mini_batches = Reference(config, layout).score(mini_batches)
    for _ in range(num_updates):
        policy.update(mini_batches, weight_version=0)
    metrics = policy.metrics_of(policy.accumulate_gradients(mini_batches[0]))
    return metrics, [p.main_grad.clone() for chunk in policy.model.chunks for p in chunk.parameters()]


@pytest.mark.parametrize("kind", BUILT_IN)
@pytest.mark.parametrize("cut", [checks.ONE_MICRO_BATCH, checks.MANY_MICRO_BATCHES])
@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_the_built_in_loss_is_that_of_a_function_written_from_the_paper(layout, model_path, kind, cut, kernels):
    common = [NO_ENTROPY, cut, f"{ACTOR}.fused_kernels={kernels}"]
    own = [*common, f"{ACTOR}.use_dapo=false", f"{ACTOR}.loss_function=tests.loss_functions:{kind}"]
    metrics, gradients = step(layout, model_path, [*common, f"{ACTOR}.policy_loss={kind}", *BUILT_IN[kind]])
    own_metrics, own_gradients = step(layout, model_path, own)
    for ours, expected in zip(gradients, own_gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
    for name in ("actor/loss", "actor/entropy_sampled", "actor/rollout_kl"):
        assert metrics[name] == pytest.approx(own_metrics[name], rel=1e-4, abs=1e-6), name
    assert metrics["actor/on_pg_clipfrac"] == pytest.approx(own_metrics["own/clipfrac"])
    assert (own_metrics["own/clipfrac"] > 0) == (kind != "sapo")


WITH_ALL = [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.1", f"{ACTOR}.entropy_coef=0.02"]
WITH_ALL += [f"{ACTOR}.clip_ratio_c=4.0"]
CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    "kl, groups, level", [("low_var_kl", 4, "sequence"), ("full", 4, "token"), ("mse", 8, "token")]
)
def test_the_terms_beside_the_policy_loss_are_in_gspo_as_in_dapo(layout, model_path, tmp_path, kl, groups, level):
    """At the old policy both have the same gradient, with anything else in the loss. Also with 8
    groups in one optimizer step of the rollout step, without old log-probs."""
    reference = make_tiny(tmp_path / "reference", "qwen3", seed=1, layers=2, hidden=32, heads=4)
    pairs = []
    for kind in ("dapo", "gspo"):
        overrides = [*WITH_ALL, f"{ACTOR}.kl_loss_type={kl}", f"{ACTOR}.policy_loss={kind}"]
        overrides += [f"actor_rollout_ref.ref.path={reference}", f"{ACTOR}.ppo_mini_batch_size={groups}"]
        overrides.append(f"{CORRECTION}.rollout_is={level}")
        pairs.append(step(layout, model_path, overrides, num_updates=0))
    (dapo, dapo_gradients), (gspo, gspo_gradients) = pairs
    for ours, expected in zip(gspo_gradients, dapo_gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
    assert gspo == pytest.approx(dapo, rel=1e-4, abs=1e-6)
    assert gspo["actor/kl_loss"] > 1e-3 and {"actor/entropy", "actor/rollout_is_mean"} <= gspo.keys()


# ---------------------------------------------------------------------------------- the config


def config_of(*overrides: str):
    return load_config(None, list(overrides))


@pytest.mark.parametrize("kind", LOSS_FORMULAS)
def test_the_key_chooses_the_loss(kind):
    config = config_of(f"{ACTOR}.policy_loss={kind}", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum")
    made = loss_config(config)
    assert made.policy_loss == kind and made.clip.dual == (3.0 if kind in ("dapo", "gspo") else None)
    loss = make_loss(config, made)
    cls = SequenceRatioLoss if kind == "gspo" else TokenSumLoss
    assert type(loss) is cls and loss.aggregation == "seq-mean-token-sum"


@pytest.mark.parametrize(
    "overrides, temperatures, divergence",
    [
        (["sapo"], (1.0, 1.05), 0.0),
        (["sapo", f"{ACTOR}.tau_pos=0.5", f"{ACTOR}.tau_neg=2"], (0.5, 2.0), 0.0),
        (["dppo_tv"], (1.0, 1.05), 0.15),
        (["dppo_kl"], (1.0, 1.05), 0.05),
        (["dppo_kl", f"{ACTOR}.dppo_threshold=0.2"], (1.0, 1.05), 0.2),
    ],
)
def test_the_gate_and_the_mask_have_their_authors_numbers_unless_told(overrides, temperatures, divergence):
    clip = loss_config(config_of(f"{POLICY_LOSS}={overrides[0]}", *overrides[1:])).clip
    assert (clip.tau_pos, clip.tau_neg) == temperatures and clip.divergence == divergence


def test_passes_over_the_same_samples_compute_old_log_probs_for_any_of_them():
    one_step = ["data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8"]
    for kind in LOSS_FORMULAS:
        config = config_of(*one_step, f"{ACTOR}.policy_loss={kind}")
        assert not needs_old_log_probs(config)
        assert needs_old_log_probs(config_of(*one_step, f"{ACTOR}.policy_loss={kind}", f"{ACTOR}.ppo_epochs=2"))


POLICY_LOSS = f"{ACTOR}.policy_loss"
USE_DAPO = f"{ACTOR}.use_dapo"
ON = f"{USE_DAPO}=true"
LOSS_FUNCTION = f"{ACTOR}.loss_function"
REPLAY = "exp_manager.experience_replay.enable=true"
MISTAKES = {
    "gspo needs bounds of its own": (["gspo"], POLICY_LOSS, "set use_dapo to true"),
    "cispo needs bounds of its own": (["cispo"], POLICY_LOSS, "1 +- clip_ratio 0.2"),
    "bounds that nobody reads are told once": (
        ["gspo", f"{USE_DAPO}=false", f"{ACTOR}.clip_ratio_low=3e-4", f"{ACTOR}.clip_ratio_high=4e-4"],
        POLICY_LOSS,
        "clip_ratio_low=3e-4",
    ),
    "gspo does not replay": (
        ["gspo", ON, REPLAY],
        POLICY_LOSS,
        "one ratio per response",
    ),
    "cispo does not clip replayed tokens": (
        ["cispo", ON, REPLAY, f"{ACTOR}.off_policy_shaping_mode=dapo_clip_higher"],
        f"{ACTOR}.off_policy_shaping_mode",
        "to exgrpo_policy_shaping",
    ),
    "cispo has no dual clip": (
        ["cispo", ON, f"{ACTOR}.clip_ratio_c=5"],
        f"{ACTOR}.clip_ratio_c",
        "policy_loss is cispo",
    ),
    "sapo has no clip": (["sapo", ON], USE_DAPO, "policy_loss is sapo"),
    "a clip that nobody reads is told once": (
        ["dppo_kl", f"{ACTOR}.clip_ratio=1"],
        f"{ACTOR}.clip_ratio",
        "is dppo_kl",
    ),
    "dppo has no dual clip": (["dppo_tv", f"{ACTOR}.clip_ratio_c=5"], f"{ACTOR}.clip_ratio_c", "dapo or gspo"),
    "the temperatures are sapo's": (["dppo_tv", f"{ACTOR}.tau_pos=2"], f"{ACTOR}.tau_pos", "policy_loss to sapo"),
    "the threshold is dppo's": (
        ["sapo", f"{ACTOR}.dppo_threshold=0.1"],
        f"{ACTOR}.dppo_threshold",
        "dppo_tv or dppo_kl",
    ),
    "sapo does not clip replayed tokens": (
        ["sapo", REPLAY, f"{ACTOR}.off_policy_shaping_mode=dapo_clip_higher"],
        f"{ACTOR}.off_policy_shaping_mode",
        "to exgrpo_policy_shaping",
    ),
    "a loss of one's own is the whole loss": (
        ["gspo", f"{ACTOR}.loss_function=a.b:c"],
        POLICY_LOSS,
        "loss_function is a.b:c",
    ),
    "no ratio is below 0": (
        ["cispo", ON, f"{ACTOR}.clip_ratio_low=1.5"],
        f"{ACTOR}.clip_ratio_low",
        "at most 1",
    ),
    "a bound of 0 would clip nothing of gspo": (
        ["gspo", ON, f"{ACTOR}.clip_ratio_low=1", f"{ACTOR}.clip_ratio_high=1.5"],
        f"{ACTOR}.clip_ratio_low",
        "must be below 1",
    ),
}


def mistakes_of(config: Config) -> list[str]:
    return [*known_mistakes(ALGORITHM_CHECKS, config), *unused_keys(config, known_keys().values())]


@pytest.mark.parametrize("name", MISTAKES)
def test_what_does_not_go_together_is_one_sentence(name):
    (kind, *overrides), key, text = MISTAKES[name]
    (mistake,) = mistakes_of(config_of(f"{POLICY_LOSS}={kind}", *overrides))
    assert f"{key} is" in mistake and text in mistake


@pytest.mark.parametrize(
    "overrides",
    [
        ["cispo", ON, f"{ACTOR}.clip_ratio_low=1", f"{ACTOR}.clip_ratio_high=0.3"],
        ["cispo", ON, f"{ACTOR}.clip_ratio_high=4"],  # beyond the dual clip, which does not act
        ["cispo", ON, REPLAY],
        ["cispo", ON, "algorithm.rollout_correction.rollout_is=token", "actor_rollout_ref.rollout.max_staleness=1"],
        ["gspo", ON, "algorithm.rollout_correction.rollout_is=token", "actor_rollout_ref.rollout.max_staleness=1"],
        ["gspo", ON, f"{ACTOR}.clip_ratio_low=3e-4", f"{ACTOR}.clip_ratio_high=4e-4"],
        ["sapo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", f"{ACTOR}.tau_pos=0.5", REPLAY],
        ["sapo", "algorithm.rollout_correction.rollout_is=token", "actor_rollout_ref.rollout.max_staleness=1"],
        ["dppo_tv", "algorithm.rollout_correction.bypass_mode=true", "actor_rollout_ref.rollout.max_staleness=1"],
        ["dppo_kl", f"{ACTOR}.dppo_threshold=0.1", "algorithm.adv_estimator=gae"],
    ],
)
def test_what_their_papers_ask_for_is_no_mistake(overrides):
    config = config_of(f"{POLICY_LOSS}={overrides[0]}", *overrides[1:])
    assert not mistakes_of(config)


def test_the_plan_names_the_loss_and_its_cost():
    plans = {kind: process_plan(config_of(f"{POLICY_LOSS}={kind}")) for kind in LOSS_FORMULAS}
    assert "gspo: one ratio per response; each logit is computed twice" in plans["gspo"]
    assert "cispo: the clipped ratio weighs the log-prob" in plans["cispo"]
    for kind in LOSS_FORMULAS.keys() - {"dapo"}:
        assert f"{kind}: " in plans[kind] and f"{kind}: " not in plans["dapo"]
        assert ("ratio clipped to" in plans[kind]) == (kind in ("cispo", "gspo"))
