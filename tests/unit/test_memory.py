"""The memory estimate: published sizes are met, cluster recipes fit their GPUs,
misfits are named."""

import json
import math
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from benchmarks.memory import peak_bytes
from megatron_dapo.algorithms.sequence_loss import LossSequence
from megatron_dapo.commands.plan.process_plan import memory_lines, process_plan
from megatron_dapo.commands.plan.shortage import shortage
from megatron_dapo.config.derived import ParallelSizes, parallel_sizes
from megatron_dapo.config.loader import load_config
from megatron_dapo.estimates.flops import attention_flops
from megatron_dapo.estimates.layer_memory import kept_per_token
from megatron_dapo.estimates.memory import (
    GB,
    activation_bytes,
    head_bytes,
    model_states,
    num_parameters,
    num_trained_parameters,
    routed_experts_on_host,
    trainer_memory,
    usable_memory,
    weight_sync_bytes,
)
from megatron_dapo.estimates.model_shapes import MODEL_SHAPES
from megatron_dapo.estimates.recompute import settled
from megatron_dapo.estimates.server_memory import server_memory
from megatron_dapo.huggingface.lora_settings import lora_settings
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.model_tensors import attention_weights, hf_tensors, linear_modules
from megatron_dapo.huggingface.spec_reader import model_spec
from megatron_dapo.huggingface.weight_rows import ROUTER_BIAS
from megatron_dapo.kernels.linear_logprob import linear_logprob_entropy
from megatron_dapo.models.lora import adapter_tensors
from tests.config_overrides import ALL_RECOMPUTED, TP4, TP8_PP2
from tests.families import FAMILIES
from tests.model_json import MODEL_JSON, QWEN2_5_7B, QWEN2_5_32B
from tests.tiny_models import tiny_config

pytestmark = pytest.mark.unit

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = {"dapo_32b.yaml": QWEN2_5_32B, "dapo_7b.yaml": QWEN2_5_7B, "ppo_qwen2.5_7b.yaml": QWEN2_5_7B}
ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
ONE_RANK = ParallelSizes(tp=1, pp=1, vpp=None, world=1)


BY_HAND = {
    "dapo_32b.yaml": [*TP8_PP2, "actor_rollout_ref.rollout.server.tensor_model_parallel_size=4"],
    "dapo_7b.yaml": TP4,
}


def recipe(name: str, *overrides: str):
    """Return a recipe in the layout of the numbers below, and its model."""
    return load_config(CONFIGS / name, [*BY_HAND.get(name, []), *overrides]), model_spec(RECIPES[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_as_many_parameters_as_in_transformers(family):
    config = tiny_config(family)
    with torch.device("meta"):
        expected = sum(parameter.numel() for parameter in FAMILIES[family].model(config).parameters())
    spec = model_spec(json.loads(config.to_json_string()) | {"architectures": [FAMILIES[family].model.__name__]})
    assert sum(num_parameters(spec, ONE_RANK, stage=0)) == expected
    trained = {name: shape for name, shape in hf_tensors(spec).items() if not name.endswith(ROUTER_BIAS)}
    assert sum(map(math.prod, trained.values())) == expected
    lora = lora_settings(load_config(None, ["actor_rollout_ref.model.lora_rank=3"]))
    adapters = adapter_tensors(spec, lora)
    assert {name.split(".")[-3] for name in adapters} == set(linear_modules(spec))
    assert sum(num_trained_parameters(spec, ONE_RANK, 0, lora)) == sum(map(math.prod, adapters.values()))


def test_the_32b_recipe_by_hand():
    """Stage 0 of 2, a rank of TP 8: half of the layers and the embedding."""
    config, spec = recipe("dapo_32b.yaml")
    layer = (5120 * (40 + 2 * 8) * 128 + 40 * 128 * 5120 + 3 * 5120 * 27648 + (40 + 2 * 8) * 128) // 8 + 2 * 5120
    parameters = 32 * layer + 152064 // 8 * 5120
    states = model_states(config, spec, stage=0)
    assert (states.weights, states.gradients, states.optimizer) == (
        2 * parameters,
        4 * parameters,
        12 * parameters // 4,
    )
    # two micro-batches of 22528 tokens in flight keep each layer's input, cut over the 8 ranks
    kept = 2 * 32 * 22528 * 5120 * 2 // 8
    one_layer = 22528 * (3 * 48 * 128 * 2 // 8 + 4 * 27648 * 2 // 8 + 2 * 5120 * 8 // 8)
    working = 22528 * (2 * 5120 + 2 * 27648 // 8) * 2
    assert activation_bytes(config, spec, stage=0, tokens=22528) == kept + one_layer + working
    assert activation_bytes(config, spec, stage=1, tokens=22528) == kept // 2 + one_layer + working
    chunk = 4096 * 152064 // 8 * (4 + 2) + 4096 * 5120 * (3 * 2 + 4)
    assert head_bytes(config, spec, tokens=22528) == chunk + 22528 * 5120 * 2 // 8


OWN_LOSS = f"{ACTOR}.loss_function=my_losses:gspo"
KERNELS_OFF = f"{ACTOR}.fused_kernels=off"


def test_a_loss_of_the_users_own_holds_hidden_states_and_the_gradient_of_the_weight_by_hand():
    """A rank of the 32B recipe: 19008 rows of the vocabulary;
    the fused head adds to Megatron's gradient."""
    config, spec = recipe("dapo_32b.yaml", OWN_LOSS)
    chunk = 4096 * 19008 * (4 + 2) + 4096 * 5120 * (2 + 2 + 4)
    weight = 19008 * 5120 * (4 + 2)
    tokens = 22528 * 2 * 5120 * 2
    known = 22528 * 4 * (8 + 2 * len(fields(LossSequence)))
    assert head_bytes(config, spec, tokens=22528) == chunk + weight + tokens + known
    fused = head_bytes(recipe("dapo_32b.yaml")[0], spec, tokens=22528)
    assert head_bytes(config, spec, tokens=22528) > 1.5 * fused
    gspo, _ = recipe("dapo_32b.yaml", f"{ACTOR}.policy_loss=gspo")
    assert head_bytes(gspo, spec, tokens=22528) == head_bytes(config, spec, tokens=22528)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_composed_head_without_kernels_holds_what_is_estimated(dtype):
    """Counted allocation by allocation, one forward and backward pass in which every row counts."""
    tokens, hidden_size, vocabulary, rows = 2048, 256, 4096, 512
    name = str(dtype).removeprefix("torch.")
    overrides = [KERNELS_OFF, f"{ACTOR}.log_prob_chunk_size={rows}", f"{MEGATRON}.dtype={name}"]
    sizes = MODEL_JSON | {"hidden_size": hidden_size, "vocab_size": vocabulary}
    estimate = head_bytes(load_config(None, overrides), model_spec(sizes), tokens)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, hidden_size, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, hidden_size, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator)

    def one_pass():
        counted = hidden.index_select(0, torch.arange(tokens))
        log_probs, entropy = linear_logprob_entropy(counted, weight, targets, chunk_size=rows, use_triton=False)
        (log_probs + entropy).sum().backward()

    one_pass()
    hidden.grad = weight.grad = None
    measured = peak_bytes(one_pass)
    assert measured <= estimate <= 1.1 * measured


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipes_fit_80_gb(name):
    spec = model_spec(RECIPES[name])
    config = settled(load_config(CONFIGS / name), spec, spec if name.startswith("ppo") else None)
    assert not shortage(config, spec)
    assert 0.2 * 80 * GB < trainer_memory(config, spec).total < 74 * GB, "a recipe of a whole cluster is not a toy"


def test_a_server_of_the_32b_recipe_holds_its_weights_and_many_samples():
    config, spec = recipe("dapo_32b.yaml")
    server = server_memory(config, spec)
    # 8 KV heads on 4 GPUs; norms of 64 x 2 x 5120 + 5120 numbers whole on each
    norms = 2 * (64 * 2 * 5120 + 5120)
    assert server.weights == (65_527_752_704 - norms) // 4 + norms
    assert server.kv_per_token == 2 * 64 * 2 * 128 * 2
    assert server.kv_cache + server.weights == pytest.approx(0.82 * 80 * GB) and server.num_tokens > 30 * 22528


def alone(name: str, *overrides: str) -> str:
    config, spec = recipe(name, *overrides)
    (sentence,) = shortage(config, spec)
    return sentence


def test_what_does_not_fit_is_said_with_its_largest_part_and_the_cure():
    hopeless = alone("dapo_32b.yaml", f"{MEGATRON}.tensor_model_parallel_size=1", f"{MEGATRON}.sequence_parallel=false")
    assert "for gradients, above the 74 GB that trainer.gpu_memory_gb 80 has beside 6 GB kept free" in hopeless
    assert f"these fit by the estimate: {MEGATRON}.tensor_model_parallel_size=" in hopeless
    long = alone("dapo_7b.yaml", f"{MEGATRON}.recompute_granularity=none", f"{MEGATRON}.sequence_parallel=false")
    assert "for activations" in long and "recompute_granularity=auto" in long
    assert "log_prob_chunk_size" in alone("dapo_7b.yaml", "actor_rollout_ref.actor.max_tokens_per_microbatch=400000",
                                          "actor_rollout_ref.actor.log_prob_chunk_size=400000")  # fmt: skip
    server = alone("dapo_32b.yaml", "actor_rollout_ref.rollout.server.tensor_model_parallel_size=1")
    assert "room for 275 tokens" in server
    assert "set actor_rollout_ref.rollout.server.tensor_model_parallel_size to 2" in server


def test_every_layout_cures_what_it_shares():
    """More tensor or pipeline ranks, sequence parallelism, data parallelism,
    recompute: none needs more memory."""

    def total(*overrides: str) -> float:
        config, spec = recipe("dapo_7b.yaml", *overrides)
        return trainer_memory(config, spec).total

    whole = total(f"{MEGATRON}.sequence_parallel=false", f"{MEGATRON}.recompute_granularity=none")
    selective = f"{MEGATRON}.recompute_granularity=selective", f"{MEGATRON}.recompute_modules=[core_attn, mlp]"
    block = f"{MEGATRON}.recompute_method=block", f"{MEGATRON}.recompute_num_layers=14"
    nothing = total(f"{MEGATRON}.recompute_granularity=none")
    assert whole > nothing > max(total(*selective), total(*block)) and min(total(*selective), total(*block)) > total()
    assert total(f"{MEGATRON}.tensor_model_parallel_size=2") > total() > total("trainer.nnodes=2")
    assert total(f"{MEGATRON}.pipeline_model_parallel_size=2") < total()


def test_reference_and_critic_count_where_they_are_used():
    config, spec = recipe("ppo_qwen2.5_7b.yaml")
    parts = trainer_memory(config, spec)
    assert parts.reference == parts.weights and parts.critic > parts.gradients + parts.optimizer
    config, _ = recipe("dapo_7b.yaml")
    parts = trainer_memory(config, spec)
    assert (parts.reference, parts.critic) == (0, 0) and "reference" not in parts.by_name
    assert trainer_memory(config.model_copy(), spec).total == sum(parts.by_name.values())


def test_in_fp8_each_matrix_of_the_layers_is_there_twice_more():
    """By hand, of a quarter of 7B's layers: q and output 3584 x 3584, k and v 3584 x 512, three of
    3584 x 18944."""
    config, spec = recipe("dapo_7b.yaml")
    fp8, _ = recipe("dapo_7b.yaml", f"{MEGATRON}.fp8=hybrid")
    sizes = parallel_sizes(config)
    matrices = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944
    more = model_states(fp8, spec, 0).weights - model_states(config, spec, 0).weights
    assert more == 2 * 28 * matrices // (sizes.tp * sizes.pp)
    assert trainer_memory(fp8, spec).total - trainer_memory(config, spec).total == more


def test_moments_in_half_precision_are_two_bytes_each():
    """Of a half-precision model's 4 + 4 + 4 bytes; the weights stay in float32."""
    config, spec = recipe("dapo_7b.yaml")
    whole = model_states(config, spec, 0).optimizer
    first, _ = recipe("dapo_7b.yaml", f"{MEGATRON}.exp_avg_dtype=bfloat16")
    both, _ = recipe("dapo_7b.yaml", f"{MEGATRON}.exp_avg_dtype=bfloat16", f"{MEGATRON}.exp_avg_sq_dtype=bfloat16")
    assert model_states(first, spec, 0).optimizer == pytest.approx(whole * 10 / 12, abs=1)
    assert model_states(both, spec, 0).optimizer == pytest.approx(whole * 8 / 12, abs=1)


def test_context_parallel_ranks_share_activations_and_optimizer_state():
    """A rank has half of a micro-batch's tokens, and all weights; the state is shared by the same
    number of ranks as without."""
    key = f"{MEGATRON}.context_parallel_size=2"
    (one, spec), (two, _) = recipe("dapo_7b.yaml"), recipe("dapo_7b.yaml", key)
    whole, cut = trainer_memory(one, spec), trainer_memory(two, spec)
    assert cut.activations == pytest.approx(whole.activations / 2, rel=1e-6)
    assert (cut.weights, cut.gradients, cut.optimizer) == (whole.weights, whole.gradients, whole.optimizer)
    assert parallel_sizes(two).dp == parallel_sizes(one).dp // 2


def written(folder: Path, sizes: dict) -> str:
    (folder / "config.json").write_text(json.dumps(sizes))
    return f"actor_rollout_ref.model.path={folder}"


def test_the_process_plan_shows_it(tmp_path):
    config = load_config(CONFIGS / "dapo_32b.yaml", [*BY_HAND["dapo_32b.yaml"], written(tmp_path, QWEN2_5_32B)])
    text = process_plan(config)
    total = trainer_memory(config, model_spec(QWEN2_5_32B)).total / GB
    parts = "gradients 8.2, optimizer 6.1, weight sync 5.3, weights 4.1"
    assert f"memory        trainer: {total:.1f} of 80 GB per GPU, 6 kept free: {parts}" in text
    assert "server: weights 16.4 GB per GPU, KV cache 49.2 for" in text and "DO NOT FIT" not in text
    assert parallel_sizes(config).dp == 4
    unknown = process_plan(load_config(CONFIGS / "dapo_32b.yaml", ["actor_rollout_ref.model.path=/nowhere"]))
    assert "not estimated: the model's config.json is not in /nowhere" in unknown


def experts(num_experts: int = 8) -> ModelSpec:
    mixture = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": num_experts, "num_experts_per_tok": 2}
    return model_spec({**MODEL_JSON, **mixture, "moe_intermediate_size": 32})


def test_experts_are_shared_over_their_own_ranks():
    dense, whole = num_parameters(experts(), ONE_RANK, stage=0)
    assert whole == 12 * 8 * 3 * 96 * 32
    shared, part = num_parameters(experts(), ParallelSizes(tp=2, pp=1, vpp=None, world=4, ep=4), stage=0)
    assert part == whole // 4 and dense / 2 < shared < dense
    assert num_parameters(experts(), ParallelSizes(tp=2, pp=1, vpp=None, world=4, ep=2, etp=2), stage=0) == (
        shared,
        part,
    )


def test_dense_layers_and_shared_experts_are_counted_where_they_are():
    """Twelve layers of width 96, three on each of four stages; the first two are dense. A token of
    a layer with experts keeps, in bfloat16, 4 numbers per column of two experts and of the shared
    one. A copy per expert comes on top, doubled by ETP 2."""
    fields = {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 2}
    spec = model_spec({**MODEL_JSON, **fields, "moe_intermediate_size": 32, "first_k_dense_replace": 2})
    dense, shared, expert = (3 * 96 * width for width in (spec.dense_ffn_size, 32, 32))
    sizes = ParallelSizes(tp=2, pp=4, vpp=None, world=16, ep=2, etp=2)
    counts = [num_parameters(spec, sizes, stage) for stage in range(4)]
    assert [experts for _, experts in counts] == [number * 8 * expert // 4 for number in (1, 3, 3, 3)]
    assert counts[1][0] - (counts[0][0] - spec.vocab_size * 96 // 2) == 2 * (8 * 96 + shared // 2 - dense // 2)
    of_dense, of_experts = (kept_per_token(spec, sizes, 2, 2, layers).mlp for layers in ([0], [5]))
    assert of_dense == 4 * spec.dense_ffn_size * 2 / 2
    assert of_experts == (2 * (4 * 32 + 2 * 96) + 4 * 32) * 2 / 2
    assert kept_per_token(spec, sizes, 2, 2, [1, 2]).mlp == (of_dense + of_experts) / 2
    bias = model_states(load_config(None, [f"{MEGATRON}.dtype=float32"]), spec, 0).weights - 4 * sum(
        num_parameters(spec, ONE_RANK, stage=0)
    )
    # float32 numbers of ten routers, which have neither gradient nor optimizer state
    assert bias == 10 * 8 * 4


DEEPSEEK_V3 = MODEL_SHAPES["deepseek-v3"]


def test_a_latent_attention_is_counted_by_hand():
    """DeepSeek-V3's: 128 heads of 128 + 64 dimensions, of 128 for values; vectors of 1536 and 512.
    A tensor-parallel rank has the vectors' products in full, and its heads of the rest."""
    spec = model_spec(DEEPSEEK_V3)
    whole = 7168 * (1536 + 512 + 64) + 1536 + 512
    cut = 1536 * 128 * 192 + 512 * 128 * (128 + 128) + 128 * 128 * 7168
    assert attention_weights(spec) == whole - 1536 - 512 + cut
    one, eight = (num_parameters(spec, ParallelSizes(tp=tp, pp=61, vpp=None, world=61 * tp), 1)[0] for tp in (1, 8))
    mlp = 3 * 7168 * 18432
    assert (one, eight) == (whole + cut + mlp + 2 * 7168, whole + (cut + mlp) // 8 + 2 * 7168)
    # 576 numbers of 2 bytes per layer and token, on each GPU ("KV cache per token 70 KB", arXiv
    # 2505.09343, table 1)
    assert server_memory(load_config(None, []), spec).kv_per_token == 61 * 576 * 2 == 70_272
    # queries with keys 192, weights with values 128 wide, over 3 + 2 + 1 pairs
    assert attention_flops(spec, [3]) == 61 * 2 * 128 * (192 + 128) * 6


def test_a_stack_of_experts_is_gathered_while_the_two_before_it_are_under_way():
    """gpt-oss-120b's stacks have 128 experts x 5760 or 2880 x 2880 numbers of 2 bytes, beside
    buckets of 256 MiB. In buckets of 8 GiB they travel with others, as all tensors do then."""
    spec, down, mib = model_spec(MODEL_SHAPES["gpt-oss-120b"]), 128 * 2880 * 2880 * 2, 2**20
    assert weight_sync_bytes(load_config(None, []), spec) == 2 * 256 * mib + (2 * 2 + 2 + 1) * down
    assert weight_sync_bytes(load_config(None, ["weight_sync.bucket_size_mb=8192"]), spec) == 4 * 8192 * mib


@pytest.mark.parametrize(
    ("gigabytes", "mb", "cure"),
    [
        (20, 256, "tensors are gathered whole, so that smaller buckets do not suffice; "),
        (20, 8192, "tensors are gathered whole, so that smaller buckets do not suffice; "),
        (34, 8192, "lower weight_sync.bucket_size_mb"),
        (34, 3900, "lower weight_sync.bucket_size_mb"),  # below the largest tensor, of 4050
    ],
)
def test_smaller_buckets_are_the_cure_only_where_they_suffice(gigabytes, mb, cure):
    """gpt-oss-120b: 15.4 GB for weight sync and 15.6 for the rest with the smallest buckets."""
    sizes = {"expert_model_parallel_size": 64, "pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 2}
    keys = [f"{MEGATRON}.{name}={size}" for name, size in sizes.items()]
    keys += ["trainer.nnodes=64", f"trainer.gpu_memory_gb={gigabytes}", f"weight_sync.bucket_size_mb={mb}"]
    keys.append("trainer.gpu_reserve_gb=0")
    sentence = shortage(
        load_config(CONFIGS / "dapo_32b.yaml", [*TP8_PP2, *keys]), model_spec(MODEL_SHAPES["gpt-oss-120b"])
    )[0]
    assert f"for weight sync, above trainer.gpu_memory_gb {gigabytes}; {cure}" in sentence


@pytest.mark.parametrize(
    ("overrides", "gigabytes"),
    [
        (["trainer.n_procs_per_node=1"], 2),  # 0.5 of CUDA, 1.5 of workspaces
        (["trainer.n_procs_per_node=8"], 6),  # and 4 of NCCL
        (["trainer.n_procs_per_node=8", "trainer.gpu_reserve_gb=3.5"], 3.5),
        (["trainer.n_procs_per_node=8", "trainer.gpu_reserve_gb=0"], 0),
    ],
)
def test_what_is_not_counted_is_kept_free_of_a_card(overrides, gigabytes):
    """The CUDA context, NCCL's buffers and workspaces;
    a layout that fills the rest is refused one byte later."""
    config = load_config(None, overrides)
    spec = model_spec(QWEN2_5_7B)
    assert usable_memory(config, spec) == (80 - gigabytes) * GB
    needed = trainer_memory(config, spec).total / GB + gigabytes
    (enough, little) = (load_config(None, [*overrides, f"trainer.gpu_memory_gb={needed + by}"]) for by in (1e-6, -1e-6))
    assert not any("A trainer GPU" in sentence for sentence in shortage(enough, spec))
    assert any("A trainer GPU" in sentence for sentence in shortage(little, spec))
    assert "DO NOT FIT" not in next(memory_lines(enough, (spec, None)))
    assert "DO NOT FIT" in next(memory_lines(little, (spec, None)))


def test_user_buffers_hold_a_whole_micro_batch_for_each_kind_of_product():
    """12 of 22528 tokens x 5120 numbers of 2 bytes each, in the 32B recipe;
    with CP 2 of half the tokens."""
    spec = model_spec(QWEN2_5_32B)
    keys = (f"{MEGATRON}.tp_comm_overlap=true", "actor_rollout_ref.actor.max_tokens_per_microbatch=22528")
    for cp, tokens in ((1, 22528), (2, 11264)):
        config = load_config(CONFIGS / "dapo_32b.yaml", [*TP8_PP2, *keys, f"{MEGATRON}.context_parallel_size={cp}"])
        assert trainer_memory(config, spec).by_name["user buffers"] == 12 * tokens * 5120 * 2
    assert "user buffers" not in trainer_memory(load_config(CONFIGS / "dapo_32b.yaml"), spec).by_name


@pytest.mark.parametrize(("name", "mode"), [("30b_a3b", "rollout"), ("30b_a3b", "old"), ("235b_a22b", "rollout")])
def test_replayed_experts_take_the_hosts_memory_and_a_micro_batch_on_the_gpu(name, mode):
    """By hand: 8192 samples of 22528 tokens over DP 4 and the sequence over TP 4. There are 8
    choices of 2 bytes in each of 48 layers, or of the 16 of a middle stage, and 8 ranks on a
    node."""
    keys = [f"{ACTOR}.router_replay={mode}"]
    off, on = (load_config(CONFIGS / f"dapo_qwen3_{name}.yaml", ALL_RECOMPUTED + more) for more in ([], keys))
    spec = model_spec(MODEL_SHAPES[f"qwen3-{name.replace('_', '-')}"])
    layers = 48 if name == "30b_a3b" else 16
    parts = trainer_memory(on, spec)
    assert parts.routed_experts == parts.total - trainer_memory(off, spec).total == 22528 // 4 * layers * 8 * 2
    assert routed_experts_on_host(on, spec) == 8192 // 4 * 22528 // 4 * layers * 8 * 2 * 8
    assert routed_experts_on_host(off, spec) == 0
    lines = [line for line in memory_lines(on, (spec, None)) if "of each node's memory: routed experts" in line]
    assert len(lines) == 1 and not any("routed experts" in line for line in memory_lines(off, (spec, None)))
