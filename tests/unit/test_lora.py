"""LoRA in one process: loss, gradients and merged weights equal W + alpha / rank x B A in
float64."""

import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_dapo.config.loader import load_config
from megatron_dapo.data.conversations import ConversationSet
from megatron_dapo.data.tokenizer import load_tokenizer
from megatron_dapo.models.build import norms_apart
from megatron_dapo.models.hf_io import export_hf
from megatron_dapo.models.layers import submodules_of
from megatron_dapo.models.lora import without_adapters
from megatron_dapo.models.peft_folder import export_adapters
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.training.conversation_batches import ConversationDistributor, ConversationDraws
from megatron_dapo.training.policy import Policy
from tests.distributed.layout_worker import gathered, trained_source
from tests.families import FAMILIES, MODULES, as_served
from tests.peft_adapters import make_adapter, merged_checkpoint, with_adapter
from tests.sft_files import conversations, make_chat_model, mean_loss_of, write_rows
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.unit

RANK, ALPHA, BATCH = 3, 4.5, 6
TARGETS = {
    "all-linear": MODULES,
    "[q_proj, v_proj, down_proj]": ("q_proj", "v_proj", "down_proj"),
    "up_proj": ("up_proj",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    make_chat_model(folder / "model", layers=2, vocab=67)
    write_rows(folder / "train.jsonl", conversations(BATCH, seed=1))
    return folder


@pytest.fixture(scope="module")
def oracle_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)


def config_of(folder: Path, *overrides: str):
    return load_config(
        None,
        [
            "sft.enable=true",
            f"actor_rollout_ref.model.path={folder / 'model'}",
            f"actor_rollout_ref.model.lora_rank={RANK}",
            f"actor_rollout_ref.model.lora_alpha={ALPHA}",
            f"data.train_files=[{folder / 'train.jsonl'}]",
            f"data.train_batch_size={BATCH}",
            "data.shuffle=false",
            "actor_rollout_ref.actor.megatron.use_distributed_optimizer=false",
            "actor_rollout_ref.actor.megatron.dtype=float32",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            "actor_rollout_ref.actor.optim.weight_decay=0",
            *overrides,
        ],
    )


def mini_batch_of(config, policy: Policy, layout: ParallelLayout):
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    draws = ConversationDraws.of(ConversationSet.load(config.data.train_files, config, tokenizer), config)
    return ConversationDistributor(config, layout, policy.model.spec)(draws.next(BATCH))


def loss_of(model, weights: dict, folder: Path):
    def logits_of(tokens):
        return torch.func.functional_call(model, weights, kwargs={"input_ids": tokens}).logits

    return mean_loss_of(logits_of, folder / "model", folder / "train.jsonl", BATCH)


@pytest.mark.parametrize("targets", TARGETS)
def test_loss_and_gradients_of_an_adapter_are_those_of_its_product_in_float64(layout, folder, oracle_model, targets):
    path = folder / f"adapter{len(TARGETS[targets])}"
    tensors = make_adapter(path, folder / "model", RANK, ALPHA, TARGETS[targets])
    overrides = [
        f"actor_rollout_ref.model.target_modules={targets}",
        f"actor_rollout_ref.model.lora_adapter_path={path}",
    ]
    config = config_of(folder, *overrides)
    policy = Policy(config, layout)
    metrics = policy.accumulate_gradients(mini_batch_of(config, policy, layout)).means()

    exact = {name: tensor.double().requires_grad_() for name, tensor in tensors.items()}
    expected = loss_of(oracle_model, with_adapter(dict(oracle_model.named_parameters()), exact, ALPHA / RANK), folder)
    expected.backward()
    assert metrics["train/loss"] == pytest.approx(expected.item(), rel=1e-5)
    gradients = gathered(trained_source(policy.model, layout), layout)
    assert gradients.keys() == exact.keys()
    rounded = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    model = deepcopy(oracle_model).float()
    loss_of(model, with_adapter(dict(model.named_parameters()), rounded, ALPHA / RANK), folder).backward()
    for name, tensor in exact.items():
        # as the same in float32 errs, which rounds at other places
        error, allowed = ((each.double() - tensor.grad).norm() for each in (gradients[name], rounded[name].grad))
        assert error < 4 * allowed, name
    merged = gathered(policy.weight_source(), layout)
    for name, weight in with_adapter(dict(oracle_model.named_parameters()), exact, ALPHA / RANK).items():
        # one product of three terms, added to the weight and rounded, in float32
        torch.testing.assert_close(merged[name].double(), weight.detach(), rtol=1e-6, atol=1e-6)


def test_new_adapters_change_nothing_to_the_bit_and_learn_with_the_weights_left_alone(layout, folder):
    config = config_of(folder)
    policy = Policy(config, layout)
    stored = load_file(folder / "model" / "model.safetensors")
    merged = gathered(policy.weight_source(), layout)
    assert all(torch.equal(merged[name].view(torch.int32), tensor.view(torch.int32)) for name, tensor in stored.items())
    batch = mini_batch_of(config, policy, layout)
    with without_adapters(policy.model.chunks):
        base = policy.schedule.log_probs(batch)
    assert all(torch.equal(a, b) for a, b in zip(base, policy.schedule.log_probs(batch), strict=True))
    frozen = {name: p.clone() for name, p in policy.model.chunks[0].named_parameters() if not p.requires_grad}
    losses = [policy.update([batch], weight_version=step)["train/loss"] for step in range(30)]
    assert losses[-1] < losses[0] - 0.5
    parameters = dict(policy.model.chunks[0].named_parameters())
    assert all(torch.equal(parameters[name], tensor) for name, tensor in frozen.items())
    with without_adapters(policy.model.chunks):
        assert all(torch.equal(a, b) for a, b in zip(base, policy.schedule.log_probs(batch), strict=True))


def test_a_peft_folder_comes_back_bit_for_bit_and_a_merged_export_is_the_adapter_on_its_base(layout, folder, tmp_path):
    tensors = make_adapter(tmp_path / "in", folder / "model", RANK, ALPHA, seed=1)
    config = config_of(folder, f"actor_rollout_ref.model.lora_adapter_path={tmp_path / 'in'}")
    policy = Policy(config, layout)
    export_adapters(policy.model, layout, str(folder / "model"), tmp_path / "out")
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())
    export_hf(policy.model, layout, folder / "model", tmp_path / "merged")
    by_hand = merged_checkpoint(tmp_path / "by_hand", folder / "model", tensors, ALPHA / RANK)
    models = [in_float64(path) for path in (tmp_path / "merged", by_hand)]
    losses = [loss_of(model, dict(model.named_parameters()), folder).item() for model in models]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def in_float64(path: Path):
    return as_served(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager"))


@pytest.mark.parametrize("family", [name for name, row in FAMILIES.items() if row.num_adapted])
def test_adapters_of_other_families_have_the_loss_of_their_product_in_float64(layout, folder, tmp_path, family):
    """Experts' are named as in PEFT files of models with experts as modules."""
    model = make_tiny(tmp_path / "model", family, layers=2, vocab=67)
    shutil.copy(folder / "model" / "chat_template.jinja", model)
    tensors = make_adapter(tmp_path / "in", model, RANK, ALPHA)
    num_adapted = FAMILIES[family].num_adapted
    assert num_adapted is not None and len(tensors) == 2 * num_adapted(8)
    paths = [f"actor_rollout_ref.model.path={model}", f"actor_rollout_ref.model.lora_adapter_path={tmp_path / 'in'}"]
    config = config_of(folder, *paths)
    policy = Policy(config, layout)
    batch = mini_batch_of(config, policy, layout)
    loss = policy.accumulate_gradients(batch).means()["train/loss"]
    by_hand = merged_checkpoint(tmp_path / "by_hand", model, tensors, ALPHA / RANK)
    oracle = in_float64(by_hand)
    assert loss == pytest.approx(loss_of(oracle, dict(oracle.named_parameters()), folder).item(), rel=1e-5)
    merged = gathered(policy.weight_source(), layout)
    for name, weight in load_file(by_hand / "model.safetensors").items():
        # one product of three terms, added to the weight and rounded, in float32
        torch.testing.assert_close(merged[name].float(), weight, rtol=1e-6, atol=1e-6)
    gradients = gathered(trained_source(policy.model, layout), layout)
    assert gradients.keys() == tensors.keys()
    export_adapters(policy.model, layout, str(model), tmp_path / "out")
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("num_experts", [None, 8])
def test_transformer_engines_norms_stand_apart_beside_adapters(num_experts, monkeypatch):
    """An adapter gets the input of the product behind the norm.
    Their names are those of our own layers."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.models.gpt import gpt_layer_specs

    # absent as the package is
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", TESpecProvider, raising=False)
    monkeypatch.setattr("megatron.core.utils.get_te_version", lambda: Version("2.20"))
    layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(num_experts=num_experts, qk_layernorm=True)
    norms_apart(layer, is_dense=num_experts is None)
    parts = layer.submodules
    assert parts.input_layernorm is parts.pre_mlp_layernorm is TENorm
    assert parts.self_attention.submodules.linear_qkv is TEColumnParallelLinear
    products = submodules_of(parts.mlp)
    if num_experts is not None:
        products = submodules_of(products.experts)
    assert products.linear_fc1 is TEColumnParallelLinear
