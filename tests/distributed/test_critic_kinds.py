"""Critics other than dense ones in float32: a mixture of experts, and both in bfloat16,
against transformers."""

from pathlib import Path

import pytest
import torch

from megatron_dapo.data.batching import TrainSample, assemble
from tests.distributed.layout_runs import assert_same, run_layouts
from tests.distributed.test_critic import HIDDEN, PPO, SHARDED, SMALL, VOCAB, transformers_values, with_value_head
from tests.proofs import few
from tests.synthetic import synthetic_groups
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.distributed

FAMILIES = ("qwen3", "qwen3_moe")
LAYOUTS = {
    1: {"tp1": {}},
    2: {"tp2_sp": {"tp": 2, "sp": True}, "tp2_sp_ep2": {"tp": 2, "sp": True, "ep": 2}, "dp2_ep2": {"ep": 2}},
}
HALF = ["actor_rollout_ref.actor.megatron.dtype=bfloat16", *SMALL]
HALF_LAYOUTS = ("tp1", "tp2_sp", "dp2_ep2")
SHARDED_LAYOUTS = few(["tp2_sp_ep2", "tp2_sp", "dp2_ep2"], 1)
HALF_CASES = [(family, layout) for family in FAMILIES for layout in HALF_LAYOUTS]
MIXTURE_CASES = ["tp1/small", *(f"{layout}/small" for layout in LAYOUTS[2])]
MIXTURE_CASES += [f"{layout}/sharded" for layout in SHARDED_LAYOUTS]


@pytest.fixture(scope="module")
def critics(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("critics")
    shape = dict(vocab=VOCAB, layers=2, hidden=HIDDEN, heads=4, kv_heads=2, seed=3)
    return {family: with_value_head(make_tiny(folder / family, family, **shape)) for family in FAMILIES}


@pytest.fixture(scope="module")
def results(critics, tmp_path_factory) -> dict[str, dict[str, dict]]:
    """Family -> "layout/variant" -> the run's results.
    The actor is the critic's body with its policy head."""
    folder = tmp_path_factory.mktemp("results")
    by_family: dict[str, dict] = {}
    for family, critic in critics.items():
        overrides = [*PPO, f"critic.model.path={critic}"]
        actor = make_tiny(folder / family, family, vocab=VOCAB, layers=2, hidden=HIDDEN, heads=4, kv_heads=2)
        layouts = {
            world: {
                name: (sizes_for(family, sizes), variants)
                for name, sizes in of_world.items()
                if (variants := variants_of(family, name, overrides))
            }
            for world, of_world in LAYOUTS.items()
        }
        by_family[family] = run_layouts(folder, actor, layouts)
    return by_family


def variants_of(family: str, layout: str, overrides: list[str]) -> dict[str, list[str]]:
    """Return those of a layout that are read. What dense critics learn in float32 is in
    test_critic.py."""
    variants = {"whole": overrides} if layout == "tp1" else {}
    if layout in HALF_LAYOUTS:
        variants["half"] = [*overrides, *HALF]
    if family == "qwen3_moe":
        variants["small"] = [*overrides, *SMALL]
        if layout in SHARDED_LAYOUTS:
            variants["sharded"] = [*overrides, *SHARDED]
    return variants


def sizes_for(family: str, sizes: dict) -> dict:
    """The same without expert parallelism for dense models."""
    return sizes if family == "qwen3_moe" else {name: size for name, size in sizes.items() if name != "ep"}


@pytest.fixture(scope="module")
def samples() -> list[TrainSample]:
    return assemble(synthetic_groups(VOCAB), estimator="gae")


@pytest.fixture(scope="module")
def values(critics, samples, tmp_path_factory):
    """(family, dtype) -> transformers' values of the counted tokens, one after the other."""
    made: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def of(family: str, dtype: torch.dtype) -> torch.Tensor:
        if (family, dtype) not in made:
            of_tokens = transformers_values(critics[family], samples, tmp_path_factory.mktemp("body"), dtype)
            made[family, dtype] = counted(samples, of_tokens)
        return made[family, dtype]

    return of


def counted(samples: list[TrainSample], rows: dict[int, torch.Tensor]) -> torch.Tensor:
    return torch.cat([rows[sample.sample_id][torch.from_numpy(sample.loss_mask) != 0] for sample in samples]).double()


def estimated(run: dict, samples: list[TrainSample], name: str) -> torch.Tensor:
    return counted(samples, {sample.sample_id: run["estimates"][f"{name}/{sample.sample_id}"] for sample in samples})


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_those_of_transformers(results, samples, values, family):
    ours = estimated(results[family]["tp1/whole"], samples, "values")
    torch.testing.assert_close(ours, values(family, torch.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", MIXTURE_CASES)
def test_a_mixture_learns_the_same_wherever_its_experts_are(results, case):
    got, expected = results["qwen3_moe"][case], results["qwen3_moe"]["tp1/whole"]
    assert_same(got["critic"], expected["critic"])


def test_every_expert_and_the_router_of_a_critic_get_a_gradient(results):
    gradients = results["qwen3_moe"]["tp1/whole"]["critic"]["gradients"]
    mixture = {name: gradient for name, gradient in gradients.items() if ".mlp." in name}
    assert len(mixture) == 2 * (8 * 3 + 1) and all(gradient.any() for gradient in mixture.values())
    assert gradients["score.weight"].any() and gradients["score.bias"].any()


@pytest.mark.parametrize(("family", "layout"), HALF_CASES)
def test_values_in_bfloat16_are_as_near_to_float64_as_those_of_transformers_in_bfloat16(
    results, samples, values, family, layout
):
    """Both round the same weights and, in another order, the same activations: their errors are two
    draws from one distribution. So the root mean squares over several hundred tokens agree, and the
    largest are of one size."""
    exact = values(family, torch.float64)
    of_transformers = (values(family, torch.bfloat16) - exact).abs()
    ours = (estimated(results[family][f"{layout}/half"], samples, "values") - exact).abs()
    assert 0 < ours.square().mean().sqrt() <= 1.5 * of_transformers.square().mean().sqrt()
    assert ours.max() <= 2 * of_transformers.max()


@pytest.mark.parametrize(("family", "layout"), HALF_CASES)
def test_gradients_in_bfloat16_are_those_in_float32_but_for_rounding(results, family, layout):
    """Roundings of 2^-8 add up over the layers, and a token near the edge goes to another expert.
    The effect is a few per cent of the whole gradient. A lost or doubled share of a rank or an
    expert would be half of it."""
    run, exact = (results[family][case]["critic"] for case in (f"{layout}/half", "tp1/whole"))
    assert run["gradients"].keys() == exact["gradients"].keys()
    gradients, exact_gradients = (
        torch.cat([case["gradients"][name].double().flatten() for name in exact["gradients"]]) for case in (run, exact)
    )
    assert (gradients - exact_gradients).norm() <= 2**-3 * exact_gradients.norm()
    assert run["metrics"]["critic/vf_loss"] == pytest.approx(exact["metrics"]["critic/vf_loss"], rel=4 * 2**-8)
