"""A CPU server's operators of gated delta net give what transformers computes, however a request's
tokens arrive, and whoever is served beside it."""

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as oracle

from megatron_dapo.platform.sglang_cpu import cpu_server
from tests.proofs import proof
from tests.sglang_cpu_cases import in_server_process

pytestmark = pytest.mark.unit

NUM_SLOTS, WIDTH, KEY_HEADS, HEADS, KEY, VALUE = 6, 4, 2, 4, 8, 12
ARRIVALS = [
    {2: 5, 0: 1, 5: 9},  # slot -> new tokens: prompts
    {5: 1, 2: 1},  # one more token each
    {0: 3, 2: 4},  # chunks of prompts
    {0: 1, 2: 1, 5: 1},
]


@pytest.fixture(scope="module")
def operators():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(cpu_server.SITE)
        import gated_delta_net

        yield gated_delta_net


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def garbage(*shape: int) -> Tensor:
    """States of requests that are over."""
    return torch.full(shape, float("nan"))


def ends(lengths) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def test_the_convolution_of_tokens_in_pieces_is_that_of_the_whole(operators):
    weight, bias, states = numbers(10, WIDTH, seed=1), numbers(10, seed=2), garbage(NUM_SLOTS, 10, WIDTH - 1)
    seen, answers = {}, {}
    for number, arrival in enumerate(ARRIVALS):
        new = {slot: numbers(10, length, seed=10 * number + slot) for slot, length in arrival.items()}
        slots = torch.tensor(list(new), dtype=torch.int32)
        if set(arrival.values()) == {1}:
            inputs = torch.cat([x.T for x in new.values()])
            out = operators.causal_conv1d_update_cpu(inputs, states, weight, bias, "silu", conv_state_indices=slots).T
        else:
            has_begun = torch.tensor([slot in seen for slot in new])
            out = operators.causal_conv1d_fn_cpu(
                torch.cat(list(new.values()), 1), weight, bias, activation="silu", conv_states=states,
                has_initial_state=has_begun, cache_indices=slots, query_start_loc=ends(arrival.values()),
                seq_lens_cpu=None,
            )  # fmt: skip
        for (slot, x), part in zip(new.items(), out.split(list(arrival.values()), dim=1), strict=True):
            seen[slot] = torch.cat([seen[slot], x], 1) if slot in seen else x
            answers[slot] = torch.cat([answers[slot], part], 1) if slot in answers else part
    for slot, x in seen.items():
        padded = torch.nn.functional.pad(x.double(), (WIDTH - 1, 0))
        whole = torch.nn.functional.conv1d(padded[None], weight.double()[:, None], bias.double(), groups=10)[0]
        torch.testing.assert_close(answers[slot], torch.nn.functional.silu(whole).float(), rtol=1e-5, atol=1e-6)
        assert torch.equal(states[slot], padded[:, 1 - WIDTH :].float())


def inputs_of(length: int, seed: int) -> dict[str, Tensor]:
    """A request's, [1, T, heads, dimensions]; a and b are [T, heads]."""
    shapes = dict(q=(1, length, KEY_HEADS, KEY), k=(1, length, KEY_HEADS, KEY), v=(1, length, HEADS, VALUE))
    shapes |= dict(a=(length, HEADS), b=(length, HEADS))
    return {name: numbers(*shape, seed=seed + place) for place, (name, shape) in enumerate(shapes.items())}


A_LOG, DT_BIAS = numbers(HEADS, seed=7), numbers(HEADS, seed=8)


def of_transformers(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(outputs, state [H, V, K]) of one request from its start, as Qwen3-Next's layer computes them."""
    g = -A_LOG.exp() * torch.nn.functional.softplus(inputs["a"] + DT_BIAS)
    q, k = (inputs[name].repeat_interleave(HEADS // KEY_HEADS, dim=2) for name in "qk")
    out, state = oracle.torch_recurrent_gated_delta_rule(
        q, k, inputs["v"], g[None], inputs["b"].sigmoid()[None], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    return out[0], state[0].transpose(-1, -2)


def extended(
    operators, inputs: dict[str, Tensor], states: Tensor, slots: Tensor, starts: Tensor, head_first=False
) -> Tensor:
    g, beta = operators.fused_gdn_gating_cpu(A_LOG, inputs["a"], inputs["b"], DT_BIAS)
    q, k, v = (inputs[name] for name in "qkv")
    out, _, _ = operators.chunk_gated_delta_rule_cpu(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=states, cu_seqlens=starts, head_first=head_first,
        use_qk_l2norm_in_kernel=True, initial_state_indices=slots,
    )  # fmt: skip
    return out[0]


def decoded(operators, inputs: dict[str, Tensor], states: Tensor, slots: Tensor, starts: Tensor, **other) -> Tensor:
    settings = {"use_qk_l2norm_in_kernel": True, "softplus_beta": 1.0, "softplus_threshold": 20.0} | other
    return operators.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=A_LOG, dt_bias=DT_BIAS, **inputs, initial_state_source=states, initial_state_indices=slots,
        cu_seqlens=starts, **settings,
    )[0]  # fmt: skip


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts], dim=int(name in "qkv")) for name in parts[0]}


def test_the_recurrence_of_tokens_in_pieces_is_that_of_the_whole(operators):
    states = torch.zeros(NUM_SLOTS, HEADS, VALUE, KEY)
    seen, answers = {}, {}
    for number, arrival in enumerate(ARRIVALS):
        new = {slot: inputs_of(length, seed=100 * number + 10 * slot) for slot, length in arrival.items()}
        step = decoded if set(arrival.values()) == {1} else extended
        slots = torch.tensor(list(new), dtype=torch.int32)
        out = step(operators, joined(list(new.values())), states, slots, ends(arrival.values()))
        for (slot, inputs), part in zip(new.items(), out.split(list(arrival.values())), strict=True):
            seen.setdefault(slot, []).append(inputs)
            answers.setdefault(slot, []).append(part)
    for slot, parts in seen.items():
        expected, state = of_transformers(joined(parts))
        torch.testing.assert_close(torch.cat(answers[slot]), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states[slot], state, rtol=1e-5, atol=1e-5)
    assert not states[[1, 3, 4]].any()


@pytest.mark.parametrize(
    ("name", "value"),
    [("head_first", True), ("use_qk_l2norm_in_kernel", False), ("softplus_beta", 2.0), ("softplus_threshold", 10.0),
     ("activation", "relu")],
)  # fmt: skip
def test_another_value_of_a_setting_is_refused_by_name(operators, name, value):
    """SGLang's next version may ask for one, and must not get the values of the old one."""
    places = dict(states=torch.zeros(1, HEADS, VALUE, KEY), slots=torch.tensor([0]), starts=ends([1]))
    with pytest.raises(NotImplementedError, match=name):
        if name == "activation":
            states = torch.zeros(1, 10, WIDTH - 1)
            operators.causal_conv1d_update_cpu(torch.zeros(1, 10), states, torch.zeros(10, WIDTH), None, value, [0])
        elif name == "head_first":
            extended(operators, inputs_of(1, seed=1), **places, head_first=value)
        else:
            decoded(operators, inputs_of(1, seed=1), **places, **{name: value})


@pytest.mark.parametrize("others", [1, 7, 40])
def test_a_requests_bits_do_not_depend_on_the_others(operators, others):
    """Else deterministic inference would not be."""
    alone, crowd = inputs_of(11, seed=1), [inputs_of(3 + n % 20, seed=50 + n) for n in range(others)]
    lengths = [11, *(len(each["a"]) for each in crowd)]
    states = numbers(others + 1, HEADS, VALUE, KEY, seed=9)
    one = extended(operators, alone, states[:1].clone(), torch.tensor([0]), ends([11]))
    all_ = extended(operators, joined([alone, *crowd]), states.clone(), torch.arange(others + 1), ends(lengths))
    assert torch.equal(one, all_[:11])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_gates_are_those_of_transformers(operators, dtype):
    norm = oracle.Qwen3NextRMSNormGated(VALUE, eps=1e-6).double()
    norm.weight.data = numbers(VALUE, seed=3, dtype=dtype).double()
    x, gate = (numbers(5, VALUE, seed=seed, dtype=dtype) for seed in (4, 5))
    norm.eps = norm.variance_epsilon
    got = operators.gated_norm(None, norm, x, gate)
    assert got.dtype == dtype
    torch.testing.assert_close(got, norm(x.double(), gate.double()).to(dtype).detach())
    per_head = oracle.Qwen3NextRMSNorm(KEY, eps=1e-6).double()
    per_head.weight.data = numbers(KEY, seed=6, dtype=dtype).double()
    q, k = numbers(5, HEADS * 2 * KEY, seed=7, dtype=dtype), numbers(5, KEY_HEADS * KEY, seed=8, dtype=dtype)
    weight = per_head.weight.data.to(dtype)
    queries, keys, gates = operators.fused_qk_gemma_rmsnorm_with_gate_cpu(q, k, weight, weight, 1e-6, KEY, HEADS)
    heads, expected_gates = q.view(5, HEADS, 2 * KEY).chunk(2, dim=-1)
    torch.testing.assert_close(queries, per_head(heads.double()).to(dtype).flatten(1).detach())
    torch.testing.assert_close(keys, per_head(k.double().view(5, KEY_HEADS, KEY)).to(dtype).flatten(1).detach())
    assert torch.equal(gates, expected_gates.flatten(1))


def test_an_argument_of_a_mode_that_no_operator_here_has_raises(operators):
    with pytest.raises(TypeError, match="disable_state_update"):
        operators.fused_sigmoid_gating_delta_rule_update_cpu(disable_state_update=True)


@proof
def test_a_server_finds_the_operators_under_their_names():
    """The servers of tests/e2e/test_hybrid_run.py serve with them."""
    code = (
        "import torch, gated_delta_net, sglang.srt.plugins as plugins; plugins.load_plugins();"
        "import sglang.srt.models.qwen3_5 as model, sglang.srt.layers.attention.linear.gdn_backend as backend;"
        "print(model.fused_sigmoid_mul, model._fused_sigmoid_mul_cpu is gated_delta_net.fused_sigmoid_mul_cpu,"
        "backend.causal_conv1d_fn is gated_delta_net.causal_conv1d_fn_cpu,"
        "model.RMSNormGated.forward.__wrapped__ is not None)"
    )
    done = in_server_process(code)
    assert done.stdout.strip().endswith("True True True"), done.stderr[-3000:]
