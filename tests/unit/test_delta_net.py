"""The gated delta net of a layer: the rule in float64, packed segments, gradients, types, marks.

Log-probs and layouts of whole models: tests/distributed.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.schema.actor_rollout_ref import MegatronConfig
from megatron_dapo.huggingface.spec_reader import read_model_spec
from megatron_dapo.models import build
from megatron_dapo.models.attention import delta_kernels
from megatron_dapo.models.attention.delta_net import GatedDeltaNet
from megatron_dapo.models.attention.delta_rule import EPSILON, Offsets, causal_conv, gated_delta_rule
from megatron_dapo.models.attention.segments import Packing
from megatron_dapo.models.build import build_model
from megatron_dapo.models.hf_io import load_hf_weights
from tests.live_bytes import LiveBytes
from tests.proofs import amount
from tests.tiny_models import make_tiny
from tests.training_checks import check_delta_rule, delta_inputs

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
LENGTHS = (1, 63, 64, 65, 5)  # of chunks of 64: less than one, one, more


def offsets_of(*lengths: int) -> Offsets:
    bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return Offsets(tuple(bounds.tolist()), bounds)


def token_by_token(query, key, value, log_decay, beta, offsets: Offsets) -> torch.Tensor:
    """The definition (arXiv 2412.06464, eq. 10)."""
    repeat = value.size(1) // query.size(1)
    query, key = (x / (x.square().sum(-1, keepdim=True) + EPSILON).sqrt() for x in (query, key))
    query, key = query.repeat_interleave(repeat, 1) * query.size(-1) ** -0.5, key.repeat_interleave(repeat, 1)
    out = []
    for token in range(len(query)):
        if token in offsets.on_host:
            state = torch.zeros(value.size(1), key.size(2), value.size(2), dtype=value.dtype)
        state = state * log_decay[token].exp()[:, None, None]
        change = beta[token][:, None] * (value[token] - torch.einsum("hkv,hk->hv", state, key[token]))
        state = state + torch.einsum("hk,hv->hkv", key[token], change)
        out.append(torch.einsum("hkv,hk->hv", state, query[token]))
    return torch.stack(out)


def test_chunks_give_the_values_and_gradients_of_the_definition_in_float64():
    inputs, offsets = delta_inputs(LENGTHS, CPU, torch.float64)
    outgoing = torch.randn(sum(LENGTHS), 6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    both = [rule(*inputs, offsets) for rule in (gated_delta_rule, token_by_token)]
    gradients = [torch.autograd.grad(out, inputs, outgoing) for out in both]
    for ours, expected in zip((both[0], *gradients[0]), (both[1], *gradients[1]), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("lengths", [LENGTHS, (130, 1, 1)][: amount(1, 2)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 0.02)])
def test_packed_segments_are_those_of_float64_one_by_one(lengths, dtype, bound):
    check_delta_rule(CPU, dtype, lengths, bound)


def test_the_convolution_begins_with_zeros_in_each_segment():
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((12, 6), (6, 1, 4)))
    alone = [F.silu(F.conv1d(F.pad(part.T, (3, 0))[None], weight, groups=6))[0].T for part in x.split([1, 2, 9])]
    torch.testing.assert_close(causal_conv(x, weight, offsets_of(1, 2, 9)), torch.cat(alone))


class Float64(SimpleNamespace):
    """torch with float64 under the name of float32."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


@pytest.fixture
def exact(monkeypatch) -> None:
    """transformers keeps float64 in a delta net, where it computes in float32 at any type."""
    monkeypatch.setattr(modeling_qwen3_5, "torch", Float64())
    as_float32 = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self if self.dtype == torch.float64 else as_float32(self))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("hybrid"), "qwen3_5", layers=2, hidden=32, vocab=67)


def net_of(path, layout, kind: torch.dtype = torch.float32, **megatron) -> GatedDeltaNet:
    """The first layer's, from the checkpoint."""
    model = build_model(read_model_spec(path), layout, MegatronConfig(**megatron))
    load_hf_weights(model, path, layout)
    net = model.chunks[0].decoder.layers[0].self_attention.to(kind)
    assert isinstance(net, GatedDeltaNet)
    net.A_log.data = net.A_log.data.to(torch.promote_types(kind, torch.float32))
    return net


def packing_of(*lengths: int) -> Packing:
    offsets = offsets_of(*lengths)
    widest = max(lengths)
    bounds = offsets.on_device
    return Packing("thd", bounds, bounds, max_seqlen_q=widest, max_seqlen_kv=widest, bounds=offsets.on_host)


def test_a_layer_packed_padded_or_apart_is_that_of_transformers_in_float64(layout, path, exact):
    """transformers on a CPU does not begin anew in a packed segment, so each is given to it alone."""
    net = net_of(path, layout, torch.float64)
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).model.layers[0].linear_attn
    hidden = torch.randn(sum(LENGTHS), 1, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = hidden.split(LENGTHS)
    with torch.no_grad():
        expected = [oracle(part.transpose(0, 1))[0] for part in parts]
        packed = net(hidden, packed_seq_params=packing_of(*LENGTHS))[0][:, 0].split(LENGTHS)
        widest = max(LENGTHS)
        rectangle = torch.cat([F.pad(part, (0, 0, 0, 0, 0, widest - len(part)), value=0.5) for part in parts], dim=1)
        padded = net(rectangle)[0]
        for number, (length, part) in enumerate(zip(LENGTHS, parts, strict=True)):
            for got in (packed[number], padded[:length, number], net(part)[0][:, 0]):
                torch.testing.assert_close(got, expected[number], rtol=1e-10, atol=1e-12)


def test_the_logarithm_of_the_decay_stays_in_float32_in_half_precision(layout, path):
    net = net_of(path, layout, torch.bfloat16, dtype="bfloat16")
    assert net.A_log.dtype == torch.float32 and net.A_log.data.ne(net.A_log.bfloat16()).any()
    assert {parameter.dtype for name, parameter in net.named_parameters() if name != "A_log"} == {torch.bfloat16}


def test_parameters_cut_by_heads_count_on_every_rank_in_the_norm_and_the_gated_norm_once(layout, path):
    net = net_of(path, layout)
    assert all(p.tensor_model_parallel and p.partition_dim == 0 for p in (net.A_log, net.dt_bias, net.conv_weight))
    # its gradient is summed in the backward pass, and must not be summed again
    assert not getattr(net.out_norm.weight, "tensor_model_parallel", False)
    assert not getattr(net.out_norm.weight, "sequence_parallel", False)


def test_recomputing_the_core_keeps_less_and_changes_no_gradient(layout, path):
    kept, gradients = [], []
    hidden = torch.randn(300, 1, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for megatron in ({}, dict(recompute_granularity="selective", recompute_modules=["core_attn"])):
        net = net_of(path, layout, **megatron)
        with LiveBytes() as live:
            out, _ = net(hidden, packed_seq_params=packing_of(200, 100))
            kept.append(live.alive)
        out.square().sum().backward()
        gradients.append([parameter.grad for parameter in net.parameters()])
    assert kept[1] < kept[0] / 3
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("capability", "triton", "is_wrong"),
    [
        ((9, 0), "3.3.1", False),
        ((9, 0), "3.4.0", True),
        ((9, 0), "3.6.0", True),
        ((9, 0), "3.7.0+git1", True),
        ((9, 0), "3.7.1", False),
        ((9, 0), "3.8.0", False),
        ((10, 0), "3.6.0", False),
    ],
)
def test_versions_of_triton_with_a_wrong_gradient_on_hopper_are_known(capability, triton, is_wrong):
    assert delta_kernels.is_wrong_on(capability, triton) == is_wrong


@pytest.mark.parametrize(
    ("dtype", "error", "triton", "words"),
    [
        ("float32", None, "3.8.0", "dtype is float32"),
        ("bfloat16", "No module named 'fla'", "3.8.0", "No module named 'fla'); install requirements/cuda.txt"),
        ("bfloat16", None, "3.6.0", "wrong on Hopper with Triton 3.6.0"),
    ],
)
def test_a_gpu_without_good_kernels_is_refused_with_the_cure(monkeypatch, path, dtype, error, triton, words):
    spec = read_model_spec(path)
    delta_kernels.require_delta_kernels(spec, MegatronConfig(dtype=dtype))  # on a CPU
    monkeypatch.setattr(delta_kernels, "is_gpu", lambda: True)
    monkeypatch.setattr(delta_kernels, "_import_error", lambda: error)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("triton.__version__", triton)
    with pytest.raises(UserError) as raised:
        delta_kernels.require_delta_kernels(spec, MegatronConfig(dtype=dtype))
    (sentence,) = raised.value.sentences
    assert "Qwen3_5ForCausalLM" in sentence and words in sentence


def test_context_parallelism_is_refused_on_gpus(monkeypatch, path):
    monkeypatch.setattr(build, "is_gpu", lambda: True)
    monkeypatch.setattr(build, "_use_transformer_engine", lambda megatron: True)
    with pytest.raises(UserError, match="gated delta net .* has none on GPUs yet; set it to 1"):
        build_model(read_model_spec(path), SimpleNamespace(cp=2), MegatronConfig())
