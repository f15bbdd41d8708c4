"""A loss of the user's own with the built-in formula is the built-in one;
mistakes are sentences."""

import numpy as np
import pytest
import torch

from megatron_dapo.checkpointing.config_changes import ConfigChange, matters
from megatron_dapo.checks.algorithm_checks import staleness, terms_beside_loss_function
from megatron_dapo.checks.unused_keys import unused_keys
from megatron_dapo.commands.plan.process_plan import process_plan
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.own_function import OwnFunction
from megatron_dapo.config.derived import needs_reference
from megatron_dapo.config.key_names import LOSS_FUNCTION
from megatron_dapo.config.keys import known_keys
from megatron_dapo.config.loader import load_config
from megatron_dapo.data.batching import TrainSample
from megatron_dapo.data.packing import collate
from megatron_dapo.models.log_prob_head import Scores
from megatron_dapo.training.loss_config import loss_config
from megatron_dapo.training.losses import SequenceSumLoss, loss_sequences, make_loss
from tests import training_checks as checks

pytestmark = pytest.mark.unit

ACTOR = checks.ACTOR
OWN = [f"{LOSS_FUNCTION}=tests.loss_functions:dapo", f"{ACTOR}.entropy_coef=0", f"{ACTOR}.use_dapo=false"]
BUILT_IN = [f"{ACTOR}.entropy_coef=0", f"{ACTOR}.use_dapo=true"]


@pytest.mark.parametrize("cut", [checks.ONE_MICRO_BATCH, checks.MANY_MICRO_BATCHES])
@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_dapo_written_as_such_a_function_is_the_built_in_loss(layout, model_path, cut, kernels):
    by_loss = {}
    for name, overrides in (("built in", BUILT_IN), ("own", OWN)):
        overrides = [*overrides, cut, f"{ACTOR}.fused_kernels={kernels}"]
        policy, mini_batches = checks.policy_and_mini_batches(layout, model_path, overrides)
        policy.update(mini_batches, weight_version=0)  # so that the second has ratios other than 1
        metrics = policy.metrics_of(policy.accumulate_gradients(mini_batches[0]))
        gradients = [p.main_grad.clone() for chunk in policy.model.chunks for p in chunk.parameters()]
        by_loss[name] = metrics, gradients
    built_in, own = by_loss["built in"], by_loss["own"]
    for actual, expected in zip(own[1], built_in[1], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    for name in own[0].keys() & built_in[0].keys():
        assert own[0][name] == pytest.approx(built_in[0][name], rel=1e-4, abs=1e-6), name
    assert {"actor/loss", "actor/entropy", "actor/entropy_sampled", "actor/rollout_kl"} <= own[0].keys()
    for side in ("clipfrac", "clipfrac_lower"):
        assert own[0][f"own/{side}"] == pytest.approx(built_in[0][f"actor/on_pg_{side}"])


def test_it_reports_tokens_of_older_weights_like_the_built_in_loss(layout, model_path):
    metrics = {}
    for name, overrides in (("built in", BUILT_IN), ("own", OWN)):
        late = [*overrides, "actor_rollout_ref.rollout.max_staleness=1"]
        policy, mini_batches = checks.policy_and_mini_batches(layout, model_path, late)
        metrics[name] = policy.update(mini_batches[:1], weight_version=1)
    names = ["actor/rollout_kl_stale", "actor/rollout_k3_stale", "actor/rollout_ess_stale", "actor/rollout_ess_all"]
    names.append("actor/rollout_abs_diff_all")
    for name in names:
        assert metrics["own"][name] == pytest.approx(metrics["built in"][name], rel=1e-5)


def test_a_metric_with_a_name_of_ours_is_refused(layout, model_path):
    overrides = [*OWN, f"{LOSS_FUNCTION}=tests.loss_functions:nothing"]
    policy, mini_batches = checks.policy_and_mini_batches(layout, model_path, overrides)
    with pytest.raises(UserError, match="actor/loss is a metric of ours"):
        policy.update(mini_batches, weight_version=0)


def sample(index: int, mask: list[int], advantage: float) -> TrainSample:
    mask = np.array([*mask, 0], dtype=np.float32)  # of the position that predicts
    tokens = np.arange(len(mask), dtype=np.int64)
    return TrainSample(index, str(index), tokens, mask, -mask, advantage, 0 * tokens)


@pytest.mark.parametrize("packed", [True, False])
def test_a_sequence_goes_from_its_first_counted_token_to_its_last(packed):
    samples = [sample(3, [0, 1, 1, 0, 1], 2.0), sample(5, [0, 0], 1.0), sample(4, [1], -1.0)]
    batch = collate(samples, pad_multiple=4, packed=packed)
    log_probs = batch.loss_mask * (1.0 + torch.arange(batch.tokens.numel()).view_as(batch.tokens))
    sequences = loss_sequences(Scores(log_probs, None, None), batch)
    assert [s.mask.tolist() for s in sequences] == [[1, 1, 0, 1], [1]]
    assert [s.advantages.tolist() for s in sequences] == [[2.0] * 4, [-1.0]]
    assert all(s.ref_log_probs is None and torch.equal(s.old_log_probs, s.log_probs) for s in sequences)
    assert sequences[0].log_probs.tolist() == [2, 3, 0, 5]


@pytest.mark.parametrize(
    "override, key",
    [
        (f"{ACTOR}.entropy_coef=0.01", f"{ACTOR}.entropy_coef"),
        (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.use_kl_loss"),
        ("algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is"),
        ("exp_manager.experience_replay.enable=true", "exp_manager.experience_replay.enable"),
        (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum", f"{ACTOR}.loss_agg_mode"),
        (f"{ACTOR}.use_dapo=true", f"{ACTOR}.use_dapo"),
    ],
)
def test_what_it_cannot_be_combined_with_is_one_sentence(override, key):
    config = load_config(None, [f"{LOSS_FUNCTION}=a.b:c", override])
    (mistake,) = [*terms_beside_loss_function(config), *unused_keys(config, known_keys().values())]
    assert mistake.startswith(f"{key} is ") and LOSS_FUNCTION in mistake
    assert not list(terms_beside_loss_function(load_config(None, [f"{LOSS_FUNCTION}=a.b:c"])))


@pytest.mark.parametrize("name", ["plain", "module:", ":function"])
def test_a_name_without_a_path_is_a_mistake(name):
    with pytest.raises(UserError, match=f"{LOSS_FUNCTION} is .* must be package.module:name, or null"):
        load_config(None, [f"{LOSS_FUNCTION}={name!r}"])


@pytest.mark.parametrize("path", ["no.such:module", "tests.loss_functions:absent", "tests.loss_functions:NO_FUNCTION"])
def test_what_cannot_be_imported_is_one_sentence(path):
    with pytest.raises(UserError) as caught:
        OwnFunction.load(LOSS_FUNCTION, path)
    assert len(caught.value.sentences) == 1 and path in caught.value.sentences[0]


def test_a_path_of_a_reference_makes_one():
    own = f"{LOSS_FUNCTION}=a.b:c"
    path = "actor_rollout_ref.ref.path=somewhere"
    assert [needs_reference(load_config(None, overrides)) for overrides in ([own], [path], [own, path])] == [
        False,
        False,
        True,
    ]


GOOD = (torch.tensor(-0.5, requires_grad=True), 2, {"own/metric": (1.0, 2)})


@pytest.mark.parametrize(
    "answer",
    [
        GOOD[:2],
        (torch.zeros(2), 2, {}),
        ("loss", 2, {}),
        (GOOD[0], 2, {"own/metric": 1.0}),
        (GOOD[0], 2, [("own/metric", 1.0)]),
        (GOOD[0], None, {}),
    ],
)
def test_an_answer_of_another_form_is_one_sentence_with_the_key(answer):
    loss = SequenceSumLoss(lambda sequences: answer, 1.0, with_entropy=False)
    with pytest.raises(UserError, match=f"{LOSS_FUNCTION}: the function must return"):
        loss.finish(*scores_of_one_sequence())


def test_an_exception_is_one_sentence_with_key_and_line(tmp_path, monkeypatch):
    (tmp_path / "loss_that_fails.py").write_text("def loss(sequences):\n    return sequences[0].nothing\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(None, [f"{LOSS_FUNCTION}=loss_that_fails:loss"])
    loss = make_loss(config, loss_config(config))
    with pytest.raises(UserError, match=f"{LOSS_FUNCTION}: loss_that_fails:loss failed .*AttributeError") as error:
        loss.finish(*scores_of_one_sequence())
    assert 'loss_that_fails.py", line 2, in loss' in error.value.details


def test_a_plain_number_is_a_loss_without_gradient_and_half_a_count_is_refused():
    scores, batch = scores_of_one_sequence()
    loss_sum, count, _ = SequenceSumLoss(lambda sequences: (0.0, 2, {}), 1.0, with_entropy=False).finish(scores, batch)
    loss_sum.backward()
    assert (loss_sum.item(), count.item()) == (0.0, 2) and not scores.log_probs.grad.any()
    with pytest.raises(RuntimeError, match="whole number"):
        SequenceSumLoss(lambda sequences: (*GOOD[:1], 2.5, {}), 1.0, with_entropy=False).finish(scores, batch)


def scores_of_one_sequence() -> tuple:
    batch = collate([sample(3, [0, 1, 1], 2.0)], pad_multiple=4)
    return Scores(torch.zeros_like(batch.loss_mask, requires_grad=True), None, None), batch


def test_it_may_correct_for_samples_of_earlier_weights_itself():
    late = "actor_rollout_ref.rollout.max_staleness=2"
    assert list(staleness(load_config(None, [late])))
    assert not list(staleness(load_config(None, [late, f"{LOSS_FUNCTION}=a.b:c"])))


def test_whether_it_is_given_the_entropy_matters_on_resume():
    change = ConfigChange(f"{ACTOR}.calculate_entropy", True, False)
    assert not matters(change, load_config(None, []))
    assert matters(change, load_config(None, [f"{LOSS_FUNCTION}=a.b:c"]))


def test_the_plan_names_it_in_place_of_unused_options():
    plan = process_plan(load_config(None, [f"{LOSS_FUNCTION}=a.b:c"]))
    assert "a.b:c, in place of clip and aggregation" in plan
    assert "clip higher" not in plan and "token level loss" not in plan


def test_a_module_that_ends_its_process_is_named(tmp_path, monkeypatch):
    (tmp_path / "loss_that_exits.py").write_text("import sys; sys.exit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"calls sys.exit\(3\) while it is imported"):
        OwnFunction.load(LOSS_FUNCTION, "loss_that_exits:loss")
