"""The config's effects on the loss."""

import pytest

from megatron_dapo.algorithms.dapo_loss import metric_names
from megatron_dapo.algorithms.rollout_correction import RatioBounds, RolloutCorrection
from megatron_dapo.commands.plan.process_plan import process_plan
from megatron_dapo.config.derived import needs_old_log_probs
from megatron_dapo.config.loader import load_config
from megatron_dapo.training.loss_config import correction_per_step, loss_config

pytestmark = pytest.mark.unit


def test_the_entropy_is_reported_unless_nothing_asks_for_it():
    silent = ["actor_rollout_ref.actor.calculate_entropy=false"]
    with_bonus = [*silent, "actor_rollout_ref.actor.entropy_coef=0.01"]
    reports = {"default": [], "silent": silent, "with_bonus": with_bonus}
    has_entropy = {
        name: "actor/entropy" in metric_names(loss_config(load_config(None, overrides)))[0]
        for name, overrides in reports.items()
    }
    assert has_entropy == {"default": True, "silent": False, "with_bonus": True}


SEVERAL_STEPS = "data.train_batch_size=16 actor_rollout_ref.actor.ppo_mini_batch_size=8"
ONE_STEP = "data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=8"
ICEPOP = "rollout_is=token rollout_is_threshold=0.5_5.0"


def loaded(text: str, correction: str = ""):
    return load_config(None, [*text.split(), *(f"algorithm.rollout_correction.{key}" for key in correction.split())])


@pytest.mark.parametrize(
    "correction, low, high",
    [
        ("", None, None),
        ("rollout_is=token", None, 2.0),
        ("rollout_is=token rollout_is_threshold=5", None, 5.0),
        (ICEPOP, 0.5, 5.0),
    ],
)
def test_with_one_optimizer_step_the_loss_weighs_tokens_by_itself(correction, low, high):
    config = loaded(ONE_STEP, correction)
    loss = loss_config(config)
    assert (loss.rollout_is_threshold_lower, loss.rollout_is_threshold, loss.off_policy) == (low, high, None)
    assert correction_per_step(config) is None and not needs_old_log_probs(config)


@pytest.mark.parametrize(
    "steps, correction, expected",
    [
        (SEVERAL_STEPS, "", None),
        (SEVERAL_STEPS, "rollout_is=token", RolloutCorrection("token")),
        (SEVERAL_STEPS, ICEPOP, RolloutCorrection("token", RatioBounds(0.5, 5.0))),
        (ONE_STEP, "rollout_is=sequence", RolloutCorrection("sequence")),
        (
            ONE_STEP,
            "rollout_rs=token_k1 rollout_rs_threshold=0.5_4",
            RolloutCorrection(rollout_rs="token_k1", rollout_rs_bounds=RatioBounds(0.5, 4.0)),
        ),
        (
            ONE_STEP,
            "rollout_rs=seq_mean_k1 rollout_rs_threshold=1.25",
            RolloutCorrection(rollout_rs="seq_mean_k1", rollout_rs_bounds=RatioBounds(0.8, 1.25)),
        ),
        (
            ONE_STEP,
            "rollout_is=token rollout_rs=seq_mean_k3 rollout_rs_threshold=0.01",
            RolloutCorrection("token", rollout_rs="seq_mean_k3", rollout_rs_bounds=RatioBounds(None, 0.01)),
        ),
        (ONE_STEP, "rollout_token_veto_threshold=1e-4", RolloutCorrection(token_veto=1e-4)),
    ],
)
def test_otherwise_tokens_are_weighed_before_the_update_with_old_log_probs(steps, correction, expected):
    config = loaded(steps, correction)
    assert correction_per_step(config) == expected
    assert loss_config(config).rollout_is_threshold is None and needs_old_log_probs(config)


def test_bypass_mode_needs_no_old_log_probs_but_for_a_kl_in_the_reward_or_a_critic():
    config = loaded(SEVERAL_STEPS, "bypass_mode=true")
    assert not needs_old_log_probs(config) and loss_config(config).bypass_mode and correction_per_step(config) is None
    assert needs_old_log_probs(loaded(f"{SEVERAL_STEPS} algorithm.kl_ctrl.kl_coef=0.1", "bypass_mode=true"))
    critic = f"{SEVERAL_STEPS} algorithm.adv_estimator=gae"
    assert needs_old_log_probs(loaded(critic, "bypass_mode=true"))
    assert not needs_old_log_probs(loaded(critic, "bypass_mode=true max_mismatch=null"))


@pytest.mark.parametrize(
    "steps, correction, line",
    [
        (SEVERAL_STEPS, "rollout_is=token", "rollout_is token (2.0); a forward pass for old log-probs"),
        (ONE_STEP, ICEPOP, "rollout_is token (0.5_5.0); no pass for old log-probs"),
        (
            ONE_STEP,
            "rollout_rs=seq_mean_k3 rollout_rs_threshold=0.01 rollout_token_veto_threshold=1e-4",
            "rollout_rs seq_mean_k3 (0.01), veto below 0.0001; a forward pass for old log-probs",
        ),
        (
            SEVERAL_STEPS,
            "bypass_mode=true",
            "bypass_mode, the servers' log-probs are the old ones; no pass for old log-probs",
        ),
    ],
)
def test_the_plan_shows_the_correction_and_its_cost(steps, correction, line):
    assert line in process_plan(loaded(steps, correction))
    assert "correction" not in process_plan(loaded(steps))


def test_older_weights_are_reported_if_possible():
    assert loss_config(loaded("actor_rollout_ref.rollout.max_staleness=1")).report_stale
    assert not loss_config(loaded("")).report_stale
