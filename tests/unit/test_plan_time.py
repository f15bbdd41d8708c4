"""The arithmetic of the plan of time: each formula against hand-computed or published numbers."""

import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_dapo.commands.plan.server_time import (
    ServerLayout,
    ServerSpeed,
    active_parameters,
    mean_context,
    num_all_parameters,
    push_s,
    server_speed,
)
from megatron_dapo.commands.plan.training_time import (
    Efficiency,
    TrainerLayout,
    TrainingWork,
    optimizer_step_s,
    trainer_layout,
    training_time,
)
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.derived import ParallelSizes
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.recipes import recipe
from megatron_dapo.data.lengths import Lengths
from megatron_dapo.estimates.hardware import HARDWARE, Hardware, hardware_named, lack_of_fp8
from megatron_dapo.estimates.memory import num_parameters
from megatron_dapo.estimates.model_shapes import MODEL_SHAPES, model_json_named
from megatron_dapo.estimates.recompute import recomputed_share
from megatron_dapo.huggingface.lora_settings import LINEAR_MODULES, LoraSettings
from megatron_dapo.huggingface.spec_reader import model_spec
from megatron_dapo.huggingface.windows import Windows
from tests.config_overrides import TP8_PP2

pytestmark = pytest.mark.unit

MEGATRON = "actor_rollout_ref.actor.megatron"

# of the checkpoints' model.safetensors.index.json, or of the model cards
PUBLISHED_PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3.5-9b": 8_953_803_264,  # these six by hand: test_hybrid_plan.py
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3.6-27b": 26_895_998_464,
    "qwen3.6-35b-a3b": 34_660_610_688,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "glm-4-9b": 9_400_279_040,
    "gemma-3-1b": 999_885_952,
    "glm-4.5-air": 106_852_245_504,  # this and the next as transformers counts them
    "glm-4.5": 352_797_814_784,
    "deepseek-v3": 671_026_404_352,  # this and the next two without the routers' biases
    "kimi-k2": 1_026_408_232_448 - 60 * 384,
    "glm-4.7-flash": 29_943_393_920 - 46 * 64,  # and without the layer of multi-token prediction
    "gpt-oss-20b": 20_914_757_184,  # this and the next as transformers counts them
    "gpt-oss-120b": 116_829_156_672,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
}
# max_position_embeddings and rms_norm_eps of their config.json on Hugging Face; most of these files
# are copied in github.com/citsjtu2020/LLM-Prof, sglang/Model_Config.md
PUBLISHED_POSITIONS = {
    "qwen2.5-0.5b": (32768, 1e-6),
    "qwen2.5-3b": (32768, 1e-6),
    "qwen2.5-7b": (131072, 1e-6),
    "qwen2.5-14b": (131072, 1e-5),
    "qwen2.5-32b": (131072, 1e-5),
    "qwen3-0.6b": (40960, 1e-6),
    "qwen3-1.7b": (40960, 1e-6),
    "qwen3-4b": (40960, 1e-6),
    "qwen3-8b": (40960, 1e-6),
    "qwen3-14b": (40960, 1e-6),
    "qwen3-32b": (40960, 1e-6),
    "qwen3-30b-a3b": (40960, 1e-6),
    "qwen3-235b-a22b": (40960, 1e-6),
    "llama-3.1-8b": (131072, 1e-5),
    "llama-3.1-70b": (131072, 1e-5),
}
ONE_RANK = ParallelSizes(tp=1, pp=1, vpp=None, world=1)
SMALL = model_spec(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 16,
        "vocab_size": 32,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
    }
)
# per second, with the efficiencies below: 10^4 operations, 10^4 bytes of memory, 10^3 over links,
# 10^2 over the network, 10^3 of the node's memory, 10^2 between that and the GPU
SLOW = Hardware("slow", 2e4, 1e9, 2e4, 2e3, 2e2, 2e3, 2e2)
HALF = Efficiency(matmul=0.5, memory=0.5, link=0.5)
THREE_TOKENS = Lengths(median=3, sigma=0.0, longest=8)
ALONE = TrainerLayout(ONE_RANK, 8, sequence_parallel=False, recompute=0.0, max_tokens=64)


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_a_models_shape_by_name_has_as_many_parameters_as_its_checkpoint(name):
    assert sum(num_parameters(model_spec(model_json_named(name)), ONE_RANK, 0)) == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", PUBLISHED_POSITIONS)
def test_a_models_shape_by_name_has_its_positions(name):
    spec = model_spec(model_json_named(name))
    assert (spec.max_positions, spec.norm_eps) == PUBLISHED_POSITIONS[name]


def test_a_token_of_a_mixture_goes_only_through_its_own_experts():
    # "30.5B total, 3.3B activated" (model card); without the embedding's 0.31 B rows,
    # which are looked up
    spec = model_spec(model_json_named("qwen3-30b-a3b"))
    assert active_parameters(spec) + spec.vocab_size * spec.hidden_size == pytest.approx(3.35e9, rel=0.01)


@pytest.mark.parametrize("look_up", [model_json_named, hardware_named])
def test_an_unknown_name_is_one_sentence_that_names_those_there_are(look_up):
    with pytest.raises(UserError) as error:
        look_up("nonesuch")
    (sentence,) = error.value.sentences
    known = MODEL_SHAPES if look_up is model_json_named else HARDWARE
    assert all(name in sentence for name in known)


@settings(max_examples=50)
@example(share=0.02, sigma=1.5, longest=100)  # a median below one token
@given(st.floats(0.02, 0.9), st.floats(0.1, 1.5), st.integers(100, 30000))
def test_lengths_have_the_mean_that_was_asked_for_after_the_cut(share, sigma, longest):
    assert Lengths.with_mean(share * longest, sigma, longest).mean == pytest.approx(share * longest, rel=1e-6)


def test_moments_and_quantiles_of_lengths_are_those_of_many_samples():
    lengths = Lengths.with_mean(6000, 0.9, 20480)
    source = random.Random(0)
    samples = [lengths.sample(source) for _ in range(50_000)]
    # five standard errors: deviations of a length below its mean, of a square below twice its mean
    assert sum(samples) / len(samples) == pytest.approx(lengths.mean, rel=5 / len(samples) ** 0.5)
    assert sum(x * x for x in samples) / len(samples) == pytest.approx(
        lengths.mean_square, rel=10 / len(samples) ** 0.5
    )
    assert sum(x == 20480 for x in samples) / len(samples) == pytest.approx(lengths.cut_share, abs=0.005)
    quantiles = lengths.quantiles(400)
    assert sum(quantiles) / 400 == pytest.approx(lengths.mean, rel=0.002)
    assert sum(x * x for x in quantiles) / 400 == pytest.approx(lengths.mean_square, rel=0.01)


def test_training_takes_the_time_worked_out_by_hand():
    """One sample of 1 + 3 tokens on one rank.

    Layers: projections 8 x (8 + 8) + 8 x 8 = 192 and MLP 3 x 8 x 16 = 384 parameters, 1152
    operations per token, 4608 for 4; attention 4 x 8 x (1 + 2 + 3 + 4) = 320; two layers 9856.
    Head: 2 x 8 x 32 x 3 = 1536. Activations per token and layer: attention 72, MLP 128, the rest
    128 bytes, written and read in two layers: 1312 for a token, 5248 for 4. Parameters: 2 x (576 +
    16) + 2 x 256 + 8 = 1704.
    """
    time = training_time(SMALL, ALONE, TrainingWork(1, THREE_TOKENS, 1, mini_batches=1), SLOW, HALF)
    layers, head, weights = 0.9856 + 0.5248, 0.1536, 0.3408
    assert time.score == pytest.approx(layers + head + weights)
    assert time.optimizer == pytest.approx(1704 * 30 / 1e4)
    worked = 3 * (layers + head) + weights + 1704 * (2 + 8) / 1e4
    assert time.update == pytest.approx(worked + 5.112) == pytest.approx(12.1488)
    assert time.mfu == pytest.approx(3 * (9856 + 1536) / (12.1488 * 2e4))
    assert time.tensor == time.bubble == 0.0


def test_training_adapters_leaves_out_the_gradients_of_weights():
    """As above, with adapters of rank 2 beside all modules: 2 x (2 x 16 + 2 x 12 + 3 x 24) = 256
    parameters a layer, 512 in two, 4096 operations for 4 tokens. Frozen parts have no gradients, in
    9216 operations of layers' products and 1536 of the head's. Gradients of 4 bytes are read and
    written, and Adam steps, for only 512 parameters."""
    layout = replace(ALONE, lora=LoraSettings(2, 2.0, LINEAR_MODULES, seed=0))
    time = training_time(SMALL, layout, TrainingWork(1, THREE_TOKENS, 1, mini_batches=1), SLOW, HALF)
    layers, adapters, head, weights = 0.9856 + 0.5248, 0.4096, 0.1536, 0.3408
    assert time.score == pytest.approx(layers + adapters + head + weights)
    assert time.optimizer == pytest.approx(512 * 30 / 1e4)
    worked = 3 * (layers + adapters + head) - (0.9216 + 0.1536) + 2 * weights + 512 * 8 / 1e4
    assert time.update == pytest.approx(worked + time.optimizer)
    assert time.mfu == pytest.approx((3 * (9856 + 4096 + 1536) - 9216 - 1536) / (time.update * 2e4))


def test_the_plan_of_a_recipe_updates_faster_with_adapters():
    spec = model_spec(model_json_named("qwen2.5-7b"))
    plain, lora = (load_config(recipe("dapo_7b"), [f"actor_rollout_ref.model.lora_rank={rank}"]) for rank in (0, 32))
    work = TrainingWork(512, Lengths.with_mean(6000, 0.9, 20480), 200, mini_batches=16)
    times = [training_time(spec, trainer_layout(c, spec), work, HARDWARE["h100"], Efficiency()) for c in (plain, lora)]
    assert 2 / 3 < times[1].update / times[0].update < 0.85 and times[1].score > times[0].score


def test_recomputation_adds_forward_passes_of_only_the_layers():
    work = TrainingWork(1, THREE_TOKENS, 1, mini_batches=1)
    less, more = (training_time(SMALL, replace(ALONE, recompute=x), work, SLOW, HALF) for x in (0.0, 1.0))
    assert more.update - less.update == pytest.approx(0.9856 + 0.5248)
    assert more.score == less.score and more.mfu < less.mfu


def test_in_fp8_the_products_of_the_layers_take_half_as_long_and_attention_as_long_as_before():
    """At lengths of 1 + 3: 10 pairs x 2 layers x 4 x 8 wide are attention's operations,
    at 10^4 per second."""
    work = TrainingWork(1, THREE_TOKENS, 1, mini_batches=1)
    layers, _ = work.forward_flops(SMALL)
    assert work.attention_flops(SMALL) == 10 * 2 * 4 * SMALL.num_heads * SMALL.head_dim
    products_s = (layers - work.attention_flops(SMALL)) / 1e4
    plain, fp8 = (training_time(SMALL, replace(ALONE, fp8=on), work, SLOW, HALF) for on in (False, True))
    assert plain.score - fp8.score == pytest.approx(products_s / 2)
    assert plain.update - fp8.update == pytest.approx(3 * products_s / 2)


@pytest.mark.parametrize(
    ("gpu", "recipe", "cure"),
    [
        ("a100", "tensorwise", "set fp8 to none"),
        ("h100", "mxfp8", "set fp8_recipe to tensorwise or delayed or blockwise"),
        ("h100", "blockwise", None),
        ("b200", "mxfp8", None),
    ],
)
def test_a_plan_refuses_a_recipe_of_fp8_that_its_gpus_lack(gpu, recipe, cure):
    row = HARDWARE[gpu]
    lack = lack_of_fp8(row.name, row.capability, recipe)
    assert (lack is None) if cure is None else (cure in lack and f"but {gpu} has" in lack)


@pytest.mark.parametrize(("sequence_parallel", "passes"), [(False, 2.0), (True, 2.5)])
def test_tensor_parallel_ranks_exchange_the_bytes_worked_out_by_hand(sequence_parallel, passes):
    """4 tokens, 2 layers, 4 x 1/2 x 8 x 2 bytes each: 256 bytes a pass, at 1000 per second inside a
    node. Backward as much, and half as much again to gather inputs. Between nodes of one GPU: at
    100 per second."""
    layout = TrainerLayout(ParallelSizes(2, 1, None, 2), 2, sequence_parallel, 0.0, 64)
    work = TrainingWork(1, THREE_TOKENS, 1, mini_batches=1)
    assert training_time(SMALL, layout, work, SLOW, HALF).tensor == pytest.approx(0.256 * passes)
    apart = replace(layout, gpus_per_node=1)
    assert training_time(SMALL, apart, work, SLOW, HALF).tensor == pytest.approx(2.56 * passes)


def test_context_parallel_ranks_pass_keys_and_values_round():
    """Of 4 tokens 2 each, 2 layers; a key and a value of 4 numbers of 2 bytes go to CP - 1 = 1
    other rank. They are 64 bytes a pass, at 1000 per second. Backward as much, and their gradients
    as much again. Recomputed ones go round once more. The optimizer's state is shared as over
    data-parallel ranks."""
    work = TrainingWork(1, THREE_TOKENS, 1, mini_batches=1)
    layout = TrainerLayout(ParallelSizes(1, 1, None, 2, cp=2), 2, False, 0.0, 64)
    time = training_time(SMALL, layout, work, SLOW, HALF)
    assert time.tensor == pytest.approx(0.064 * 3)
    again = training_time(SMALL, replace(layout, recompute=1.0), work, SLOW, HALF)
    assert again.tensor == pytest.approx(0.064 * 4)
    data_parallel = replace(layout, sizes=ParallelSizes(1, 1, None, 2))
    assert time.optimizer == training_time(SMALL, data_parallel, work, SLOW, HALF).optimizer


@pytest.mark.parametrize(("cp", "length"), [(2, 4), (4, 8)])
def test_context_parallel_ranks_compute_the_padding_of_each_sample_as_well(cp, length):
    """A sample of 1 + 3 tokens is cut into 2 x CP chunks: with 4 nothing is padded, with 8 it
    doubles. That is 2 x 1152 operations each, and attention over 1 + ... + 8 = 36 pairs of 32 in
    two layers; twice the activations. The head and MFU count 4 tokens."""
    work = TrainingWork(1, THREE_TOKENS, 1, mini_batches=1)
    layout = TrainerLayout(ParallelSizes(1, 1, None, cp, cp=cp), 8, False, 0.0, 64)
    layers = (2 * 1152 * length + 2 * 32 * length * (length + 1) / 2 + 1312 * length) / 1e4
    head, ring = 0.1536, 2 * 16 * (cp - 1) * length / 1e3
    time = training_time(SMALL, layout, work, SLOW, HALF)
    assert time.score == pytest.approx((layers + head + ring) / cp + 0.3408)
    assert time.mfu == pytest.approx(3 * (9856 + 1536) / (time.update * cp * 2e4))


@pytest.mark.parametrize(("offloaded", "seconds"), [(0.0, 5.112), (0.25, 17.04), (1.0, 68.16)])
def test_an_offloaded_optimizer_takes_the_time_of_the_nodes_memory(offloaded, seconds):
    """1704 parameters: of 30 bytes each at 10^4 per second on the GPU, at the same time of 40 at
    10^3 in the node's memory. Their gradients of 4 bytes come at 10^2, which takes as long."""
    layout = replace(ALONE, offloaded=offloaded)
    assert optimizer_step_s((1704, 0), layout, 0.0, SLOW, HALF) == pytest.approx(seconds)
    slower = replace(SLOW, host_link_bandwidth=1e2)
    assert optimizer_step_s((1704, 0), layout, 0.0, slower, HALF) == pytest.approx(
        seconds if not offloaded else 2 * seconds
    )


def test_the_plan_of_a_recipe_takes_longer_with_an_offloaded_optimizer():
    spec = model_spec(model_json_named("qwen2.5-32b"))
    names = ("0.0", "0.5")
    configs = [
        load_config(recipe("dapo_32b"), [*TP8_PP2, f"{MEGATRON}.optimizer_offload_fraction={name}"]) for name in names
    ]
    parameters = num_parameters(spec, ParallelSizes(8, 2, None, 64), 1)
    kept, offloaded = (
        optimizer_step_s(parameters, trainer_layout(config, spec), 0.0, HARDWARE["h100"], Efficiency())
        for config in configs
    )
    # 8 x 2 x 4 ranks: the last stage's parameters by DP 4;
    # half of them by 40 bytes at 0.7 x 77 GB/s
    share = sum(parameters) / 4
    assert offloaded - kept == pytest.approx(share / 2 * 40 / (0.7 * 77e9) - share * 30 / (0.7 * 3.35e12))


def test_with_user_buffers_micro_batches_are_full_and_collectives_hide_behind_products():
    """Three samples of 4 tokens in two optimizer steps of 6 tokens each, on TP 2 with a cap of 8:
    16 tokens are computed. Products of 16 x 2304 operations on two ranks take 1.8432 s, collectives
    of 16 x 64 bytes 1.024 s: they hide. At a tenth of the links' rate 10.24 - 1.8432 s of them are
    left."""
    work = TrainingWork(3, THREE_TOKENS, 1, mini_batches=2)
    layout = TrainerLayout(ParallelSizes(2, 1, None, 2), 8, True, 0.0, max_tokens=8, tp_comm_overlap=True)
    time = training_time(SMALL, layout, work, SLOW, HALF)
    products, attention, head = 16 * 2304 / 2e4, 3 * 640 / 2e4, 3 * 1536 / 2e4
    traffic = 16 * 1312 / 2 / 1e4
    weights = 2 * 872 * 2 / 1e4
    assert time.tensor == 0.0
    assert time.score == pytest.approx(products + attention + head + traffic + weights)
    slow_links = replace(SLOW, link_bandwidth=2e2)
    assert training_time(SMALL, layout, work, slow_links, HALF).tensor == pytest.approx(2.5 * (10.24 - products))
    apart = training_time(SMALL, replace(layout, tp_comm_overlap=False), work, SLOW, HALF)
    assert apart.tensor == pytest.approx(2.5 * 12 * 64 / 1e3)
    assert apart.mfu * apart.update == pytest.approx(time.mfu * time.update)


def test_gradients_are_reduced_and_weights_gathered_over_data_parallel_ranks():
    """TP 2: 2 x (576 / 2 + 16) + 2 x 16 x 8 + 8 = 872 parameters. DP 2: half of 4 + 2 bytes each
    over the link, and Adam over half of them."""
    layout = TrainerLayout(ParallelSizes(2, 1, None, 4), 8, True, 0.0, 64)
    adam = 872 / 2 * 30 / 1e4
    assert sum(num_parameters(SMALL, layout.sizes, 0)) == 872
    assert optimizer_step_s((872, 0), layout, 0.0, SLOW, HALF) == pytest.approx(872 * (2 + 1) / 1e3 + adam)
    hidden = replace(layout, overlap_grad_reduce=True)
    assert optimizer_step_s((872, 0), hidden, 1.0, SLOW, HALF) == pytest.approx((872 * 2 / 1e3 - 1) + 0.872 + adam)
    assert optimizer_step_s((872, 0), hidden, 9.0, SLOW, HALF) == pytest.approx(0.872 + adam)


def test_experts_are_shared_by_the_ranks_that_hold_the_same_ones():
    """TP 2 x DP 4, EP 4: 800 shared parameters are held by 4 ranks,
    600 of experts by 2 x 4 / 4 = 2."""
    layout = TrainerLayout(ParallelSizes(2, 1, None, 8, ep=4), 8, True, 0.0, 64)
    exchanged = (800 * 3 / 4 + 600 / 2) * (4 + 2) / 1e3
    adam = (800 / 4 + 600 / 2) * 30 / 1e4
    assert optimizer_step_s((800, 600), layout, 0.0, SLOW, HALF) == pytest.approx(exchanged + adam)
    # each expert once: nothing to exchange
    spread = replace(layout, sizes=ParallelSizes(2, 1, None, 8, ep=8))
    alone = 800 * 3 / 4 * (4 + 2) / 1e3 + (800 / 4 + 600) * 30 / 1e4
    assert optimizer_step_s((800, 600), spread, 0.0, SLOW, HALF) == pytest.approx(alone)


@pytest.mark.parametrize(("gpus_per_node", "rate", "is_longer"), [(8, 1e3, False), (2, 1e2, True)])
def test_weights_are_gathered_behind_the_next_forward_pass_save_the_last(gpus_per_node, rate, is_longer):
    """2 passes of 4 optimizer steps: 7 of 8 gathers of 872 parameters hide. They hide behind the
    forward pass of a step's one micro-batch, a third of it. Between nodes it takes less than the
    gather."""
    layout = TrainerLayout(ParallelSizes(2, 1, None, 4), gpus_per_node, True, 0.0, max_tokens=64)
    work = TrainingWork(32, THREE_TOKENS, 1, mini_batches=4, epochs=2)
    whole = training_time(SMALL, layout, work, SLOW, HALF)
    hidden = training_time(SMALL, replace(layout, overlap_param_gather=True), work, SLOW, HALF)
    forward_s, gather_s = (whole.update - whole.optimizer) / 8 / 3, 872 / rate
    assert (gather_s > forward_s) is is_longer
    assert whole.optimizer - hidden.optimizer == pytest.approx(7 * min(forward_s, gather_s))
    assert whole.update - hidden.update == pytest.approx(whole.optimizer - hidden.optimizer)


@pytest.mark.parametrize(("vpp", "chunks"), [(None, 1), (2, 2)])
def test_a_pipeline_idles_for_all_but_one_of_its_stages_in_micro_batches(vpp, chunks):
    """32 samples of 4 tokens at 16 tokens per micro-batch and 2 optimizer steps: 4 micro-batches
    each, and PP - 1 = 1 more is waited for."""
    layout = TrainerLayout(ParallelSizes(1, 2, vpp, 2), 8, False, 0.0, max_tokens=16)
    time = training_time(SMALL, layout, TrainingWork(32, THREE_TOKENS, 1, mini_batches=2), SLOW, HALF)
    worked = time.update - time.bubble - time.optimizer
    assert time.bubble == pytest.approx(worked / 8 * 2 / chunks)


@pytest.mark.parametrize(
    ("keys", "share"),
    [
        (("recompute_granularity=none",), 0.0),
        (("recompute_granularity=full",), 1.0),
        (("recompute_granularity=full", "recompute_method=block", "recompute_num_layers=12"), 12 * 2 / 64),
        # Megatron counts the layers of each of 2 x 2 chunks
        (
            (
                "recompute_granularity=full",
                "recompute_method=block",
                "recompute_num_layers=12",
                "virtual_pipeline_model_parallel_size=2",
            ),
            12 * 4 / 64,
        ),
        # MLP 3 x 27648, attention 2 x (40 + 8) x 128 wide
        (("recompute_granularity=selective", "recompute_modules=[mlp]"), 82944 / (82944 + 12288)),
        (("recompute_granularity=selective", "recompute_modules=[core_attn]"), 0.0),
    ],
)
def test_what_is_recomputed_follows_from_the_config(keys, share):
    config = load_config(recipe("dapo_32b"), [*TP8_PP2, *(f"{MEGATRON}.{key}" for key in keys)])
    assert recomputed_share(config, model_spec(model_json_named("qwen2.5-32b"))) == pytest.approx(share)


def test_a_server_writes_as_fast_as_was_worked_out_by_hand():
    """A request of 1 + 4 tokens has 1 + 16 / 8 = 3 in the cache on average, of 2 x 2 layers x 4 x 2
    = 32 bytes. 1448 of the parameters are multiplied."""
    responses = Lengths(median=4, sigma=0.0, longest=8)
    assert mean_context(responses, 1) == 3
    assert (num_all_parameters(SMALL), active_parameters(SMALL)) == (1704, 1448)
    speed = server_speed(SMALL, ServerLayout(1, 10), responses, 1, SLOW, HALF)
    assert speed.token_s == pytest.approx(3408 / 1e4 + 1e-3)
    assert speed.token_s_per_request == pytest.approx(96 / 1e4 + 2896 / 1e4)
    assert speed.tokens_per_s == pytest.approx(10 / (0.3418 + 10 * 0.2992))
    assert speed.scaled_to(100.0).tokens_per_s == pytest.approx(100.0)
    assert push_s(SMALL, 1, SLOW.network_bandwidth * HALF.link) == pytest.approx(3408 / 1e2 + 0.005)


def test_a_servers_work_for_each_request_makes_more_of_them_slower():
    """If the host's work hides behind no kernel: 0.02 s for each token of all, 0.003 s for one of a
    request, and 0.08 s per request, over 4 tokens."""
    responses = Lengths(median=4, sigma=0.0, longest=8)
    busy = replace(SLOW, host_token_s=0.02, host_request_token_s=0.003, host_request_s=0.08)
    hidden, shown = (
        server_speed(SMALL, ServerLayout(1, 10), responses, 1, hardware, HALF) for hardware in (SLOW, busy)
    )
    assert shown.token_s - hidden.token_s == pytest.approx(0.019)
    assert shown.token_s_per_request - hidden.token_s_per_request == pytest.approx(0.023)


def test_a_layer_with_a_window_reads_no_more_of_the_cache():
    """One of the two layers sees 2 of the 3 tokens: 16 bytes of 96 are not read."""
    responses = Lengths(median=4, sigma=0.0, longest=8)
    local = replace(SMALL, windows=Windows(2, (True, False), 1e4))
    all_read, less = (server_speed(spec, ServerLayout(1, 10), responses, 1, SLOW, HALF) for spec in (SMALL, local))
    assert all_read.token_s_per_request - less.token_s_per_request == pytest.approx(16 / 1e4)


def test_a_server_with_nothing_to_share_gains_nothing_from_more_requests():
    assert ServerSpeed(0.0, 0.5, 4, 0.0).tokens_per_s == ServerSpeed(0.0, 0.5, 8, 0.0).tokens_per_s == 2.0
