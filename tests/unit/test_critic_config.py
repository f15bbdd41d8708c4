"""The section critic: contradictions by name, the actor's values as defaults,
effects of a resume."""

import json

import pytest

from megatron_dapo.checkpointing.config_changes import check_changes, config_changes, config_to_plain
from megatron_dapo.checkpointing.folders import TRAINER_STATE
from megatron_dapo.checkpointing.manifest import write_manifest
from megatron_dapo.checkpointing.resume import CONTENTS, contents_of, find_start
from megatron_dapo.checks.run_checks import validate
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.derived import critic_batching, critic_path, uses_critic
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.platform.agreement import SingleRank

pytestmark = pytest.mark.unit

GAE = "algorithm.adv_estimator=gae"
ACTOR_JSON = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 8192,
    "vocab_size": 67,
}
TP4 = (
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4",
    "trainer.n_procs_per_node=4",
    "actor_rollout_ref.rollout.server.tensor_model_parallel_size=1",
)


def config(*overrides: str) -> Config:
    return load_config(None, [*overrides])


def sentences(*overrides: str, model: dict | None = None) -> list[str]:
    with pytest.raises(UserError) as error:
        validate(config(*overrides), model, check_files=False)
    return error.value.sentences


@pytest.mark.parametrize("overrides, words", [
    ((GAE, "critic.ppo_mini_batch_size=100"), ["critic.ppo_mini_batch_size is 100", "train_batch_size 512"]),
    ((GAE, "critic.max_tokens_per_microbatch=3071"), ["critic.max_tokens_per_microbatch is 3071", "3072 tokens"]),
    ((GAE, "critic.optim.min_lr=1e-3"), ["critic.optim.min_lr is 0.001", "lr 1e-05"]),
    ((GAE, "critic.optim.lr_warmup_steps=100"), ["critic.optim.lr_warmup_steps is 100", "total_training_steps 100"]),
    ((GAE, "trainer.critic_warmup=100"), ["critic_warmup is 100", "never updated"]),
    ((GAE, "trainer.critic_warmup=90", "actor_rollout_ref.actor.optim.lr_warmup_steps=10"),
     ["lr_warmup_steps is 10", "critic_warmup 90", "never reaches its peak"]),
    (("critic.loss_type=huber",), ["critic.loss_type is huber", "adv_estimator is grpo", "gae"]),
    (("critic.optim.lr=1e-4",), ["critic.optim.lr is 0.0001", "adv_estimator is grpo"]),
    (("trainer.critic_warmup=5",), ["trainer.critic_warmup is 5", "adv_estimator is grpo", "adv_estimator to gae"]),
])  # fmt: skip
def test_a_contradiction_is_one_sentence_that_names_key_value_and_cure(overrides, words):
    (sentence,) = sentences(*overrides)
    assert all(word in sentence for word in words), sentence


def test_a_plain_gae_config_has_no_mistakes_and_its_critic_goes_through_a_step_as_the_actor_does():
    plain = config(GAE, "actor_rollout_ref.actor.ppo_epochs=3", "actor_rollout_ref.model.path=m")
    validate(plain, ACTOR_JSON, check_files=False)
    sizes, actor = critic_batching(plain), plain.actor_rollout_ref.actor
    assert uses_critic(plain) and not uses_critic(Config()) and critic_path(plain) == "m"
    assert (sizes.ppo_mini_batch_size, sizes.ppo_epochs) == (actor.ppo_mini_batch_size, 3)
    assert sizes.max_tokens_per_microbatch == actor.max_tokens_per_microbatch
    own = critic_batching(config(GAE, "critic.ppo_mini_batch_size=8", "critic.ppo_epochs=2"))
    assert (own.ppo_mini_batch_size, own.ppo_epochs) == (8, 2)


@pytest.mark.parametrize(("key", "value", "words"), [
    ("num_attention_heads", 6, ["num_attention_heads 6", "divisor"]),
    ("max_position_embeddings", 100, ["max_position_embeddings 100"]),
    ("vocab_size", 50, ["vocab_size is 50", "the actor's is 67"]),
    ("num_experts", 8, ["sequence_parallel is false", "a model with experts"]),
])  # fmt: skip
def test_a_critic_of_its_own_must_fit_the_layout_the_lengths_and_the_tokens(tmp_path, key, value, words):
    (tmp_path / "config.json").write_text(json.dumps({**ACTOR_JSON, key: value}))
    (sentence,) = sentences(GAE, *TP4, f"critic.model.path={tmp_path}", model=ACTOR_JSON)
    assert "critic.model.path" in sentence and all(word in sentence for word in words), sentence


def test_a_critic_of_an_unsupported_architecture_is_named_before_anything_starts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(UserError) as error:
        validate(config(GAE, f"critic.model.path={tmp_path}"), None)
    about_critic = [text for text in error.value.sentences if text.startswith("critic.model.path: ")]
    assert len(about_critic) == 1 and "GPT2LMHeadModel" in about_critic[0]


def test_a_resume_without_the_critics_part_is_refused_by_name_and_may_be_accepted(tmp_path):
    folder, now = tmp_path / "step_000003", config(GAE)
    folder.mkdir()
    (folder / TRAINER_STATE).write_text(json.dumps({"step": 3, "config": config_to_plain(now)}))
    write_manifest(folder, CONTENTS)
    with pytest.raises(UserError, match=r"has no critic .*trainer.accept_missing=\[critic\]"):
        find_start(tmp_path, now, SingleRank())
    accepting = config(GAE, "trainer.accept_missing=[critic]")
    assert find_start(tmp_path, accepting, SingleRank()).missing == ("critic",)
    write_manifest(folder, contents_of(now))
    assert find_start(tmp_path, now, SingleRank()).missing == ()
    assert contents_of(Config()) == CONTENTS


def test_a_changed_critic_is_another_run_but_not_another_cut_of_it():
    before = config_to_plain(config(GAE))

    def check(*overrides: str) -> None:
        now = config(GAE, *overrides)
        check_changes(config_changes(before, now), now, [], "step_000003")

    check("critic.max_tokens_per_microbatch=9000", "trainer.total_training_steps=200")
    with pytest.raises(UserError, match="critic.value_loss_coef is 1"):
        check("critic.value_loss_coef=1.0")
    with pytest.raises(UserError, match=r"total_training_steps .* decays \(critic.optim.lr_decay_style\)"):
        check("critic.optim.lr_decay_style=linear", "trainer.total_training_steps=200")
