"""Promises of layers and policy on any device: small on the CPU (unit), by tests/gpu on a GPU.

Needs megatron-core and the trainer's other packages.
"""

import contextlib
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.huggingface.spec_reader import model_spec, read_model_spec
from megatron_dapo.models.attention.delta_rule import Offsets, causal_conv, gated_delta_rule
from megatron_dapo.models.attention.rotary import Rotary
from megatron_dapo.models.build import build_model
from megatron_dapo.models.hf_io import export_hf, load_hf_weights
from megatron_dapo.models.layers import PackedAttention
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.training.distribute import StepDistributor
from megatron_dapo.training.policy import Policy
from tests.distributed.layout_worker import gathered, trained_source
from tests.kernel_checks import CountedReads, forbidding_host_syncs
from tests.model_json import MODEL_JSON
from tests.synthetic import synthetic_groups

# after megatron_dapo.models, which prepares megatron.core for this machine
from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
# two mini-batches of 4 groups of 4: old log-probs are computed
COMMON = [
    "data.train_batch_size=8",
    "data.max_response_length=24",
    "actor_rollout_ref.rollout.n=4",
    f"{ACTOR}.ppo_mini_batch_size=4",
    f"{ACTOR}.use_dapo=true",
    f"{ACTOR}.entropy_coef=0.01",
]
# a mixture's tokens that all go to all experts: else rounding sends near ties to others,
# and a gradient jumps
ALL_EXPERTS = {"num_experts": 8, "experts_per_token": 8}
ONE_MICRO_BATCH, MANY_MICRO_BATCHES = f"{ACTOR}.max_tokens_per_microbatch=4096", f"{ACTOR}.max_tokens_per_microbatch=64"


# ---------------------------------------------------------------------------------------- attention


@dataclass(frozen=True)
class Attention:
    """A layer's attention, and the segments of a packed run.

    window: tokens before its own that a token sees (None: all). sinks: a number for each head
    beside its scores.
    """

    lengths: tuple[int, ...]
    heads: int = 8
    kv_heads: int = 2
    dim: int = 64
    window: int | None = None
    sinks: bool = False

    def layer(self, device: torch.device, dtype: torch.dtype) -> PackedAttention:
        spec = model_spec(
            MODEL_JSON | {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.dim}
        )
        config = TransformerConfig(
            num_layers=1, hidden_size=self.heads * self.dim, num_attention_heads=self.heads,
            num_query_groups=self.kv_heads, kv_channels=self.dim, params_dtype=dtype,
            use_cpu_initialization=device.type == "cpu",
            window_size=None if self.window is None else (self.window, 0),
            softmax_type="learnable" if self.sinks else "vanilla",
        )  # fmt: skip
        layer = PackedAttention(
            config, 1, rotary=Rotary(spec, device), pg_collection=SimpleNamespace(tp=None, cp=None)
        ).to(device)
        if self.sinks:
            with torch.no_grad():
                layer.softmax_offset.copy_(torch.linspace(-2.0, 3.0, self.heads))
        return layer


def check_packed_attention(device: torch.device, dtype: torch.dtype, attention: Attention, bound: float) -> None:
    """A packed run is the runs of its segments one by one in float64, in outputs and gradients, up
    to `bound` of the whole's norm. On a GPU in half precision without sinks it does not wait for
    the device."""
    lengths = attention.lengths
    layer = attention.layer(device, dtype)
    g = torch.Generator(device).manual_seed(0)

    def normal(num_heads: int) -> Tensor:
        return torch.randn(sum(lengths), num_heads, attention.dim, generator=g, device=device).to(dtype)

    heads, kv_heads = attention.heads, attention.kv_heads
    inputs, outgoing = [normal(n).requires_grad_() for n in (heads, kv_heads, kv_heads)], normal(heads).flatten(1)
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
    packing = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
    never_waits = device.type == "cuda" and not attention.sinks
    guard = forbidding_host_syncs(device) if never_waits else contextlib.nullcontext()
    layer(*inputs, packed_seq_params=packing)  # once before, to load the library
    with guard:
        out = layer(*inputs, packed_seq_params=packing)
        gradients = torch.autograd.grad(out, inputs, outgoing)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = [t.detach()[part, None].double().requires_grad_() for t in inputs]
        expected = layer(*alone)
        expected_gradients = torch.autograd.grad(expected, alone, outgoing[part, None].double())
        for actual, reference in zip((out, *gradients), (expected, *expected_gradients), strict=True):
            error = (actual[part].double() - reference[:, 0]).norm() / actual.double().norm()
            assert error <= bound, f"off by {error:.1e} of its norm in a segment of {length}"
        start += length


def delta_inputs(lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], Offsets]:
    """Random queries, keys, values, decays and betas of packed segments: 2 key heads of 64, 6 value
    heads of 32."""
    g = torch.Generator(device).manual_seed(0)
    total = sum(lengths)
    shapes = [(total, 2, 64), (total, 2, 64), (total, 6, 32), (total, 6), (total, 6)]
    query, key, value, decay, beta = (torch.randn(*shape, generator=g, device=device) for shape in shapes)
    inputs = [query.to(dtype), key.to(dtype), value.to(dtype), -decay.exp(), beta.sigmoid().to(dtype)]
    if dtype == torch.float64:
        inputs[3] = inputs[3].double()
    bounds = [0, *accumulate(lengths)]
    offsets = Offsets(tuple(bounds), torch.tensor(bounds, dtype=torch.int32, device=device))
    return [tensor.requires_grad_() for tensor in inputs], offsets


def check_delta_rule(device: torch.device, dtype: torch.dtype, lengths: Sequence[int], bound: float) -> None:
    """The rule, and the convolution before it, over a packed run are those of float64 over its
    segments one by one, in outputs and gradients, up to `bound` of the whole's norm. On a GPU they
    do not wait for the device."""
    inputs, offsets = delta_inputs(lengths, device, dtype)
    weight = torch.linspace(-1, 1, 2 * 64 * 4, device=device).view(2 * 64, 1, 4).to(dtype).requires_grad_()

    def run(query: Tensor, *others: Tensor, weight: Tensor, offsets: Offsets) -> Tensor:
        mixed = causal_conv(query.flatten(1), weight, offsets).view_as(query)
        return gated_delta_rule(mixed, *others, offsets)

    others, of_others = delta_inputs(lengths[::-1], device, dtype)
    run(*others, weight=weight, offsets=of_others)  # once before, to load and tune the kernels
    with forbidding_host_syncs(device) if device.type == "cuda" else contextlib.nullcontext():
        out = run(*inputs, weight=weight, offsets=offsets)
        outgoing = torch.ones_like(out)
        *gradients, of_weight = torch.autograd.grad(out, (*inputs, weight), outgoing)
    expected, by_input = [], []
    wide = weight.detach().double().requires_grad_()
    of_wide = torch.zeros_like(wide)
    for start, end in pairwise(offsets.on_host):
        alone = [tensor.detach()[start:end].double().requires_grad_() for tensor in inputs]
        one = Offsets((0, end - start), torch.tensor([0, end - start], dtype=torch.int32, device=device))
        expected.append(run(*alone, weight=wide, offsets=one))
        *of_alone, of_part = torch.autograd.grad(expected[-1].sum(), (*alone, wide))
        by_input.append(of_alone)
        of_wide += of_part
    references = [torch.cat(expected), *(torch.cat(parts) for parts in zip(*by_input, strict=True)), of_wide]
    names, all_actual = ("o", "q", "k", "v", "g", "beta", "weight"), (out, *gradients, of_weight)
    for name, actual, reference in zip(names, all_actual, references, strict=True):
        error = (actual.double() - reference).norm() / reference.norm()
        assert error <= bound, f"{name} is off by {error:.1e} of its norm"


# ------------------------------------------------------------------------------------------- policy


def policy_and_mini_batches(layout: ParallelLayout, model_path: str | Path, overrides: list[str]):
    """A policy and one rollout step of made-up samples with old log-probs."""
    config: Config = load_config(None, [*COMMON, f"actor_rollout_ref.model.path={model_path}", *overrides])
    policy = Policy(config, layout)
    shard = StepDistributor(config, layout, policy.model.spec)(0, synthetic_groups(policy.model.spec.vocab_size))
    return policy, policy.score(shard.mini_batches)


def check_fused_step(layout: ParallelLayout, model_path: str | Path, rel: float) -> None:
    """A rollout step with the fused head and with the composed one: the same metrics, up to `rel`.
    At its first optimizer step every ratio is exactly 1."""
    metrics = {}
    for kind in ("auto", "off"):
        overrides = [f"{ACTOR}.fused_kernels={kind}", MANY_MICRO_BATCHES]
        policy, mini_batches = policy_and_mini_batches(layout, model_path, overrides)
        first = policy.metrics_of(policy.accumulate_gradients(mini_batches[0]))
        assert first["actor/ratio_max"] == first["actor/ratio_mean"] == 1.0 or kind == "off"
        metrics[kind] = policy.update(mini_batches, weight_version=0)
    assert metrics["auto"].keys() == metrics["off"].keys()
    for name, value in metrics["off"].items():
        got = metrics["auto"][name]
        assert abs(got - value) <= rel * (abs(value) + 0.1), f"{name}: {got} with fused kernels, {value} without"


def check_host_reads(layout: ParallelLayout, model_path: str | Path) -> None:
    """Gradients of many micro-batches wait for the device as often as those of one. Megatron asks
    once per optimizer step whether anything was counted; the loss path never asks."""
    counts, num_micro_batches = {}, {}
    for cut in (ONE_MICRO_BATCH, MANY_MICRO_BATCHES):
        policy, mini_batches = policy_and_mini_batches(layout, model_path, [cut])
        policy.accumulate_gradients(mini_batches[0])  # once before, to compile and to allocate
        with counted_host_reads(layout_device(policy)) as reads:
            policy.accumulate_gradients(mini_batches[0])
        counts[cut], num_micro_batches[cut] = reads.number, len(mini_batches[0])
    assert num_micro_batches[MANY_MICRO_BATCHES] > num_micro_batches[ONE_MICRO_BATCH] == 1
    assert counts[MANY_MICRO_BATCHES] == counts[ONE_MICRO_BATCH] <= 1, counts


def layout_device(policy: Policy) -> torch.device:
    return next(policy.model.chunks[0].parameters()).device


@contextlib.contextmanager
def counted_host_reads(device: torch.device) -> Iterator[CountedReads]:
    """The number of waits for the device inside; on the CPU, the number of host reads of values."""
    reads = CountedReads()
    if device.type == "cpu":
        with reads:
            yield reads
        return
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield reads
    finally:
        torch.cuda.set_sync_debug_mode("default")
    reads.number = sum("synchronizing" in str(warning.message) for warning in caught)


# ------------------------------------------------------------------------------------- whole models


def scored(layout: ParallelLayout, model_path: str | Path, overrides: list[str]) -> Tensor:
    """Old log-probs of all counted tokens, in the order of samples: however they were packed."""
    _, mini_batches = policy_and_mini_batches(layout, model_path, overrides)
    by_sample = {
        index: values[batch.by_sample(batch.loss_mask)[index] != 0]
        for mini_batch in mini_batches
        for batch in mini_batch
        for index, values in batch.by_sample(batch.old_log_probs).items()
    }
    return torch.cat([by_sample[index] for index in sorted(by_sample)])


def check_packed_is_padded(layout: ParallelLayout, model_path: str | Path, overrides: list[str], bound: float) -> None:
    """Log-probs do not depend on how samples share micro-batches, up to `bound` in the mean."""
    padded = scored(layout, model_path, [*overrides, "actor_rollout_ref.model.use_remove_padding=false"])
    for cut in (ONE_MICRO_BATCH, MANY_MICRO_BATCHES):
        difference = (scored(layout, model_path, [*overrides, cut]) - padded).abs().mean()
        assert difference <= bound, f"log-probs differ by {difference:.1e} in the mean"


def check_agreement(layout: ParallelLayout, model_path: str | Path, a: list[str], b: list[str], bound: float) -> None:
    """Log-probs of the same weights under two settings, up to `bound` in the mean."""
    difference = (scored(layout, model_path, a) - scored(layout, model_path, b)).abs().mean()
    assert difference <= bound, f"log-probs differ by {difference:.1e} in the mean"


def check_gradients(layout: ParallelLayout, model_path: str | Path, a: list[str], b: list[str]) -> None:
    """Gradients of a mini-batch of the same weights under two settings, each kind of tensor at
    once. The experts, perhaps with few tokens of their own, go together. A missing or doubled one
    is off by its norm: half of that is allowed."""
    gradients = []
    for overrides in (a, b):
        policy, mini_batches = policy_and_mini_batches(layout, model_path, overrides)
        policy.accumulate_gradients(mini_batches[0])
        by_kind: dict[str, list[Tensor]] = {}
        for name, gradient in gathered(trained_source(policy.model, layout), layout).items():
            by_kind.setdefault(re.sub(r"\.experts\.\d+", "", name), []).append(gradient.float().flatten())
        gradients.append({kind: torch.cat(parts) for kind, parts in by_kind.items()})
    assert gradients[0].keys() == gradients[1].keys()
    for kind, expected in gradients[0].items():
        error = (gradients[1][kind] - expected).norm()
        assert error <= expected.norm() / 2, f"{kind}: {error:.1e} of {expected.norm():.1e}"


def check_steps(layout: ParallelLayout, model_path: str | Path, a: list[str], b: list[str], rel: float) -> None:
    """Two optimizer steps of the same weights under two settings. Every tensor changes the same, up
    to `rel` of its norm and one number rounded the other way."""
    changes = []
    for overrides in (a, b):
        policy, mini_batches = policy_and_mini_batches(layout, model_path, overrides)
        before = gathered(policy.weight_source(), layout)
        policy.update(mini_batches, weight_version=0)
        after = gathered(policy.weight_source(), layout)
        changes.append({name: after[name].double() - before[name].double() for name in before})
        spacing = {name: torch.finfo(w.dtype).eps * float(w.abs().max()) for name, w in after.items()}
    for name, expected in changes[0].items():
        error = (changes[1][name] - expected).norm()
        bound = rel * expected.norm() + spacing[name]
        assert 0 < expected.norm() and error <= bound, f"{name}: {error:.1e} of {expected.norm():.1e}"


def check_export(layout: ParallelLayout, model_path: str | Path, overrides: list[str], folder: Path) -> None:
    """Loaded weights come out again, under the same names."""
    from safetensors.torch import load_file

    config = load_config(None, overrides)
    model = build_model(read_model_spec(model_path), layout, config.actor_rollout_ref.actor.megatron)
    load_hf_weights(model, model_path, layout)
    export_hf(model, layout, model_path, folder)
    original = load_file(Path(model_path) / "model.safetensors")
    exported = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(exported[name], tensor.to(exported[name].dtype)), name
