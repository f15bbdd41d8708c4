"""The critic of a training checkpoint becomes a token classifier,
a possible start of another run's critic."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification

from checkpoints_tools import megatron_to_hf
from megatron_dapo.checkpointing.manifest import write_manifest
from megatron_dapo.checkpointing.torch_dist.saving import save
from megatron_dapo.config.loader import load_config
from megatron_dapo.huggingface.reward_model import architecture_of
from megatron_dapo.models.hf_io import copy_model_files
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.training.critic import Critic
from megatron_dapo.training.policy import Policy
from tests.tiny_models import make_tiny, make_tiny_classifier

pytestmark = pytest.mark.unit


@pytest.fixture
def layout():
    layout = ParallelLayout.initialize()
    yield layout
    layout.shutdown()


def weights_of(critic: Critic) -> list[torch.Tensor]:
    return [parameter.detach().clone() for chunk in critic.model.chunks for parameter in chunk.parameters()]


@pytest.mark.parametrize("has_own_model", [False, True])
def test_the_critic_of_a_checkpoint_is_exported_and_read_again(has_own_model, tmp_path, layout):
    """It began with its policy's body, or with a classifier of its own;
    then that folder is named."""
    actor = make_tiny(tmp_path / "actor", "qwen2", tied=True, layers=2)
    own = make_tiny_classifier(tmp_path / "own", "qwen2", bias=0.5, seed=3)
    keys = [f"actor_rollout_ref.model.path={actor}", "algorithm.adv_estimator=gae"]
    config = load_config(None, [*keys, *([f"critic.model.path={own}"] if has_own_model else [])])
    checkpoint = tmp_path / "checkpoint"
    critic = Critic(config, layout)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in critic.model.chunks[0].parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    for part, model in (("megatron", Policy(config, layout).model), ("critic", critic.model)):
        save(checkpoint / part, model, layout).finish()
    (checkpoint / "hf").mkdir()
    copy_model_files(actor, checkpoint / "hf")
    write_manifest(checkpoint, ["model", "critic"])
    layout.shutdown()

    named = ["--critic", str(own)] if has_own_model else ["--critic"]
    out = tmp_path / "out"
    assert megatron_to_hf.main(["--checkpoint", str(checkpoint), "--output", str(out), *named]) == 0
    tensors = load_file(out / "model.safetensors")
    assert tensors["score.weight"].shape == (1, 64) and tensors["score.bias"].shape == (1,)
    assert "lm_head.weight" not in tensors and architecture_of(str(out)) == "Qwen2ForTokenClassification"
    model, info = AutoModelForTokenClassification.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and model.config.num_labels == 1
    assert torch.equal(model.score.weight, tensors["score.weight"])

    again = load_config(None, [*keys, f"critic.model.path={out}"])
    layout = ParallelLayout.initialize()
    for loaded, trained in zip(weights_of(Critic(again, layout)), weights_of(critic), strict=True):
        assert torch.equal(loaded, trained)


def test_a_checkpoint_without_a_critic_is_a_mistake(tmp_path, layout, capsys):
    actor = make_tiny(tmp_path / "actor", "qwen2", layers=1)
    checkpoint = tmp_path / "checkpoint"
    policy = Policy(load_config(None, [f"actor_rollout_ref.model.path={actor}"]), layout)
    save(checkpoint / "megatron", policy.model, layout).finish()
    (checkpoint / "hf").mkdir()
    copy_model_files(actor, checkpoint / "hf")
    write_manifest(checkpoint, ["model"])
    layout.shutdown()
    out: Path = tmp_path / "out"
    assert megatron_to_hf.main(["--checkpoint", str(checkpoint), "--output", str(out), "--critic"]) == 2
    error = capsys.readouterr().err
    assert "has no critic folder; give a checkpoint of algorithm.adv_estimator gae." in error and not out.exists()
    assert json.loads((checkpoint / "hf" / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
