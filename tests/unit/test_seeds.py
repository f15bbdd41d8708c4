"""The project is held to its first documents: YAML (tests/seeds/), option tables,
check list, metrics.

Names begin with the number of the document: 000 DAPO in a training system, 001 DAPO, 002 PPO for
classic control, 003 PPO for language models, 004 the DAPO paper. That every option acts:
test_seed_options.py.
"""

import hashlib
import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from examples.classic_control.agent import PPO
from examples.classic_control.types import PPOConfig, PPOMetrics
from megatron_dapo.algorithms.aggregation import token_weights
from megatron_dapo.algorithms.dapo_loss import LossConfig, TokenBatch, TokenOutputs, dapo_loss, metric_names

from megatron_dapo.algorithms.metrics import stack_maxima, stack_sums  # isort: skip
from megatron_dapo.checks.run_checks import validate
from megatron_dapo.config.aliases import MAIN_SWITCH, canonical
from megatron_dapo.config.derived import (
    dapo_techniques,
    effective_clip,
    needs_reference,
    uses_critic,
    uses_kl_in_reward,
)
from megatron_dapo.config.keys import known_keys
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.recipes import RECIPES
from megatron_dapo.config.schema.config import Config
from megatron_dapo.config.yaml_dialect import parse_yaml
from megatron_dapo.data.batching import assemble
from megatron_dapo.data.packing import collate
from megatron_dapo.data.samples import Group, Prompt, Sample
from megatron_dapo.queue.group_filter import make_queue
from megatron_dapo.rollout.build_rollout import make_shaping
from megatron_dapo.rollout.step_metrics import step_metrics
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry.telemetry import Telemetry
from megatron_dapo.training.loss_config import loss_config
from megatron_dapo.training.metric_sums import MetricSums
from megatron_dapo.training.policy import Policy

pytestmark = pytest.mark.unit

SEEDS = Path(__file__).parents[1] / "seeds"
# every YAML block of the documents, 7 of 000 and 2 of 003 (001, 002 and 004 have none), word for
# word. Name -> its heading, the SHA-256 of its text
BLOCKS = {
    "000_complete": ("完整配置示例", "77c7774d32fe85f6991c682787589788649d00f4e3172b131f84a65d9c4ec034"),
    "000_way_two": ("方式二：在现有配置上启用DAPO", "78907b52dee6e3dcbc210189c01a55bc36042d43a1d2b3c80cbc18d88a3590d0"),
    "000_way_three": ("方式三：仅启用部分DAPO功能", "7f05ca48f0d0e909540160f7aa600406f48bed56378cb40d47a0da7a3f5c0d2f"),
    "000_switch": ("与GRPO的兼容性", "b41be9a9d5cb0704f6a5c037d8de2fdeecae267b016eb02075b94ae3f93868cf"),
    "000_replay": ("配置示例", "09c164417992f945ce5a22f1d097f627e4f5b1c8a60862c2f42c0d7e49bb9815"),
    "000_math": ("数学推理任务（如AIME）", "217f66dc6e70ae5660905a361cf1fb2b4113145eb81edc149e39b7efa6272c06"),
    "000_agent": ("Agent任务（如AlfWorld）", "928f4cffad7776eb04db4589b85d9775c0717234e6bbbdc7b3bc4c813b96b2b6"),
    "003_kl_ctrl": ("6.4 使用示例", "b7ed3b5649c43b514e7c8fcdebd412fe5b2ad052e1081f145c48a5c2d5655cc2"),
    "003_ppo": ("8.2 配置示例", "5c233599429fc3152e46e5d0dbec718c0144bc54c083ae614617ffe7403c3dee"),
}


def configs_of(block: str) -> dict[str, str]:
    """The config of a block, or those to choose from,
    each below a comment of its own at the margin."""
    text = (SEEDS / f"{block}.yaml").read_text(encoding="utf-8")
    configs = [part for part in re.split(r"(?m)^(?=# )", text) if part.strip()]
    return {f"{block}_{i}" if len(configs) > 1 else block: part for i, part in enumerate(configs, start=1)}


CONFIGS = {name: text for block in BLOCKS for name, text in configs_of(block).items()}
TOKENS = "token_level_loss"  # on by default
ON = {  # techniques that are on under each block
    "000_complete": {"clip_higher", "dynamic_sampling", TOKENS, "overlong_shaping"},
    "000_way_two": {"clip_higher", "dynamic_sampling", TOKENS, "overlong_shaping"},
    "000_way_three_1": {"clip_higher", TOKENS},
    "000_way_three_2": {"dynamic_sampling", TOKENS},
    "000_way_three_3": {"overlong_shaping", TOKENS},
    "000_switch_1": {TOKENS},
    "000_switch_2": {"clip_higher", "dynamic_sampling", TOKENS, "overlong_shaping"},
    "000_replay": {"clip_higher", "dynamic_sampling", TOKENS, "overlong_shaping"},
    "000_math": {"clip_higher", "dynamic_sampling", TOKENS, "overlong_shaping"},
    "000_agent": {"clip_higher", "dynamic_sampling", TOKENS, "overlong_shaping"},
    "003_kl_ctrl": {TOKENS},
    "003_ppo": {TOKENS},
}
DAPO, SAMPLING, OVERLONG = "algorithm.dapo", "algorithm.dapo.dynamic_sampling", "algorithm.dapo.overlong_reward_shaping"
ACTOR = "actor_rollout_ref.actor"
OPTIONS = [  # option, type, default of the tables
    (f"{DAPO}.enable", bool, False),
    (f"{SAMPLING}.enable", bool, False),
    (f"{SAMPLING}.filter_mode", str, "strict"),
    (f"{OVERLONG}.enable", bool, False),
    (f"{OVERLONG}.truncation_penalty", float, -0.5),
    (f"{OVERLONG}.soft_penalty_mode", str, "additive"),
    (f"{ACTOR}.use_dapo", bool, False),
    (f"{ACTOR}.clip_ratio_low", float, 0.2),
    (f"{ACTOR}.clip_ratio_high", float, 0.28),
    (f"{ACTOR}.loss_agg_mode", str, "token-mean"),
    ("exp_manager.experience_replay.enable", bool, False),
    (f"{ACTOR}.off_policy_shaping_mode", str, "exgrpo_policy_shaping"),
    (f"{ACTOR}.off_policy_shaping_beta", float, 0.1),
    ("actor_rollout_ref.rollout.multi_turn.enable", bool, False),
    ("algorithm.filter_groups.enable", bool, False),
    (f"{ACTOR}.clip_ratio_c", float, 3.0),
    ("critic.vf_coef", float, 0.5),
    ("critic.cliprange_value", float, 0.2),
    ("critic.loss_type", str, "l2"),
    ("algorithm.adv_estimator", str, "grpo"),
    ("algorithm.gamma", float, 1.0),
]
CHOICES = {  # option -> values that the documents name
    f"{SAMPLING}.filter_mode": {"strict", "remove_all_correct", "remove_all_incorrect", "none"},
    f"{OVERLONG}.soft_penalty_mode": {"additive", "multiplicative", "replace_if_positive", "cap"},
    f"{ACTOR}.loss_agg_mode": {"token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"},
    f"{ACTOR}.off_policy_shaping_mode": {"exgrpo_policy_shaping", "dapo_clip_higher"},
    "algorithm.filter_groups.metric": {"acc", "seq_final_reward"},
    "algorithm.kl_ctrl.type": {"fixed", "adaptive"},
    "algorithm.kl_penalty": {"kl", "abs", "mse", "low_var_kl", "full"},
    f"{ACTOR}.kl_loss_type": {"kl", "abs", "mse", "low_var_kl", "full"},
    "algorithm.adv_estimator": {"gae", "grpo"},
    "critic.loss_type": {"l2", "huber"},
}
CHECK_LIST = [  # 000, "the configuration's check list"
    f"{DAPO}.enable=true",
    f"{SAMPLING}.enable=true",
    f"{SAMPLING}.filter_mode=strict",
    f"{OVERLONG}.enable=true",
    f"{OVERLONG}.truncation_penalty=-0.5",
    f"{ACTOR}.use_dapo=true",
    f"{ACTOR}.clip_ratio_low=0.2",
    f"{ACTOR}.clip_ratio_high=0.28",
    f"{ACTOR}.loss_agg_mode=token-mean",
    "actor_rollout_ref.rollout.multi_turn.enable=true",
]


def on(config: Config) -> set[str]:
    return {name for name, is_on in dapo_techniques(config).items() if is_on}


def value_of(config: Config, key: str):
    if key == MAIN_SWITCH:  # it is on with one of its techniques
        return config.algorithm.dynamic_sampling.enable or config.algorithm.overlong_reward_shaping.enable
    value = config
    for part in canonical(key).split("."):
        value = getattr(value, part)
    return value


def leaves(tree: dict, prefix: str = ""):
    for name, value in tree.items():
        yield from leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]


# ---------------------------------------------------------------------------------- YAML and tables


def test_the_blocks_are_all_there_word_for_word():
    digests = {path.stem: hashlib.sha256(path.read_bytes()).hexdigest() for path in SEEDS.glob("*.yaml")}
    assert digests == {name: digest for name, (_, digest) in BLOCKS.items()}


def test_a_block_that_gives_a_choice_is_cut_without_loss():
    assert CONFIGS.keys() == ON.keys()
    for block in BLOCKS:
        assert "".join(configs_of(block).values()) == (SEEDS / f"{block}.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_block_loads_as_it_is_says_what_it_says_and_makes_sense(name, tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIGS[name], encoding="utf-8")
    config = load_config(tmp_path / "config.yaml")
    tree, duplicates = parse_yaml(CONFIGS[name])
    assert not duplicates
    for key, value in leaves(tree):
        assert value_of(config, key) == value, key
    validate(config, None, check_files=False)
    assert on(config) == ON[name]


def test_the_block_of_the_kl_controller_acts():
    config = load_config(SEEDS / "003_kl_ctrl.yaml")
    assert uses_kl_in_reward(config) and needs_reference(config)


def test_the_block_of_ppo_has_a_critic_and_clips_on_both_sides_alike():
    config = load_config(SEEDS / "003_ppo.yaml")
    assert uses_critic(config) and effective_clip(config) == (0.2, 0.2)
    assert (config.critic.value_loss_coef, config.actor_rollout_ref.actor.entropy_coef) == (0.5, 0.01)


@pytest.mark.parametrize(("key", "kind", "default"), OPTIONS, ids=[row[0] for row in OPTIONS])
def test_an_option_of_the_tables_has_its_type_and_default(key, kind, default):
    value = value_of(Config(), key)
    assert value == default and type(value) is kind


@pytest.mark.parametrize("key", CHOICES)
def test_an_option_takes_every_value_that_the_documents_name(key):
    allowed = known_keys()[canonical(key)].allowed.removeprefix("one of ").split(", ")
    assert set(allowed) >= CHOICES[key]


def test_the_check_list_is_a_config_with_everything_on_and_so_is_the_recipe_of_way_one():
    config = load_config(None, [*CHECK_LIST, "actor_rollout_ref.rollout.multi_turn.environment=reasoning_gym"])
    validate(config, None, check_files=False)
    assert on(config) == ON["000_complete"]
    recipe = load_config(RECIPES / "alfworld_dapo_3b.yaml")
    assert on(recipe) == ON["000_complete"] and recipe.actor_rollout_ref.rollout.multi_turn.enable


def test_by_default_everything_of_dapo_is_off_and_the_clip_is_plain():
    assert on(Config()) == {TOKENS} and effective_clip(Config()) == (0.2, 0.2)


def test_the_agent_for_classic_control_has_its_options_methods_and_metrics():
    expected = dict(
        hidden_sizes=(64, 64), lr=2.5e-4, max_grad_norm=0.5, gamma=0.99, gae_lambda=0.95, clip_eps=0.2, vf_coef=0.5,
        ent_coef=0.01, n_steps=128, n_minibatches=4, n_epochs=4, num_envs=1, shared_backbone=False,
    )  # fmt: skip
    assert {field.name: getattr(PPOConfig(), field.name) for field in fields(PPOConfig)} == expected
    assert PPOMetrics._fields == ("total_loss", "actor_loss", "critic_loss", "entropy", "approx_kl")
    methods = (
        "init act act_batch evaluate_actions get_value get_value_batch collect_rollout collect_rollout_batch update"
    )
    assert all(callable(getattr(PPO, name)) for name in methods.split())


# ------------------------------------------------------------------------------------------- groups


def responses(uid: str, *what: str, config: Config) -> Group:
    """A group of responses of three tokens each: right or wrong,
    cut off by length or turns, replayed."""

    def sample(words: str) -> Sample:
        finish_reason = next((reason for reason in ("length", "turns") if reason in words), "stop")
        is_truncated, raw_reward = finish_reason != "stop", float("right" in words)
        return Sample(
            uid=uid, prompt_tokens=(1,), response_tokens=(2, 3, 4), rollout_log_probs=(-1.0,) * 3,
            loss_mask=(1, 1, 1), weight_versions=(1,) * 3, finish_reason=finish_reason, raw_reward=raw_reward,
            correct="right" in words, reward=make_shaping(config)(raw_reward, 3, is_truncated),
            is_truncated=is_truncated, is_terminated=not is_truncated, exp_mask="replayed" in words,
        )  # fmt: skip

    return Group(uid, Prompt(0, uid, (1,), "", "test", ""), tuple(sample(words) for words in what))


def one_step(config: Config, *groups: tuple[str, ...]):
    """The result of this config's queue for a gen batch of these groups."""
    queue = make_queue(config)
    queue.begin(1, weight_version=1)
    drawn = [queue.draw(Prompt(i, str(i), (1,), "", "test", ""), weight_version=1) for i in range(len(groups))]
    for draw, what in zip(drawn, groups, strict=True):
        queue.add_finished(replace(responses(draw.uid, *what, config=config), prompt=draw.prompt))
    queue.decide()
    return queue.take()


@pytest.mark.parametrize("form", ["resample", "mask"])
def test_the_two_examples_of_replay_one_borrowed_success_saves_group_a_and_group_b_is_filtered(form):
    """000: with 1 replayed success, 7 fresh failures have a success rate of 1/8 and stay. With 7
    fresh successes it is 8/8, and the group is filtered."""
    config = load_config(
        SEEDS / "000_replay.yaml",
        ["data.train_batch_size=2", f"{SAMPLING}.form={form}", f"{SAMPLING}.on_exhausted=train_partial"],
    )
    task_a, task_b = ("right replayed", *["wrong"] * 7), ("right replayed", *["right"] * 7)
    result = one_step(config, task_a, task_b)
    kept = [group.prompt.index for group in result.groups if group.keep]
    assert kept == [0] and dict(result.filtered) == {"all_correct": 1} and result.num_filtered_samples == 8
    advantages = [sample.advantage for sample in assemble(result.groups)]
    assert advantages[0] > 0 and all(advantage < 0 for advantage in advantages[1:8])
    assert set(advantages[8:]) == ({0.0} if form == "mask" else set())


# ------------------------------------------------------------------------------------------ metrics


def actor_metrics(config: Config, groups, ratios: list[list[float]]) -> dict[str, float]:
    """Of the actor's loss on these groups, with a given ratio to the old policy at each token."""
    samples = assemble(groups)
    batch, loss = collate(samples), loss_config(config)
    log_ratios = {s.sample_id: torch.tensor([*row, 1.0]).log() for s, row in zip(samples, ratios, strict=True)}
    weights, count = token_weights("token-mean", batch.loss_mask, batch.segment_ids, batch.num_segments, 8)
    old = torch.full_like(batch.advantages, -1.0)
    tokens = TokenBatch(
        weights, count, batch.advantages, old, None, batch.rollout_log_probs,
        exp_mask=batch.exp_mask if loss.off_policy else None,
    )  # fmt: skip
    outputs = TokenOutputs(old + batch.from_samples(log_ratios), torch.full_like(old, 0.5))
    return reported(loss, dapo_loss(outputs, tokens, loss))


def reported(loss: LossConfig, sums) -> dict[str, float]:
    sum_names, max_names = metric_names(loss)
    part = MetricSums(
        sum_names, max_names, stack_sums(sums.sums, sum_names, "cpu"), stack_maxima(sums.maxima, max_names, "cpu")
    )
    return Policy.metrics_of(part)


def written(folder: Path, metrics: dict[str, float]) -> dict[str, float]:
    """The record of metrics.jsonl that telemetry makes of them."""
    run = RunFolder(folder)
    telemetry = Telemetry(load_config(None, ["trainer.logger=[jsonl]"]), run)
    telemetry.log(1, metrics)
    telemetry.close()
    (line,) = run.metrics.read_text().splitlines()
    return json.loads(line)


def test_every_metric_of_the_documents_is_in_metrics_jsonl_with_the_value_worked_out_by_hand(tmp_path):
    """Four groups of two, three tokens each. Two carry signal, with A = +-1/sqrt(2) each; the two
    others are filtered. The tokens, in units of 1/sqrt(2): on-policy -1 -1.2 -1.28 (clipped above),
    1 0.8 (clipped below) 3 (dual clip). Then 1 1 1 beside the replayed response; its three have -r
    / (r + 0.1)."""
    config = load_config(
        SEEDS / "000_replay.yaml", ["data.train_batch_size=4", f"{SAMPLING}.on_exhausted=train_partial"]
    )
    result = one_step(
        config, ("right", "wrong length"), ("right", "right"), ("wrong", "wrong turns"), ("right replayed", "wrong")
    )
    ratios = [[1.0, 1.2, 1.5], [1.0, 0.5, 4.0], [1.0, 0.1, 9.9], [1.0, 1.0, 1.0]]
    metrics = step_metrics(result, 1, 0, 1.0) | actor_metrics(config, result.groups, ratios)
    on_policy, off_policy = -1 - 1.2 - 1.28 + 1 + 0.8 + 3 + 3, -(1 / 1.1 + 0.5 + 0.99)
    root = 2**-0.5
    expected = {
        "dapo/num_filtered_samples": 4, "dapo/filter_ratio": 0.5,
        # of the seven that were generated in this step
        "dapo/num_truncated_samples": 2, "dapo/truncation_ratio": 2 / 7, "dapo/num_truncated_by_length": 1,
        "dapo/num_truncated_by_termination": 1, "dapo/avg_truncation_penalty_applied": 0.5,
        "actor/pg_loss": root * (on_policy + off_policy) / 12, "actor/on_pg_loss": root * on_policy / 9,
        "actor/off_pg_loss": root * off_policy / 3, "exp_mask_ratio": 3 / 12,
        "actor/on_pg_clipfrac": 1 / 9, "actor/on_pg_clipfrac_lower": 1 / 9, "actor/entropy": 0.5,
        # the mean of -log-prob, which is 1 less the log-ratio
        "actor/entropy_sampled": 1 - math.log(1.2 * 1.5 * 0.5 * 4.0 * 0.1 * 9.9) / 12,
    }  # fmt: skip
    record = written(tmp_path, metrics)
    assert {name: record[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_purely_on_policy_the_loss_of_replayed_tokens_is_0_and_none_is_replayed(tmp_path):
    config = load_config(SEEDS / "000_complete.yaml", ["data.train_batch_size=1"])
    result = one_step(config, ("right", "wrong"))
    record = written(tmp_path, actor_metrics(config, result.groups, [[1.0, 1.0, 1.0], [1.0, 1.0, 2.0]]))
    assert record["actor/off_pg_loss"] == 0.0 and record["exp_mask_ratio"] == 0.0
    assert record["actor/on_pg_loss"] == record["actor/pg_loss"] == pytest.approx(2**-0.5 / 6, rel=1e-4)
