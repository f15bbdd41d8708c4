"""MFU and its kin: operations counted by hand and by torch, what is left out where it is not known."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_dapo.config.loader import load_config
from megatron_dapo.huggingface.model_spec import model_spec, read_model_spec
from megatron_dapo.job import Job
from megatron_dapo.planner.flops import forward_flops
from megatron_dapo.telemetry import performance
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


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_torch_counts_the_same_products(tmp_path, family):
    from transformers import AutoModelForCausalLM

    path, length = make_tiny(tmp_path / family, family, layers=2, hidden=32, heads=4, kv_heads=2), 12
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        model(torch.arange(length)[None])
    spec = read_model_spec(path)
    unseen = length * (length - 1) // 2  # pairs that eager attention computes and masks
    masked = spec.num_layers * 4 * spec.num_heads * spec.head_dim * unseen
    assert forward_flops(spec, [length], length) == counted.get_total_flops() - masked


def test_experts_count_as_far_as_a_token_passes_through_them():
    mixture = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}
    spec = model_spec({**SMALL, **mixture, "moe_intermediate_size": 16})
    more = 2 * 2 * (8 * 8 + 3 * 8 * 16) * 5  # the router, and a second expert, in 2 layers
    assert forward_flops(spec, [3, 2], 4) - forward_flops(model_spec(SMALL), [3, 2], 4) == more


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
    assert performance.peak_flops(name) == (None if tflops is None else tflops * 1e12)


def test_the_update_is_measured_by_the_samples_as_they_are():
    spec, groups = model_spec(SMALL), synthetic_groups(10, num_groups=2)
    samples = [sample for group in groups for sample in group.samples]
    lengths = [len(sample.prompt_tokens) + len(sample.response_tokens) for sample in samples]
    flops = 3 * forward_flops(spec, lengths, sum(sum(sample.loss_mask) for sample in samples))
    got = performance.trainer_metrics(spec, groups, num_passes=2, seconds=4.0, num_gpus=8, peak=flops / 8)
    assert got == {"perf/mfu": pytest.approx(0.5), "perf/update_tokens_per_s_per_gpu": 2 * sum(lengths) / 4 / 8}
    assert "perf/mfu" not in performance.trainer_metrics(spec, groups, 2, 4.0, 8, peak=None)
    assert performance.trainer_metrics(spec, groups, 0, 0.0, 8, peak=1.0) == {}  # while the critic warms up


def test_servers_are_measured_by_their_gpus_and_a_replay_has_none():
    two = "actor_rollout_ref.rollout.server.tensor_model_parallel_size=2"
    rollout = {"rollout/num_servers": 4.0, "rollout/tokens_per_s": 800.0}
    assert performance.server_metrics(load_config(None, [two]), rollout) == {"perf/rollout_tokens_per_s_per_gpu": 100.0}
    assert performance.server_metrics(load_config(None, [two, "trainer.replay=batches"]), rollout) == {}


@pytest.fixture
def job() -> SimpleNamespace:
    """What `Job.performance` asks of a job, on a GPU whose peaks are 3 and 5 GiB; another rank's are 4 and 4."""
    config = SimpleNamespace(params_dtype=torch.bfloat16)
    return SimpleNamespace(
        config=load_config(None, []),
        layout=SimpleNamespace(world_size=2, gather=lambda own: [own, (4 * 2**30, 4 * 2**30)]),
        policy=SimpleNamespace(model=SimpleNamespace(config=config, spec=model_spec(SMALL))),
        telemetry=SimpleNamespace(seconds={"update": 2.0}.get),
    )


def test_a_step_on_gpus_reports_memory_of_the_fullest_rank_and_mfu_on_rank_0(job, monkeypatch):
    metrics = {"actor/num_optimizer_steps": 1.0, "rollout/num_servers": 1.0, "rollout/tokens_per_s": 10.0}
    groups = synthetic_groups(10, num_groups=2)
    assert Job.performance(job, groups, metrics) == {}  # on a CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 5 * 2**30)
    resets = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    got = Job.performance(job, groups, metrics)
    assert got["perf/max_memory_allocated_gib"] == 4.0 and got["perf/max_memory_reserved_gib"] == 5.0
    assert got["perf/mfu"] > 0 and got["perf/rollout_tokens_per_s_per_gpu"] == 10.0 and resets == [1]
    assert Job.performance(job, None, {}) == {}  # another rank takes part, and reports nothing
    job.policy.model.config.params_dtype = torch.float32
    assert "perf/mfu" not in Job.performance(job, groups, metrics)
