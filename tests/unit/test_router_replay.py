"""Routers take the given experts: exactly, with their own scores' gradient,
also when recomputed."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_dapo.config.schema.actor_rollout_ref import MegatronConfig
from megatron_dapo.data.batching import assemble
from megatron_dapo.data.packing import collate
from megatron_dapo.data.routed_experts import RouterShape
from megatron_dapo.huggingface.experts import MoEConfig
from megatron_dapo.huggingface.spec_reader import read_model_spec
from megatron_dapo.models import router_replay as replay
from megatron_dapo.models.build import ModelParts, build_model
from megatron_dapo.models.context_parallel import rank_places
from megatron_dapo.models.hf_io import load_hf_weights
from megatron_dapo.models.router_replay import UNKNOWN, RouterPass
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.training import expert_cut as router_replay
from megatron_dapo.training.expert_cut import ExpertCut
from megatron_dapo.training.schedule import Schedule
from tests.distributed import parity_worker
from tests.distributed.test_parity import hugging_face_log_probs
from tests.synthetic import synthetic_groups, with_experts
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.unit

HIDDEN, EXPERTS, TOKENS = 32, 8, 24
KINDS = {"weights divided by their sum": (True, 2), "weights as they are": (False, 3), "sigmoid with a bias": (True, 2)}


@pytest.fixture(scope="module")
def layout() -> Iterator[ParallelLayout]:
    yield ParallelLayout.initialize()
    ParallelLayout.shutdown()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict:
    folders = {}
    for name, (norm, per_token) in KINDS.items():
        folders[name] = make_tiny(
            tmp_path_factory.mktemp("model"), "glm4_moe" if "sigmoid" in name else "qwen3_moe", layers=2,
            hidden=HIDDEN, num_experts=EXPERTS, norm_topk_prob=norm, experts_per_token=per_token,
            more=dict(first_k_dense_replace=0, routed_scaling_factor=1.5) if "sigmoid" in name else None,
        )  # fmt: skip
    return folders


def model(path, layout, **megatron) -> ModelParts:
    built = build_model(read_model_spec(path), layout, MegatronConfig(**megatron), replay_routers=True)
    load_hf_weights(built, path, layout)
    for chunk in built.chunks:
        chunk.train()
    return built


def lots(per_token: int, seed: int = 0, layers: int = 2) -> torch.Tensor:
    """Experts [TOKENS, layers, per_token] that no router would choose by itself."""
    scores = torch.rand(TOKENS, layers, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return scores.argsort(-1)[..., :per_token].to(torch.int16)


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(3, 64, (1, TOKENS), generator=torch.Generator().manual_seed(seed))


def hidden_states(parts: ModelParts, seed: int, router_pass: RouterPass | None) -> torch.Tensor:
    """The output of all layers for some tokens; the head is left out."""
    (chunk,) = parts.chunks
    with chunk.router_replay.during(router_pass):
        embedded = chunk.embedding(tokens(seed), torch.arange(TOKENS)[None])
        return chunk.decoder(embedded, attention_mask=None)


def gradients(parts: ModelParts) -> dict[str, torch.Tensor]:
    (chunk,) = parts.chunks
    named = {name: parameter.grad for name, parameter in chunk.decoder.named_parameters()}
    return {name: gradient.clone() for name, gradient in named.items() if gradient is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_computes_its_tokens_with_the_given_experts(folders, layout, kind):
    """The oracle, in float64: of these experts the softmax of the router's logits, over all or only
    over them. Or their sigmoid, divided by the sum and times 1.5, without the bias, and a shared
    expert."""
    norm, per_token = KINDS[kind]
    parts = model(folders[kind], layout)
    (chunk,) = parts.chunks
    layer = chunk.decoder.layers[1].mlp
    experts = lots(per_token)
    generator = torch.Generator().manual_seed(1)
    x, outgoing = (torch.randn(TOKENS, 1, HIDDEN, generator=generator) for _ in range(2))
    with chunk.router_replay.during(RouterPass(experts, has_backward=True)):
        ours = layer(x)[0]
    ours.backward(outgoing)

    router = layer.router.weight.detach().double().requires_grad_()
    logits = x[:, 0].double() @ router.T
    chosen = experts[:, 1].long()
    weights = logits.gather(1, chosen).softmax(-1) if norm else logits.softmax(-1).gather(1, chosen)
    if "sigmoid" in kind:
        scores = logits.sigmoid().gather(1, chosen)
        weights = 1.5 * scores / scores.sum(1, keepdim=True)

    def made_by(expert: torch.nn.Module) -> torch.Tensor:
        gate, up = (x[:, 0].double() @ expert.linear_fc1.weight.detach().double().T).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up) @ expert.linear_fc2.weight.detach().double().T

    expected = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for number, expert in enumerate(layer.experts.local_experts):
        expected = expected + made_by(expert) * (weights * (chosen == number)).sum(1, keepdim=True)
    if layer.shared_experts is not None:
        expected = expected + made_by(layer.shared_experts)
    expected.backward(outgoing[:, 0].double())

    for value, reference in ((ours[:, 0], expected), (layer.router.weight.grad, router.grad)):
        # sums of some tens of float32 products, rounded to 6e-8 each, and a softmax
        assert (value.double() - reference).abs().max() <= 2e-6 * reference.abs().max() + 1e-7


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss"])
def test_log_probs_are_those_of_transformers_whose_routers_get_the_same_experts(family, layout, tmp_path, monkeypatch):
    path = make_tiny(tmp_path / "model", family, layers=3, hidden=HIDDEN, num_experts=EXPERTS, experts_per_token=2)
    parts = model(path, layout)
    (row,) = tokens(seed=5).tolist()
    experts = lots(2, seed=6, layers=len(parts.routed_layers))
    batch = collate([parity_worker.sample(0, row)], pad_multiple=1, packed=True)
    schedule = Schedule(parts, parts.chunks, temperature=1.0)
    chosen, replayed = (
        schedule.log_probs([replace(batch, experts=taken)])[0][0, :-1].double() for taken in (None, experts)
    )
    (own,) = hugging_face_log_probs(path, [row])
    choose, lot = torch.topk, iter(experts.long().unbind(1))

    def replaying(scores: torch.Tensor, k: int, **how: object) -> tuple[torch.Tensor, torch.Tensor]:
        if scores.size(-1) != EXPERTS:  # of groups
            return choose(scores, k, **how)
        taken = next(lot)
        return scores.gather(-1, taken), taken

    monkeypatch.setattr(torch, "topk", replaying)
    (expected,) = hugging_face_log_probs(path, [row])
    assert next(lot, None) is None
    # float32 logits of this size, as in tests/distributed/test_parity.py
    torch.testing.assert_close(chosen, own, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(replayed, expected, rtol=1e-6, atol=1e-5)
    assert (expected - own).abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_replay_of_the_routers_choice_changes_no_bit(folders, layout, kind):
    parts = model(folders[kind], layout)
    recorded = torch.zeros_like(lots(KINDS[kind][1]))
    results = []
    for router_pass in (None, RouterPass(recorded, records=True), RouterPass(recorded, has_backward=True)):
        parts.chunks[0].zero_grad()
        output = hidden_states(parts, 0, router_pass)
        output.square().sum().backward()
        results.append({"output": output.detach(), **gradients(parts)})
    assert len(recorded.unique()) == EXPERTS
    for other in results[1:]:
        assert other.keys() == results[0].keys() and all(torch.equal(other[k], v) for k, v in results[0].items())
    assert parts.chunks[0].router_replay.differences.tolist() == [0, TOKENS * 2]


def test_where_nothing_is_known_the_router_chooses_and_nothing_is_recorded(folders, layout):
    parts = model(folders["weights divided by their sum"], layout)
    own = torch.zeros_like(lots(2))
    plain = hidden_states(parts, 0, RouterPass(own, records=True))
    experts = own.clone()
    experts[5:] = UNKNOWN
    assert torch.equal(hidden_states(parts, 0, RouterPass(experts)), plain)
    hidden_states(parts, 1, RouterPass(experts, records=True))
    assert (experts[5:] == UNKNOWN).all() and (experts[:5] != UNKNOWN).all()


RECOMPUTE = {
    "full": dict(recompute_granularity="full"),
    "full, in groups": dict(recompute_granularity="full", recompute_num_layers=2),
    "full, the first layer": dict(recompute_granularity="full", recompute_method="block"),
    "mixtures": dict(recompute_granularity="selective", recompute_modules=["mlp"]),
}


@pytest.mark.parametrize("kind", RECOMPUTE)
def test_each_of_several_micro_batches_under_way_gets_its_own_experts_again_in_backward(folders, layout, kind):
    """As 1F1B has them: two forward passes, then one backward and one forward in turn."""

    def run(**megatron) -> dict:
        parts = model(folders["weights divided by their sum"], layout, **megatron)
        outputs = {}
        for forward in (0, 1, 2, 3):
            outputs[forward] = hidden_states(parts, forward, RouterPass(lots(2, seed=forward), has_backward=True))
            if forward:
                outputs[forward - 1].square().sum().backward()
        outputs[3].square().sum().backward()
        parts.chunks[0].router_replay.assert_recomputed()
        assert parts.chunks[0].router_replay.differences[1] == 4 * TOKENS * 2  # not counted again
        return {**{str(number): output.detach() for number, output in outputs.items()}, **gradients(parts)}

    expected, got = run(), run(**RECOMPUTE[kind])
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def test_the_share_of_other_experts_counts_sets_and_only_known_tokens(folders, layout):
    parts = model(folders["weights divided by their sum"], layout)
    own = torch.zeros_like(lots(2))
    hidden_states(parts, 0, RouterPass(own, records=True))
    experts = own.flip(-1)  # the same experts in another order
    for token in (0, 1):  # of the last layer
        experts[token, 1, 0] = next(expert for expert in range(EXPERTS) if expert not in own[token, 1])
    experts[20:] = UNKNOWN
    replay = parts.chunks[0].router_replay
    hidden_states(parts, 0, RouterPass(experts))
    assert replay.differences.tolist() == [2, 20 * 2]


def test_a_steps_experts_stay_in_the_hosts_memory_and_on_gpus_in_pages_that_copies_need_not_wait_for(monkeypatch):
    """One step's are gigabytes: 2.5 GB for Qwen3-30B-A3B."""
    samples = assemble(with_experts(synthetic_groups(64, num_groups=2, n=2), SHAPE))
    rank = SimpleNamespace(tp=1, sp=False, tp_rank=0, cp=1, cp_rank=0)
    cut = ExpertCut(SHAPE, (0, 1, 2), rank, from_servers=True)
    batch = collate(samples)
    ((expected,),) = cut.added([[samples]], [[batch]])
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    # on some device
    ((got,),) = cut.added([[samples]], [[replace(batch, tokens=batch.tokens.to("meta"))]])
    assert got.experts.device == torch.device("cpu") and torch.equal(got.experts, expected.experts)
    assert pinned == []
    monkeypatch.setattr(router_replay, "is_gpu", lambda: True)
    ((got,),) = cut.added([[samples]], [[batch]])
    assert len(pinned) == 1 and pinned[0] is got.experts


@pytest.mark.parametrize("recompute", [{}, dict(recompute_granularity="full")])
def test_micro_batches_have_their_experts_on_the_device_while_they_run(folders, layout, monkeypatch, recompute):
    """With copies in place of a device's own: the routers' recordings there come back,
    and are the ones replayed."""
    parts = model(folders["weights divided by their sum"], layout, **recompute)
    schedule = Schedule(parts, parts.chunks, temperature=1.0)
    batches = [
        replace(
            collate([parity_worker.sample(number, tokens(number)[0].tolist())]),
            experts=torch.zeros(TOKENS, 2, 2, dtype=torch.int16),
        )
        for number in range(3)
    ]
    expected = [score.log_probs for score in schedule.scores(batches, record_experts=True)]
    recorded = [batch.experts.clone() for batch in batches]
    assert all(len(experts.unique()) > 2 for experts in recorded)

    copies = []

    def copied(experts: torch.Tensor, device: torch.device) -> torch.Tensor:
        copies.append(experts.clone())
        return copies[-1]

    monkeypatch.setattr(replay, "on_device", copied)
    for batch in batches:
        batch.experts.zero_()
    schedule.scores(batches, record_experts=True)
    for batch, before in zip(batches, recorded, strict=True):
        assert torch.equal(batch.experts, before)
    replayed = schedule.log_probs(batches)
    assert len(copies) == 6 and all(torch.equal(a, b) for a, b in zip(replayed, expected, strict=True))


SHAPE = RouterShape(3, MoEConfig(num_experts=8, experts_per_token=2, norm_topk_prob=True))


@pytest.mark.parametrize(
    ("packed", "tp", "cp"),
    # context parallelism cuts only packed samples
    [(True, 1, 1), (True, 2, 1), (True, 1, 2), (True, 2, 2), (False, 1, 1), (False, 2, 1)],
)
def test_every_rank_has_the_experts_of_its_tokens_and_layers(packed, tp, cp):
    """Token by token: a row's contents tell its sample and its token."""
    samples = assemble(with_experts(synthetic_groups(64, num_groups=2, n=2), SHAPE))
    multiple = (2 * cp if cp > 1 else 1) * tp
    batch = collate(samples, packed=packed, pad_multiple=multiple, segment_multiple=2 * cp if cp > 1 else 1)
    num_rows, width = batch.tokens.shape
    of_place = {}
    start = 0
    for sample, segment in zip(samples, batch.widths, strict=False):
        rows = sample.routed_experts.reshape(-1, 3, 2)
        of_place |= {start + t: rows[t].tolist() for t in range(sample.length - 1)}
        start += segment
    met = []
    for cp_rank in range(cp):
        places = np.arange(num_rows * width).reshape(num_rows, width).T.flatten()  # s * B + b
        if cp > 1:
            places = rank_places(batch.widths, cp_rank, cp)
        for tp_rank, part in enumerate(np.split(places, tp)):
            rank = SimpleNamespace(tp=tp, sp=tp > 1, tp_rank=tp_rank, cp=cp, cp_rank=cp_rank)
            for layers in ((0, 1), (2,)):
                got = ExpertCut(SHAPE, layers, rank, from_servers=True).experts(samples, batch)
                unknown = [[UNKNOWN] * 2] * 3
                expected = [[of_place.get(place, unknown)[layer] for layer in layers] for place in part.tolist()]
                assert got.dtype == torch.int16 and got.tolist() == expected
            recorded = ExpertCut(SHAPE, (0, 1), rank, from_servers=False).experts(samples, batch)
            assert ((recorded == 0) == torch.tensor([place in of_place for place in part])[:, None, None]).all()
            met += part.tolist()
    assert sorted(met) == list(range(num_rows * width))
