"""Rotation and attention see only their own segment;
CUDA never asks the host for segments' bounds."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.huggingface.spec_reader import model_spec
from megatron_dapo.models.attention.rotary import Rotary, positions, rotary_frequencies
from megatron_dapo.models.attention.segments import segments_by_length
from megatron_dapo.models.layers import PackedAttention, angles_of
from tests.model_json import MODEL_JSON

# after megatron_dapo.models, which prepares megatron.core for this machine
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb  # isort: skip
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding  # isort: skip
from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

pytestmark = pytest.mark.unit

HEADS, KV_HEADS, DIM = 4, 2, 16
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
SPEC = model_spec(MODEL_JSON | {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM})
SCALED = model_spec(
    MODEL_JSON | {"architectures": ["LlamaForCausalLM"], "head_dim": 128, "rope_parameters": LLAMA3, "rope_theta": 1e4}
)
CONFIG = TransformerConfig(
    num_layers=1, hidden_size=HEADS * DIM, num_attention_heads=HEADS, num_query_groups=KV_HEADS, kv_channels=DIM,
    use_cpu_initialization=True,
)  # fmt: skip


class OneRank:
    """A context-parallel group of one rank, as far as Megatron's rotation asks."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def packing(lengths: list[int], device: str = "cpu") -> PackedSeqParams:
    cu_seqlens = offsets(lengths).to(device)
    return PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))


def query_key_value(length: int, dtype=torch.float32, device="cpu", seed=0) -> list[torch.Tensor]:
    """[T, heads, dim] each, leaves that take gradients."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(length, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=g).to(device, dtype).detach().requires_grad_() for shape in shapes]


SINKS = (-1.0, 0.5, 2.0, 0.0)


def attention(window: int | None = None, sinks: tuple[float, ...] = ()) -> PackedAttention:
    config = replace(CONFIG, window_size=(window - 1, 0)) if window else CONFIG
    if not sinks:
        return PackedAttention(config, 1, rotary=Rotary(SPEC, "cpu"))
    config, ranks = replace(config, softmax_type="learnable"), SimpleNamespace(tp=None)
    layer = PackedAttention(config, 1, rotary=Rotary(SPEC, "cpu"), pg_collection=ranks)
    layer.softmax_offset.data.copy_(torch.tensor(sinks))
    return layer


def test_sinks_are_not_rounded_again_in_half_precision():
    """Of one token with score 0, the share is 1 / (1 + exp(sink)). Divided by the scale, no power
    of two, the sinks are near 41: bfloat16 has only multiples of a quarter there."""
    layer = attention(sinks=(9.25, 9.5, 9.75, 9.0)).bfloat16()
    layer.softmax_scale = 0.2266
    query, key, _ = (torch.zeros_like(x, dtype=torch.bfloat16) for x in query_key_value(1))
    value = torch.ones_like(key)
    shares = layer(query, key, value, packed_seq_params=packing([1])).double().view(4, -1)
    exact = 1 / (1 + layer.softmax_offset.double().exp())
    torch.testing.assert_close(shares, exact[:, None].expand_as(shares), rtol=2**-8, atol=0)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_positions_begin_anew_in_every_segment(lengths):
    expected = [t for length in lengths for t in range(length)]
    places = torch.arange(sum(lengths))
    assert positions(places, offsets(lengths)).tolist() == expected
    assert positions(places, None).tolist() == list(range(sum(lengths)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [SPEC, SCALED], ids=["plain", "llama3"])
def test_the_rotation_is_megatrons_bit_for_bit(spec, dtype):
    """Packed and as a rectangle; Megatron's packed rotation slices
    and concatenates segment by segment."""
    lengths = [5, 1, 700, 3]
    g = torch.Generator().manual_seed(0)
    query, key = (torch.randn(sum(lengths), heads, spec.head_dim, generator=g).to(dtype) for heads in (4, 2))
    scaling = dict(rope_scaling=True, rope_scaling_factor=8.0) if spec.rope_scaling else {}
    table = RotaryEmbedding(
        spec.head_dim, 1.0, rotary_base=spec.rope_theta, use_cpu_initialization=True, **scaling
    ).get_emb(max(lengths))
    rotary = Rotary(spec, "cpu")
    for actual, values in zip(rotary(query, key, offsets(lengths)), (query, key), strict=True):
        expected = apply_rotary_pos_emb(values, table, CONFIG, cu_seqlens=offsets(lengths), cp_group=OneRank())
        assert torch.equal(actual, expected)
    rectangle = query[:600].unflatten(0, (300, 2))
    expected = apply_rotary_pos_emb(rectangle, table[:300], CONFIG, cp_group=OneRank())
    assert torch.equal(rotary(rectangle, rectangle, None)[0], expected)


def test_the_kept_tables_are_those_of_the_micro_batch_at_hand():
    """Layers share a micro-batch's tables; in a pipeline, micro-batches take turns."""
    shared, a, b = Rotary(SPEC, "cpu"), offsets([3, 5]), offsets([5, 3])
    query, key, _ = query_key_value(8)
    for cu_seqlens in (a, a, b, None, a):
        assert torch.equal(shared(query, key, cu_seqlens)[0], Rotary(SPEC, "cpu")(query, key, cu_seqlens)[0])
    assert shared(query.bfloat16(), key.bfloat16(), a)[0].dtype == torch.bfloat16
    assert shared(query[:6], key[:6], None)[0].shape == (6, HEADS, DIM)


@pytest.mark.parametrize(
    "lengths", [[7, 12], [5, 9, 5, 1, 9, 5], [8, 3, 150, 145, 16]], ids=["pair", "equal lengths", "like lengths"]
)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("sinks", [(), SINKS], ids=["no sinks", "sinks"])
def test_packed_segments_are_single_runs_bit_for_bit(lengths, window, sinks):
    """And those of an unpacked run, which is not padded, within float32's rounding."""
    packed = query_key_value(sum(lengths))
    out = attention(window, sinks)(*packed, packed_seq_params=packing(lengths))
    out.square().sum().backward()
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = [t.detach()[part].clone().requires_grad_() for t in packed]
        single = attention(window, sinks)(*alone, packed_seq_params=packing([length]))
        single.square().sum().backward()
        assert torch.equal(out[part], single)
        assert all(torch.equal(a.grad[part], b.grad) for a, b in zip(packed, alone, strict=True))
        unpacked = [t.detach().clone().requires_grad_() for t in alone]
        rectangle = attention(window, sinks)(*(t[:, None] for t in unpacked))  # [S, 1, heads, dim]
        rectangle.square().sum().backward()
        torch.testing.assert_close(single, rectangle[:, 0])
        for a, b in zip(alone, unpacked, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
        start += length


def test_segments_of_like_length_share_an_attention_call(monkeypatch):
    """The batch's saving: three lengths are two calls, at any number of segments."""
    layer, shapes = attention(), []
    causal = layer._causal
    monkeypatch.setattr(layer, "_causal", lambda *qkv: shapes.append(qkv[0].shape) or causal(*qkv))
    lengths = [5, 9, 5, 1, 9, 5]
    layer(*query_key_value(sum(lengths)), packed_seq_params=packing(lengths))
    assert shapes == [(4, HEADS, 8, DIM), (2, HEADS, 16, DIM)]


@settings(max_examples=50)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=12).filter(any))
def test_segments_stand_together_by_length_and_find_their_way_back(lengths):
    bounds = tuple(offsets(lengths).tolist())
    segments = segments_by_length(bounds, torch.device("cpu"))
    row = torch.arange(sum(lengths))
    batches = list(segments.batches(row[segments.order]))
    by_length = sorted((row[a:b].tolist() for a, b in pairwise(bounds) if a < b), key=len)
    assert [segment for batch in batches for segment in batch.tolist()] == by_length
    assert [batch.size(1) for batch in batches] == sorted(set(lengths) - {0})
    assert torch.equal(row[segments.order][segments.inverse], row)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=12).filter(any))
def test_padded_segments_end_with_their_last_token_and_find_their_way_back(lengths):
    bounds = tuple(offsets(lengths).tolist())
    segments = segments_by_length(bounds, torch.device("cpu"), padded=True)
    row = torch.arange(sum(lengths))
    padded = [segment for batch in segments.batches(row[segments.order]) for segment in batch.tolist()]
    by_length = sorted((row[a:b].tolist() for a, b in pairwise(bounds) if a < b), key=len)
    for own, whole in zip(by_length, padded, strict=True):
        assert whole == own + [own[-1]] * (len(whole) - len(own))
        assert len(whole) <= max(-(-len(own) // 8) * 8, len(own) * 9 / 8)
    assert torch.equal(row[segments.order][segments.inverse], row)


@pytest.mark.parametrize("window", [None, 1, 3, 6], ids=["all", "itself", "three", "the longest"])
@pytest.mark.parametrize("sinks", [(), SINKS], ids=["no sinks", "sinks"])
def test_attention_is_causal_softmax_of_rotated_products(window, sinks):
    """Float64, term by term: pairs (x_i, x_{i + dim/2}) turn by position / theta^(2i/dim). A window
    counts the token itself. A head's sink takes its part of the softmax, and adds nothing."""
    lengths = [4, 6]
    query, key, value = inputs = [t.detach().double().requires_grad_() for t in query_key_value(sum(lengths))]
    sink = torch.tensor(sinks or [float("-inf")] * HEADS, dtype=torch.float64, requires_grad=bool(sinks))
    place = torch.cat([torch.arange(n) for n in lengths]).double()
    angle = place[:, None] / SPEC.rope_theta ** (torch.arange(0, DIM, 2).double() / DIM)

    def turned(x):
        pairs = torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :])
        pairs = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat((pairs.real, pairs.imag), -1)

    query, key = turned(query), turned(key).repeat_interleave(HEADS // KV_HEADS, 1)
    value = value.repeat_interleave(HEADS // KV_HEADS, 1)
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = torch.arange(10)[:, None] - torch.arange(10)
    visible = (segment[:, None] == segment) & (distance >= 0) & (distance < (window or 10))
    scores = torch.einsum("thd,shd->hts", query, key) / DIM**0.5
    scores = torch.cat([scores.masked_fill(~visible, float("-inf")), sink[:, None, None].expand(-1, 10, 1)], -1)
    expected = torch.einsum("hts,shd->thd", scores.softmax(-1)[..., :-1], value).flatten(1)
    layer, own = attention(window, sinks), query_key_value(sum(lengths))
    got = layer(*own, packed_seq_params=packing(lengths))
    # float32 sums of 16 terms of order 1
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)
    got.square().sum().backward()
    expected.square().sum().backward()
    pairs = [*zip(own, inputs, strict=True), *([(layer.softmax_offset, sink)] if sinks else [])]
    for ours, exact in pairs:
        torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


def test_layers_with_a_window_turn_by_frequencies_of_their_own():
    config = replace(CONFIG, window_size=(2, 0), window_attn_skip_freq=[1, 0])
    slow, fast = (Rotary(replace(SPEC, rope_theta=theta), "cpu") for theta in (1e6, 1e2))
    packed = query_key_value(9)
    for number, expected in (
        (1, PackedAttention(config, 1, rotary=fast)),
        (2, PackedAttention(CONFIG, 2, rotary=slow)),
    ):
        layer = PackedAttention(config, number, rotary=slow, local_rotary=fast)
        got, wanted = (each(*packed, packed_seq_params=packing([9])) for each in (layer, expected))
        assert torch.equal(got, wanted)


def test_angles_of_both_kinds_of_layers_travel_together_and_are_told_apart():
    """As Megatron doubles them, with Transformer Engine's layers."""
    table, both = (RotaryEmbedding(DIM, 1.0, use_cpu_initialization=True) for _ in range(2))
    slow, fast = (rotary_frequencies(replace(SPEC, rope_theta=theta)) for theta in (1e6, 1e2))
    both.inv_freq = torch.cat([slow, fast])
    for is_local, frequencies in enumerate((slow, fast)):
        table.inv_freq = frequencies
        assert torch.equal(angles_of(both.get_emb(50), bool(is_local)), table.get_emb(50))


@pytest.mark.parametrize("window", [None, 6])
def test_off_the_cpu_nothing_is_read_back_to_the_host(window):
    """A GPU's path, forward and backward, on tensors that have no values:
    reading one on the host raises."""
    rotary = Rotary(SPEC, "cpu")
    # Megatron makes them on the GPU, if there is one
    rotary.frequencies = rotary.frequencies.to("meta")
    layer = attention(window)
    layer._rotary = rotary
    inputs = query_key_value(16, torch.bfloat16, "meta")
    out = layer(*inputs, packed_seq_params=packing([7, 9], "meta"))
    assert out.shape == (16, HEADS * DIM) and out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(t.grad.shape == t.shape for t in inputs)
    # float32 asks for the segments' lengths: it would show
    with pytest.raises(RuntimeError, match="no data|meta"):
        layer(*query_key_value(16, torch.float32, "meta"), packed_seq_params=packing([7, 9], "meta"))
