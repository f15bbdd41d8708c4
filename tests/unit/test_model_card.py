"""The model card: base, data, figures, config and makers, and nothing that is no one's business."""

import json

import pytest
import yaml

from megatron_dapo.checkpointing.config_changes import config_to_plain
from megatron_dapo.checkpointing.model_card import model_card
from megatron_dapo.config.loader import load_config
from megatron_dapo.storage.run_folder import RunFolder

pytestmark = pytest.mark.unit

VERSIONS = {"megatron_dapo": "0.1.0", "torch": "2.0"}
RECORDS = [
    {"step": 0, "val/accuracy": 0.125, "val/pass@4": 0.25, "val/seconds": 3.0},
    {"step": 1, "reward/mean": 0.1},
    {"step": 5, "reward/mean": 0.2},
    {"step": 5, "val/accuracy": 0.5, "val/pass@4": 0.66666, "val/aime/maj@4": 0.75, "val/num_prompts": 30},
    {"step": 9, "val/accuracy": 0.9},
]


def card(*overrides: str, step: int = 5, records: list = RECORDS) -> str:
    path = "actor_rollout_ref.model.path=models/Qwen2.5-7B"
    return model_card(config_to_plain(load_config(None, [path, *overrides])), step, records, VERSIONS)


def head_of(text: str) -> dict:
    return yaml.safe_load(text.split("---\n")[1])


def test_a_card_says_from_what_how_and_how_well():
    text = card(
        "trainer.experiment_name=sums",
        "data.train_files=[data/dapo.parquet]",
        "data.val_files=[data/aime.parquet]",
        "actor_rollout_ref.rollout.n=16",
        "trainer.save_interval=7",
    )
    assert head_of(text) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["megatron_dapo", "reinforcement-learning"],
    }
    assert "# sums\n\nMade from Qwen2.5-7B by 5 steps of reinforcement learning; that model's licence holds." in text
    assert "## Data\n\n- train_files: data/dapo.parquet\n- val_files: data/aime.parquet\n" in text
    assert "| `actor_rollout_ref.rollout.n` | 16 | 8 |" in text
    assert "save_interval" not in text, "it changes nothing of the model"
    assert "## Made with\n\n- megatron_dapo 0.1.0\n- torch 2.0\n" in text


def test_the_figures_are_the_last_up_to_the_step_beside_the_first():
    table = (
        "| held out | before | after step 5 |\n|---|---|---|\n| accuracy | 0.125 | 0.5 |\n| pass@4 | 0.25 | 0.6667 |\n"
    )
    assert f"## Held-out figures\n\n{table}| aime/maj@4 | - | 0.75 |\n\n" in card(step=8)
    assert "| accuracy | 0.125 | 0.9 |" in card(step=9)
    assert "None were taken." in card(records=[{"step": 1, "reward/mean": 0.1}])
    assert "| loss | - | 1.5 |" in card("sft.enable=true", records=[{"step": 5, "val/loss": 1.5, "val/accuracy": "x"}])
    assert head_of(card("sft.enable=true"))["tags"] == ["megatron_dapo", "fine-tuning"]


def test_folders_addresses_and_free_values_stay_at_home():
    text = card(
        "data.train_files=[/scratch/me/secret/dapo.parquet]",
        "data.prompt_template=a </b> or c/d\\n{prompt}",
        'reward.kwargs={"api_key": "k-123", "tolerance": 2}',
        "reward.function=/scratch/me/rewards.py:score",
        "reward.judge.url=http://user:pass@10.0.0.1:8000/v1",
        "actor_rollout_ref.rollout.agent.command=[harness, --key=k-456]",
    )
    assert not any(word in text for word in ("k-456", "scratch", "secret", "k-123", "10.0.0.1", "pass@1", "user:"))
    assert "dapo.parquet" in text and "| `reward.kwargs` | api\\_key, tolerance |" in text
    assert "rewards.py:score" in text and "a \\</b\\> or c/d" in text


def test_a_text_cannot_break_the_page():
    text = card(
        r'trainer.experiment_name="a\n# b | <script> [x](y)"', "data.prompt_template=" + "`|\n" * 1000 + "{prompt}"
    )
    assert "# a \\# b \\| \\<script\\> \\[x\\](y)\n" in text
    assert all(len(line) < 1000 for line in text.splitlines())


def test_the_base_is_named_as_on_the_hub_or_as_its_run(tmp_path):
    text = card("actor_rollout_ref.model.path=/cache/hub/models--Qwen--Qwen2.5-7B/snapshots/0a1b")
    assert head_of(text)["base_model"] == "Qwen/Qwen2.5-7B" and "Made from Qwen/Qwen2.5-7B by" in text
    earlier = RunFolder(tmp_path / "warm_start").create()
    earlier.config.write_text("{}")
    earlier.model.mkdir()
    text = card(f"actor_rollout_ref.model.path={earlier.model}")
    assert "Made from the model of run warm\\_start by" in text and "base_model" not in head_of(text)


def test_the_same_run_gives_the_same_card():
    plain = config_to_plain(load_config(None, ["actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.n=4"]))
    again = json.loads(json.dumps(plain))
    assert model_card(plain, 3, RECORDS, VERSIONS) == model_card(again, 3, RECORDS, VERSIONS)
