"""Keys of a fine-tuning run: its inputs, its refusals, its display before the start."""

import json

import pytest

from megatron_dapo.__main__ import main
from megatron_dapo.checks.run_checks import load_and_validate, validate
from megatron_dapo.checks.sft_checks import is_read
from megatron_dapo.commands.plan.process_plan import process_plan
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.derived import starts_servers, uses_servers
from megatron_dapo.config.keys import known_keys
from megatron_dapo.config.loader import load_config
from tests.model_json import MODEL_JSON

pytestmark = pytest.mark.unit

SFT = ["sft.enable=true", "data.train_batch_size=48", "actor_rollout_ref.model.path=model"]


def sentences(*overrides: str, model: dict | None = None) -> list[str]:
    try:
        validate(load_config(None, overrides), model, check_files=False)
    except UserError as error:
        return list(error.sentences)
    return []


def test_a_run_that_fine_tunes_needs_no_key_of_reinforcement_learning():
    """A batch of 48 is no multiple of `ppo_mini_batch_size`, which is not read."""
    assert sentences(*SFT, model=MODEL_JSON) == []
    config = load_config(None, SFT)
    assert not uses_servers(config) and not starts_servers(config)


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.temperature=0.7",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "algorithm.adv_estimator=rloo",
        "algorithm.dynamic_sampling.enable=true",
        "critic.optim.lr=1e-3",
        "reward.function=math_dapo",
        "weight_sync.verify=true",
        "data.max_response_length=100",
        "trainer.synthetic_batch=true",
    ],
)
def test_a_key_of_reinforcement_learning_is_refused_in_one_sentence(override):
    (sentence,) = sentences(*SFT, override)
    key, _, value = override.partition("=")
    assert sentence.startswith(f"{key} is ") and "supervised fine-tuning (sft.enable) does not read it; remove it." in (
        sentence
    )


def test_a_key_of_fine_tuning_is_refused_elsewhere():
    (sentence,) = sentences("sft.max_length=100")
    assert "sft.max_length is 100, but has no effect while sft.enable is false" in sentence


def test_what_is_read_are_keys_that_exist():
    read = [name for name in known_keys() if is_read(name)]
    assert {"sft.max_length", "actor_rollout_ref.actor.optim.lr", "trainer.save_interval", "data.seed"} <= set(read)
    assert not any(name.startswith(("algorithm", "reward", "critic", "weight_sync", "exp_manager")) for name in read)


@pytest.mark.parametrize(
    ("overrides", "model", "said"),
    [
        (["sft.max_length=20000"], None, "too small for one conversation of 20000 tokens (sft.max_length 20000)"),
        (["sft.max_length=4096"], {"max_position_embeddings": 512}, "sft.max_length is 4096, above the model's"),
        (["trainer.test_freq=5"], None, "data.val_files is empty"),
        (["actor_rollout_ref.actor.megatron.tensor_model_parallel_size=3"], None, "not a multiple of 3"),
        (["trainer.keep_every=3"], None, "trainer.keep_every is 3, but has no effect while trainer.keep_last is null"),
    ],
)
def test_what_does_not_fit_together_is_told(overrides, model, said):
    faults = sentences(*SFT, *overrides, model=MODEL_JSON | model if model else None)
    assert len(faults) == 1 and said in faults[0]


def test_files_must_be_there(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL_JSON))
    with pytest.raises(UserError) as raised:
        load_and_validate(None, ["sft.enable=true", f"actor_rollout_ref.model.path={tmp_path}"])
    (sentence,) = raised.value.sentences
    assert sentence == "data.train_files is empty; give one or more .jsonl or .parquet files with conversations."


def test_the_plan_says_what_a_step_learns_from():
    plan = process_plan(load_config(None, [*SFT, "trainer.total_training_steps=7"]))
    assert "48 conversations of at most 4096 tokens in each of 7 optimizer steps" in plan
    assert not any(word in plan for word in ("server", "rollout", "weight sync", "reward", "techniques"))


def test_the_command_sets_the_switch(capsys):
    code = main(["sft", "--dry-run", "data.train_batch_size=48", "actor_rollout_ref.rollout.n=4"])
    assert code == 2 and "supervised fine-tuning (sft.enable) does not read it" in capsys.readouterr().err


def test_planning_the_time_of_a_run_that_fine_tunes_is_refused(tmp_path, capsys):
    (tmp_path / "sft.yaml").write_text("sft: {enable: true}\n")
    (tmp_path / "config.json").write_text(json.dumps(MODEL_JSON))
    code = main(["plan", "--config", str(tmp_path / "sft.yaml"), f"actor_rollout_ref.model.path={tmp_path}"])
    assert code == 2 and "sft.enable is true, whose batches come from no server" in capsys.readouterr().err
