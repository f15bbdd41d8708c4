"""Every option of the documents acts: two values of it give two results, both worked out by hand.

Each row of a table: overrides, and their result. Rows of one key stand together.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_dapo.algorithms.aggregation import AGGREGATIONS, token_weights
from megatron_dapo.algorithms.dapo_loss import TokenBatch, TokenOutputs, dapo_loss
from megatron_dapo.algorithms.kl import KL_CONTROLLERS
from megatron_dapo.config.derived import samples_per_rollout_step
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.batching import assemble, sample_rewards
from megatron_dapo.data.packing import collate
from megatron_dapo.data.samples import Prompt
from megatron_dapo.queue.experience_replay import make_pool
from megatron_dapo.queue.group_filter import make_queue
from megatron_dapo.rewards.shaping import TRUNCATION_MODES
from megatron_dapo.rollout.build_rollout import make_environments, make_shaping
from megatron_dapo.training.advantages import estimate_advantages
from megatron_dapo.training.critic import Critic
from megatron_dapo.training.distribute import StepShard
from megatron_dapo.training.loss_config import loss_config
from tests.unit.test_batching import make_group
from tests.unit.test_dynamic_sampling import MIXED, RIGHT, WRONG, indices, run_gen_batch
from tests.unit.test_experience_replay import record

pytestmark = pytest.mark.unit

SHORT = {
    "sampling.": "algorithm.dapo.dynamic_sampling.",
    "overlong.": "algorithm.dapo.overlong_reward_shaping.",
    "groups.": "algorithm.filter_groups.",
    "replay.": "exp_manager.experience_replay.",
    "kl_ctrl.": "algorithm.kl_ctrl.",
    "rollout.": "actor_rollout_ref.rollout.",
}


def config_of(text: str) -> Config:
    """`"actor.use_dapo=true overlong.enable=true"` -> the config."""
    words = text.split()
    for short, whole in SHORT.items():
        words = [whole + word.removeprefix(short) if word.startswith(short) else word for word in words]
    return load_config(None, words)


def rows(base: str, *cases: tuple) -> list:
    return [pytest.param(config_of(f"{base} {text}"), *rest, id=text or base) for text, *rest in cases]


# --------------------------------------------------------------------------------- the actor's loss


def loss_of(config: Config, ratio: float, advantage: float, *, replayed: bool = False, ref: float = 0.0) -> float:
    """Of one token with log-prob -1, entropy 2 and 0.7 of KL over the whole vocabulary."""
    one = torch.ones(1, dtype=torch.float64)
    loss = loss_config(config)
    tokens = TokenBatch(
        weights=one,
        count=torch.tensor(1),
        advantages=advantage * one,
        old_log_probs=-one - math.log(ratio),
        ref_log_probs=ref * one,
        rollout_log_probs=-one,
        exp_mask=replayed * one,
    )
    return float(dapo_loss(TokenOutputs(-one, 2 * one, kl=0.7 * one), tokens, loss).loss_sum)


@pytest.mark.parametrize(
    ("config", "ratio", "advantage", "loss"),
    [
        *rows("", ("actor.use_dapo=false", 1.5, 1.0, -1.2), ("actor.use_dapo=true", 1.5, 1.0, -1.28)),
        *rows("", ("actor.clip_ratio=0.2", 1.5, 1.0, -1.2), ("actor.clip_ratio=0.1", 1.5, 1.0, -1.1)),
        *rows(
            "actor.use_dapo=true actor.clip_ratio=0.3",
            ("actor.clip_ratio_low=0.2", 0.5, -1.0, 0.8),
            ("actor.clip_ratio_low=0.1", 0.5, -1.0, 0.9),
            ("actor.clip_ratio_low=null", 0.5, -1.0, 0.7),
            ("actor.clip_ratio_high=0.28", 2.0, 1.0, -1.28),
            ("actor.clip_ratio_high=0.5", 2.0, 1.0, -1.5),
            ("actor.clip_ratio_high=null", 2.0, 1.0, -1.3),
            # for A < 0 there is no upper bound but the dual clip's
            ("actor.clip_ratio_c=3.0", 5.0, -1.0, 3.0),
            ("actor.clip_ratio_c=2.0", 5.0, -1.0, 2.0),
            ("actor.clip_ratio_c=null", 5.0, -1.0, 5.0),
        ),
        *rows("", ("actor.entropy_coef=0.0", 1.0, 1.0, -1.0), ("actor.entropy_coef=0.01", 1.0, 1.0, -1.02)),
    ],
)
def test_clipping_and_the_entropy_bonus(config, ratio, advantage, loss):
    assert loss_of(config, ratio, advantage) == pytest.approx(loss)


@pytest.mark.parametrize(
    ("config", "loss"),
    rows(
        "actor.kl_loss_coef=0.1",
        ("actor.use_kl_loss=false", -1.0),
        ("actor.use_kl_loss=true actor.kl_loss_type=mse", -1.0 + 0.1 * 2.0),
        ("actor.use_kl_loss=true actor.kl_loss_type=mse actor.kl_loss_coef=0.2", -1.0 + 0.2 * 2.0),
        # log-prob -1, the reference's 1: k1 is -2
        ("actor.use_kl_loss=true actor.kl_loss_type=kl", -1.0 - 0.1 * 2.0),
        ("actor.use_kl_loss=true actor.kl_loss_type=abs", -1.0 + 0.1 * 2.0),
        ("actor.use_kl_loss=true actor.kl_loss_type=low_var_kl", -1.0 + 0.1 * (math.exp(2) - 3)),
        ("actor.use_kl_loss=true actor.kl_loss_type=full", -1.0 + 0.1 * 0.7),
    ),
)
def test_the_kl_in_the_loss(config, loss):
    assert loss_of(config, 1.0, 1.0, ref=1.0) == pytest.approx(loss)


@pytest.mark.parametrize(
    ("config", "ratio", "loss"),
    rows(
        "replay.enable=true actor.use_dapo=true",
        ("actor.off_policy_shaping_beta=0.1", 2.0, -2 / 2.1),
        ("actor.off_policy_shaping_beta=0.5", 2.0, -2 / 2.5),
        ("actor.off_policy_shaping_mode=exgrpo_policy_shaping", 4.0, -4 / 4.1),
        ("actor.off_policy_shaping_mode=dapo_clip_higher", 4.0, -1.28),
        ("replay.enable=false", 4.0, -1.28),
    ),
)
def test_the_loss_of_replayed_tokens(config, ratio, loss):
    assert loss_of(config, ratio, 1.0, replayed=True) == pytest.approx(loss)


def test_the_aggregation_of_token_losses():
    """One response of one token with loss 1, one of three with loss 2 each;
    at most four are allowed."""
    expected = {
        "token-mean": 7 / 4, "seq-mean-token-sum": 7 / 2, "seq-mean-token-mean": 3 / 2,
        "seq-mean-token-sum-norm": 7 / 4 / 2,
    }  # fmt: skip
    segments, losses = torch.tensor([0, 1, 1, 1]), torch.tensor([1.0, 2.0, 2.0, 2.0])
    for mode in AGGREGATIONS:
        config = config_of(f"actor.loss_agg_mode={mode} data.max_response_length=4")
        mode, longest = config.actor_rollout_ref.actor.loss_agg_mode, config.data.max_response_length
        weights, count = token_weights(mode, torch.ones(4), segments, 2, longest)
        assert float((weights * losses).sum() / count) == pytest.approx(expected[mode]), mode


# --------------------------------------------------------------------------------------- advantages


def advantages_of(config: Config, values=(0.2, 0.6, 0.3), k1=(0.0, 0.0, 0.0)) -> tuple[list[float], dict[str, float]]:
    """Per token, of a response of two tokens with reward 1 and one of one token with reward 0. The
    greedy answer to their prompt earned 0.25. k1: log-probs of the actor minus those of the
    reference; over the vocabulary KL is 0.7."""
    group = replace(make_group("a", [1.0, 0.0]), baseline_reward=0.25)
    lengths = (2, 1)
    per_token = ("response_tokens", "rollout_log_probs", "loss_mask", "weight_versions")
    cut = [
        replace(sample, **{name: getattr(sample, name)[:length] for name in per_token})
        for sample, length in zip(group.samples, lengths, strict=True)
    ]
    estimator, by_std = config.algorithm.adv_estimator, config.algorithm.norm_adv_by_std_in_grpo
    group = replace(group, samples=tuple(cut))
    samples = assemble([group], estimator=estimator, normalize_by_std=by_std)
    batch = collate(samples)
    counted = batch.loss_mask != 0

    def filled(numbers) -> torch.Tensor:
        tensor = torch.zeros_like(batch.advantages)
        tensor[counted] = torch.tensor(numbers)
        return tensor

    batch = replace(
        batch,
        values=filled(values),
        old_log_probs=filled(k1),
        ref_log_probs=filled((0.0,) * 3),
        full_kl=filled((0.7,) * 3),
    )
    kl_ctrl = config.algorithm.kl_ctrl
    controller = KL_CONTROLLERS[kl_ctrl.type](kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    layout = SimpleNamespace(is_last_stage=True, counts_tokens=True, gather=lambda part: [part])
    shard = StepShard([[batch]], sample_rewards([group]))
    shard, metrics = estimate_advantages(shard, controller, config, layout)
    return shard.mini_batches[0][0].advantages[counted].tolist(), metrics | {"next": controller.value}


def whitened(*numbers: float) -> list[float]:
    mean = sum(numbers) / 3
    std = math.sqrt(sum((number - mean) ** 2 for number in numbers) / 2)
    return [(number - mean) / std for number in numbers]


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)


ROOT = 2**-0.5
KL = "algorithm.use_kl_in_reward=true algorithm.norm_adv_by_std_in_grpo=false"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        *rows(
            "",
            ("algorithm.adv_estimator=grpo", [ROOT, ROOT, -ROOT]),
            ("algorithm.norm_adv_by_std_in_grpo=false", [0.5, 0.5, -0.5]),
            ("algorithm.adv_estimator=rloo", [1.0, 1.0, -1.0]),
            ("algorithm.adv_estimator=remax", [0.75, 0.75, -0.25]),
            ("algorithm.adv_estimator=reinforce_plus_plus", whitened(1, 1, 0)),
            ("algorithm.adv_estimator=reinforce_plus_plus algorithm.gamma=0.5", whitened(0.5, 1, 0)),
        ),
        *rows(
            "algorithm.adv_estimator=gae",
            ("", whitened(1 - 0.2, 1 - 0.6, -0.3)),
            ("algorithm.lam=0.5", whitened(0.6 - 0.2 + 0.5 * 0.4, 0.4, -0.3)),
            ("algorithm.gamma=0.5", whitened(0.5 * 0.6 - 0.2 + 0.5 * 0.4, 0.4, -0.3)),
        ),
    ],
)
def test_the_estimators_gamma_and_lambda(config, expected):
    assert advantages_of(config)[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # k1 of 0.2 and 0.2 at the tokens of the first response, 0 at the second's
        *rows("", ("algorithm.norm_adv_by_std_in_grpo=false", [0.5, 0.5, -0.5])),
        *rows("algorithm.norm_adv_by_std_in_grpo=false", ("kl_ctrl.kl_coef=0.5", [0.4, 0.4, -0.4])),
        *rows(KL, ("kl_ctrl.kl_coef=0.5", [0.4, 0.4, -0.4]), ("kl_ctrl.kl_coef=1.0", [0.3, 0.3, -0.3])),
    ],
)
def test_the_kl_in_the_reward(config, expected):
    assert advantages_of(config, k1=(0.2, 0.2, 0.0))[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("config", "kl"),
    rows(
        f"{KL} kl_ctrl.kl_coef=0.5",
        # the mean of two responses' means, over two tokens and over one
        ("algorithm.kl_penalty=kl", (-2.0 + 0.5) / 4),
        ("algorithm.kl_penalty=abs", (2 + 0.5) / 4),
        ("algorithm.kl_penalty=mse", (2 + 0.125) / 4),
        ("algorithm.kl_penalty=low_var_kl", (math.exp(2) - 3 + math.exp(-0.5) - 0.5) / 4),
        ("algorithm.kl_penalty=full", 0.7),
    ),
)
def test_the_estimator_of_the_kl_in_the_reward(config, kl):
    assert advantages_of(config, k1=(-2.0, 0.5, 0.0))[1]["actor/reward_kl_penalty"] == pytest.approx(kl)


@pytest.mark.parametrize(
    ("config", "coefficient"),
    rows(
        f"{KL} kl_ctrl.kl_coef=0.02",
        ("kl_ctrl.type=fixed", 0.02),
        # two responses with a KL of 0.1: ten times the target and more is 20 % too much, at most
        ("kl_ctrl.type=adaptive", 0.02 * (1 + 0.2 * 2 / 10000)),
        ("kl_ctrl.type=adaptive kl_ctrl.horizon=100", 0.02 * (1 + 0.2 * 2 / 100)),
        ("kl_ctrl.type=adaptive kl_ctrl.target_kl=1.0", 0.02 * (1 - 0.2 * 2 / 10000)),
        ("kl_ctrl.type=adaptive kl_ctrl.target_kl=0.11 kl_ctrl.horizon=10", 0.02 * (1 + (0.1 / 0.11 - 1) * 2 / 10)),
    ),
)
def test_the_controller_of_the_kl_coefficient(config, coefficient):
    assert advantages_of(config, k1=(0.1, 0.1, 0.1))[1]["next"] == pytest.approx(coefficient, rel=1e-6)


# --------------------------------------------------------------------------------------- the critic


@pytest.mark.parametrize(
    ("config", "loss"),
    rows(
        "",
        # value 1, 0 before the update, return 3: (1 - 3)^2 = 4,
        # at the bound 0.2 it is (0.2 - 3)^2 = 7.84
        ("critic.vf_coef=0.5", 0.5 * 7.84),
        ("critic.vf_coef=1.0", 7.84),
        ("critic.cliprange_value=0.5", 0.5 * 2.5**2),
        ("critic.cliprange_value=null", 0.5 * 4.0),
        ("critic.loss_type=huber", 0.5 * (2.8 - 0.5)),
    ),
)
def test_the_value_loss(config, loss):
    batch = collate(assemble([make_group("a", [1.0], response_length=1)]))
    batch = replace(batch, values=torch.zeros_like(batch.advantages), returns=torch.full_like(batch.advantages, 3.0))
    loss_sum, count, _ = Critic._loss(SimpleNamespace(_config=config.critic), torch.ones_like(batch.values), batch)
    assert (float(loss_sum), int(count)) == (pytest.approx(loss), 1)


# ---------------------------------------------------------------------------------- groups, rewards


@pytest.mark.parametrize(
    ("config", "kept"),
    rows(
        "data.train_batch_size=3 algorithm.dapo.enable=true sampling.enable=true sampling.on_exhausted=train_partial "
        "sampling.max_num_gen_batches=1",
        ("sampling.filter_mode=strict", [1]),
        ("sampling.filter_mode=remove_all_correct", [1, 2]),
        ("sampling.filter_mode=remove_all_incorrect", [0, 1]),
        ("sampling.filter_mode=none", [0, 1, 2]),
        ("sampling.enable=false overlong.enable=true", [0, 1, 2]),
        ("algorithm.dapo.enable=false", [0, 1, 2]),
        ("algorithm.dapo.enable=false groups.enable=true groups.max_num_gen_batches=1", [1]),
    ),
)
def test_the_filter_of_groups(config, kept):
    queue = make_queue(config)
    queue.begin(1, weight_version=1)
    run_gen_batch(queue, 0, [RIGHT, MIXED, WRONG])
    assert queue.is_ready()
    assert indices(queue.take().groups) == kept


@pytest.mark.parametrize(
    ("config", "rounds"),
    rows(
        "data.train_batch_size=3 groups.enable=true",
        ("groups.max_num_gen_batches=1", 1),
        ("groups.max_num_gen_batches=2", 2),
    ),
)
def test_the_limit_of_gen_batches(config, rounds):
    queue, num_rounds = make_queue(config), 0
    queue.begin(1, weight_version=1)
    while not queue.is_ready():
        run_gen_batch(queue, 3 * num_rounds, [MIXED, RIGHT, WRONG])
        num_rounds += 1
    assert num_rounds == rounds == len(queue.take().groups)


def shaped(config: Config, reward: float, num_tokens: int = 100, is_truncated: bool = True) -> float:
    return make_shaping(config)(reward, num_tokens, is_truncated)


@pytest.mark.parametrize(
    ("config", "reward"),
    rows(
        "algorithm.dapo.enable=true overlong.enable=true data.max_response_length=100",
        ("overlong.truncation_penalty=-0.5", 0.5),
        ("overlong.truncation_penalty=-0.3", 0.7),
        ("overlong.enable=false sampling.enable=true", 1.0),
        ("algorithm.dapo.enable=false", 1.0),
        # DAPO eq. 13: the last 20 tokens cost up to 1 (or penalty_factor)
        ("overlong.buffer_len=20", 0.0),
        ("overlong.buffer_len=20 overlong.penalty_factor=0.5", 0.5),
    ),
)
def test_the_punishment_of_a_truncated_right_answer(config, reward):
    assert shaped(config, 1.0) == pytest.approx(reward)
    assert shaped(config, 1.0, num_tokens=80, is_truncated=False) == 1.0


def test_the_soft_interval_is_linear_whether_or_not_a_response_was_cut_off():
    on = "algorithm.dapo.enable=true overlong.enable=true data.max_response_length=100"
    config = config_of(f"{on} overlong.buffer_len=20")
    expected = {79: 1.0, 80: 1.0, 85: 0.75, 90: 0.5, 100: 0.0}
    for is_truncated in (False, True):
        assert {n: shaped(config, 1.0, n, is_truncated) for n in expected} == pytest.approx(expected)
    earlier, expected = config_of(f"{on} overlong.buffer_len=20 overlong.expected_len=60"), {60: 1.0, 65: 0.75, 90: 0.0}
    assert {n: shaped(earlier, 1.0, n, False) for n in expected} == pytest.approx(expected)


def test_the_four_modes_of_truncation_penalty():
    """With 0.5, of which reward 0.25 tells all four apart, and with the documents' -0.5."""
    expected = {  # rewards 0.25, 1, -1 with 0.5; the same with -0.5
        "additive": ([0.75, 1.5, -0.5], [-0.25, 0.5, -1.5]),
        "multiplicative": ([0.25, 1.0, -1.5], [0.125, 0.5, -1.0]),  # never above the reward
        "replace_if_positive": ([0.5, 0.5, -1.0], [-0.5, -0.5, -1.0]),
        "cap": ([0.25, 0.5, -1.0], [-0.5, -0.5, -1.0]),
    }
    assert expected.keys() == TRUNCATION_MODES.keys()
    on = "algorithm.dapo.enable=true overlong.enable=true overlong.truncation_penalty"
    for mode, both in expected.items():
        for penalty, rewards in zip((0.5, -0.5), both, strict=True):
            config = config_of(f"{on}={penalty} overlong.soft_penalty_mode={mode}")
            assert [shaped(config, reward) for reward in (0.25, 1.0, -1.0)] == rewards, (mode, penalty)


# --------------------------------------------------------------------------------- sampling, replay


def test_the_group_size():
    for n in (4, 8):
        assert samples_per_rollout_step(config_of(f"rollout.n={n}")) == n * 512


def test_multi_turn_is_a_switch():
    turns = "rollout.multi_turn.enable=true rollout.multi_turn.environment=reasoning_gym"
    assert make_environments(config_of("")) is None and make_environments(config_of(turns)) is not None


@pytest.mark.parametrize(
    ("config", "num_right_of_ten", "drawn"),
    rows(
        "replay.enable=true rollout.n=2",
        ("replay.replay_start_ratio=0.3 replay.exp_ratio=0.5", 3, 2),
        ("replay.replay_start_ratio=0.4 replay.exp_ratio=0.5", 3, 0),
        ("replay.replay_start_ratio=0.3 replay.exp_ratio=0.25", 3, 1),
    ),
)
def test_when_replay_begins_and_how_much_of_a_gen_batch_of_four_it_is(config, num_right_of_ten, drawn):
    pool = make_pool(config)
    queue = make_queue(config_of("data.train_batch_size=5"))
    queue.begin(1, weight_version=1)
    outcomes = [MIXED] * num_right_of_ten + [WRONG] * (5 - num_right_of_ten)
    record(pool, run_gen_batch(queue, 0, outcomes))
    assert len(pool.draw(4)) == drawn


@pytest.mark.parametrize(
    ("config", "left"),
    rows(
        "replay.enable=true rollout.n=2",
        # three steps, in each of which prompts 0 and 1 have one success of two tokens of prompt and
        # three of response
        ("", 6),
        ("replay.max_trajectories_per_task=2", 4),
        ("replay.max_trajectories_per_task=1", 2),
        ("replay.max_pool_tokens=19", 3),
    ),
)
def test_the_bounds_of_the_pool(config, left):
    pool = make_pool(config)
    for _ in range(3):
        record(pool, [replace(make_group(str(i), [1.0, 0.0]), prompt=Prompt(i, "", (1,), "", "", "")) for i in (0, 1)])
    assert pool.metrics()["replay/num_trajectories"] == left


def test_replay_is_a_switch():
    assert make_pool(config_of("")) is None and make_pool(config_of("replay.enable=true")) is not None
