"""MFU and its kin: operations counted by hand and by torch; unknown ones are left out."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_dapo.config.loader import load_config
from megatron_dapo.estimates.flops import attention_flops, forward_flops, training_flops
from megatron_dapo.estimates.hardware import peak_flops
from megatron_dapo.huggingface.lora_settings import LINEAR_MODULES, LoraSettings
from megatron_dapo.huggingface.spec_reader import model_spec, read_model_spec
from megatron_dapo.huggingface.windows import Windows
from megatron_dapo.job import Job
from megatron_dapo.telemetry import performance
from megatron_dapo.telemetry.performance import PhaseWork, RankPeak
from tests.model_json import MODEL_JSON
from tests.synthetic import synthetic_groups
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.unit

SMALL = {
    **MODEL_JSON,
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 16,
    "vocab_size": 10,
}


def test_a_case_by_hand():
    """Two samples of 3 and 2 tokens, 4 of which the loss counts; 2 layers of width 8."""
    products = 2 * (8 * 8 + 8 * (4 + 4) + 8 * 8 + 3 * 8 * 16) * 5  # queries, keys and values, output, gated MLP
    attention = 2 * (2 * 4) * 2 * (1 + 2 + 3 + 1 + 2)  # 2 heads of 4: with the keys, and with the values
    logits = 2 * 8 * 10 * 4
    assert forward_flops(model_spec(SMALL), [3, 2], 4) == 2 * (products + attention) + logits == 12736


def test_a_critic_computes_one_number_in_the_place_of_the_logits():
    spec = model_spec(SMALL)
    assert forward_flops(spec, [3, 2], 4) - forward_flops(spec.as_critic(), [3, 2], 4) == 2 * 8 * (10 - 1) * 4


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "glm4_moe"])
def test_torch_counts_the_same_products(tmp_path, family):
    from transformers import AutoModelForCausalLM

    path, length = make_tiny(tmp_path / family, family, layers=2, hidden=32, heads=4, kv_heads=2), 12
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", experts_implementation="eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        model(torch.arange(length)[None])
    spec = read_model_spec(path)
    unseen = length * (length - 1) // 2  # pairs that eager attention computes and masks
    masked = spec.num_layers * 4 * spec.num_heads * spec.head_dim * unseen
    assert forward_flops(spec, [length], length) == counted.get_total_flops() - masked


@pytest.mark.parametrize("targets", [None, LINEAR_MODULES, ("q_proj", "down_proj")])
def test_torch_counts_the_same_products_of_forward_and_backward_with_adapters_or_without(tmp_path, targets):
    """Adapters beside the modules of transformers, with frozen weights then;
    the embeddings ask for a gradient."""
    from transformers import AutoModelForCausalLM

    path, length = make_tiny(tmp_path / "model", "qwen2", layers=2, hidden=32, heads=4, kv_heads=2), 12
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    lora = None
    if targets is not None:
        lora = LoraSettings(rank=3, alpha=3.0, targets=targets, seed=0)
        model.requires_grad_(False)
        model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output.requires_grad_())
        for name, module in model.named_modules():
            if name.split(".")[-1] in targets:
                module.register_forward_hook(adapter_hook(module, lora.rank))
    with FlopCounterMode(display=False) as counted:
        model(torch.arange(length)[None]).logits.sum().backward()
    spec = read_model_spec(path)
    masked = spec.num_layers * 4 * spec.num_heads * spec.head_dim * length * (length - 1) // 2
    assert training_flops(spec, [length], length, lora) == counted.get_total_flops() - 3 * masked


def adapter_hook(module: torch.nn.Linear, rank: int):
    a = torch.ones(rank, module.in_features, requires_grad=True)
    b = torch.ones(module.out_features, rank, requires_grad=True)
    return lambda module, inputs, output: output + inputs[0] @ a.T @ b.T


def test_an_adapter_of_an_expert_counts_as_often_as_a_token_passes_through_it():
    """4 tokens, 2 layers, 2 experts of 8 for each: gate, up and down with rank 3. Three passes, all
    of which compute them, since they are trained."""
    mixture = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}
    spec = model_spec({**SMALL, **mixture, "moe_intermediate_size": 16})
    attention = LoraSettings(rank=3, alpha=3.0, targets=("q_proj",), seed=0)
    both = replace(attention, targets=("q_proj", "gate_proj", "up_proj", "down_proj"))
    more = 4 * 2 * 2 * 2 * 3 * (3 * (8 + 16))
    assert forward_flops(spec, [4], 0, both) - forward_flops(spec, [4], 0, attention) == more
    assert training_flops(spec, [4], 0, both) - training_flops(spec, [4], 0, attention) == 3 * more


def test_experts_count_as_far_as_a_token_passes_through_them():
    mixture = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}
    spec = model_spec({**SMALL, **mixture, "moe_intermediate_size": 16})
    more = 2 * 2 * (8 * 8 + 3 * 8 * 16) * 5  # the router, and a second expert, in 2 layers
    assert forward_flops(spec, [3, 2], 4) - forward_flops(model_spec(SMALL), [3, 2], 4) == more


def test_a_token_of_a_layer_with_a_window_attends_to_no_more_keys():
    """Counted pair by pair: two of the three layers see the last 4 tokens."""
    spec = replace(model_spec(SMALL), num_layers=3)
    local = replace(spec, windows=Windows(4, (True, False, True), 1e4))
    lengths = [3, 4, 9]
    seen = [min(place + 1, 4) for length in lengths for place in range(length)]
    pairs = sum(length * (length + 1) // 2 for length in lengths) + 2 * sum(seen)
    assert attention_flops(local, lengths) == 4 * spec.num_heads * spec.head_dim * pairs
    saved = attention_flops(spec, lengths) - attention_flops(local, lengths)
    assert forward_flops(spec, lengths, 5) - forward_flops(local, lengths, 5) == saved > 0


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GeForce RTX 5090", None),
    ],
)
def test_a_gpus_peak_is_found_by_its_name_or_not_at_all(name, tflops):
    assert peak_flops(name) == (None if tflops is None else tflops * 1e12)


def test_each_phase_is_measured_by_the_samples_as_they_are():
    spec, groups = model_spec(SMALL), synthetic_groups(10, num_groups=2)
    samples = [sample for group in groups for sample in group.samples]
    lengths = [len(sample.prompt_tokens) + len(sample.response_tokens) for sample in samples]
    flops = forward_flops(spec, lengths, sum(sum(sample.loss_mask.tolist()) for sample in samples))
    works = {
        "update": PhaseWork(training_flops, 2, 4.0),
        "score": PhaseWork(forward_flops, 1, 2.0),
        "none": PhaseWork(forward_flops, 0, 1.0),
    }
    got = performance.mfu_metrics(spec, None, groups, works, num_gpus=8, peak=flops)
    assert got == pytest.approx({"update": 6 / (4 * 8), "score": 1 / (2 * 8)})
    speed = performance.update_metrics(groups, num_epochs=2, seconds=4.0, num_ranks=8)
    assert speed == {"perf/update_tokens_per_s_per_gpu": 2 * sum(lengths) / 4 / 8}
    assert performance.update_metrics(groups, 0, 0.0, 8) == {}  # while the critic warms up
    assert performance.step_metrics(groups, 10.0, 4.0, num_trainer_ranks=3, num_server_ranks=2) == {
        "perf/total_num_tokens": sum(lengths),
        "perf/throughput": pytest.approx(sum(lengths) / 10 / 5),
        "perf/trainer_waiting": 0.4,
    }


def test_servers_are_measured_by_their_ranks_and_a_replay_has_none():
    two = "actor_rollout_ref.rollout.server.tensor_model_parallel_size=2"
    rollout = {"rollout/num_servers": 4.0, "rollout/tokens_per_s": 800.0}
    assert performance.server_ranks(load_config(None, [two]), rollout) == 8
    assert performance.server_ranks(load_config(None, [two, "trainer.replay=batches"]), rollout) == 0
    assert performance.server_metrics(rollout, 8) == {"perf/rollout_tokens_per_s_per_gpu": 100.0}
    assert performance.server_metrics(rollout, 0) == {}


def test_memory_is_reported_of_the_fullest_rank_of_all_and_of_each_stage():
    def gib(*peaks: tuple[int, int, int]) -> dict[str, float]:
        return performance.memory_metrics([RankPeak(stage, a * 2**30, r * 2**30) for stage, a, r in peaks])

    allocated, reserved = "perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb"
    assert gib((0, 3, 5), (0, 4, 4)) == {allocated: 4.0, reserved: 5.0}
    assert gib((0, 3, 9), (0, 4, 4), (1, 6, 7), (1, 5, 8)) == {
        **{allocated: 6.0, f"{allocated}/pp0": 4.0, f"{allocated}/pp1": 6.0},
        **{reserved: 9.0, f"{reserved}/pp0": 9.0, f"{reserved}/pp1": 8.0},
    }


@pytest.fixture
def job() -> SimpleNamespace:
    """A job as far as `Job.performance` asks, on a GPU with peaks of 3 and 5 GiB; another rank's
    are 4 and 4. A step of 10 seconds, 4 of them spent waiting."""
    config = SimpleNamespace(params_dtype=torch.bfloat16)
    seconds = {"start": 1.0, "rollout": 3.0, "update": 2.0, "old_log_probs": 0.5}
    job = SimpleNamespace(
        config=load_config(None, []),
        layout=SimpleNamespace(world_size=2, pp_rank=0, gather=lambda own: [own, RankPeak(0, 4 * 2**30, 4 * 2**30)]),
        policy=SimpleNamespace(model=SimpleNamespace(config=config, spec=model_spec(SMALL), lora=None)),
        telemetry=SimpleNamespace(seconds=seconds.__getitem__, step_seconds=lambda: 10.0),
    )
    job._mfu = partial(Job._mfu, job)
    return job


STEP = {"actor/num_optimizer_steps": 1.0, "rollout/num_servers": 1.0, "rollout/tokens_per_s": 10.0}


@pytest.fixture
def on_h100(monkeypatch):
    """Yields how often the peaks of memory began anew."""
    resets = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 5 * 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    return resets


def test_a_step_on_gpus_reports_memory_of_the_fullest_rank_and_mfu_on_rank_0(job, on_h100):
    groups = synthetic_groups(10, num_groups=2)
    got = Job.performance(job, groups, STEP)
    assert got["perf/max_memory_allocated_gb"] == 4.0 and got["perf/max_memory_reserved_gb"] == 5.0
    assert got["perf/mfu/actor"] > 0 and got["perf/rollout_tokens_per_s_per_gpu"] == 10.0 and on_h100 == [1]
    assert "perf/mfu/actor_infer" not in got  # one optimizer step per rollout step: no old log-probs
    assert Job.performance(job, None, {}) == {}  # another rank takes part, and reports nothing
    warming_up = Job.performance(job, groups, STEP | {"actor/num_optimizer_steps": 0.0})
    assert not {"perf/mfu/actor", "perf/update_tokens_per_s_per_gpu"} & warming_up.keys()
    job.policy.model.config.params_dtype = torch.float32
    assert not {name for name in Job.performance(job, groups, STEP) if "mfu" in name}


def test_old_log_probs_have_an_mfu_if_computed(job, on_h100):
    job.config = load_config(None, ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4"])
    got = Job.performance(job, synthetic_groups(10), STEP)
    # a third of the work of the update, in a quarter of its time
    assert got["perf/mfu/actor_infer"] == pytest.approx(got["perf/mfu/actor"] * 4 / 3)


def test_a_step_on_cpus_reports_tokens_per_rank_and_waiting_but_neither_memory_nor_mfu(job):
    groups = synthetic_groups(10, num_groups=2)
    num_tokens = sum(sample.num_tokens for group in groups for sample in group.samples)
    assert Job.performance(job, groups, STEP) == {
        "perf/total_num_tokens": num_tokens,
        "perf/throughput": pytest.approx(num_tokens / 10 / 3),
        "perf/trainer_waiting": 0.4,
        "perf/update_tokens_per_s_per_gpu": num_tokens / 2 / 2,
        "perf/rollout_tokens_per_s_per_gpu": 10.0,
    }
