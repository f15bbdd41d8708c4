"""Training adapters does not depend on the layout: loss, gradients of A and B,
merged weights, memory."""

import shutil
from pathlib import Path

import pytest

from tests.distributed.layout_runs import HALF_A_STEP, Layouts, assert_same, assert_same_as, cases_of, run_layouts
from tests.families import FAMILIES
from tests.peft_adapters import make_adapter
from tests.proofs import proof
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.distributed

RANK, ALPHA = 4, 6
MEGATRON = "actor_rollout_ref.actor.megatron"
SMALL = "actor_rollout_ref.actor.max_tokens_per_microbatch=96"
KL = [
    SMALL,
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.1",
    "actor_rollout_ref.actor.kl_loss_type=full",
]
SHARDED = [f"{MEGATRON}.use_distributed_optimizer=true"]
GATHERED = [*SHARDED, f"{MEGATRON}.overlap_grad_reduce=true", f"{MEGATRON}.overlap_param_gather=true"]
RECOMPUTED = [SMALL, f"{MEGATRON}.recompute_granularity=full"]
LAYERS = f"{MEGATRON}.pipeline_layers"
SP = {"tp": 2, "sp": True}
LAYOUTS = {
    1: {"tp1": ({}, {"whole": [], "kl": KL[1:], "recomputed": RECOMPUTED, "bfloat16": [f"{MEGATRON}.dtype=bfloat16"]})},
    2: {
        "tp2": ({"tp": 2}, {"small": [SMALL], "kl": KL}),
        "tp2_sp": (SP, {"small": [SMALL], "kl": KL, "recomputed": RECOMPUTED}),
        "pp2": ({"pp": 2}, {"small": [SMALL], "kl": KL, "alone": [*RECOMPUTED, f"{LAYERS}=[0,4]"]}),
        "dp2": ({}, {"small": [SMALL], "gathered": [SMALL, *GATHERED]}),
        "cp2": ({"cp": 2}, {"small": [SMALL]}),
    },
    4: {
        "tp2_sp_pp2_vpp2": ({**SP, "pp": 2, "vpp": 2}, {"uneven": [SMALL, *SHARDED, f"{LAYERS}=[0,1,2,1]"]}),
        "tp2_sp_dp2": (SP, {"kl": [*KL, *GATHERED], "bfloat16": [f"{MEGATRON}.dtype=bfloat16", *SHARDED]}),
    },
}
REPLAYED = "actor_rollout_ref.actor.router_replay=rollout"
RECORDED = "actor_rollout_ref.actor.router_replay=old"
MIXTURE_KL = {
    "kl": KL,
    "kl_recorded": [*KL, RECORDED],
    "kl_replayed": [*KL, REPLAYED],
    "kl_replayed_apart": [*KL, REPLAYED, "actor_rollout_ref.ref.path=REFERENCE"],
}
# experts have adapters of their own, wherever they are, whole or cut
MIXTURE_LAYOUTS = {
    1: {"tp1": ({}, {"whole": [], **MIXTURE_KL})},
    2: {
        "tp2_sp": (SP, {"small": [SMALL]}),
        "tp2_sp_ep2": ({**SP, "ep": 2}, {"small": [SMALL]}),
        "tp2_sp_etp2": ({**SP, "etp": 2}, {"small": [SMALL]}),
    },
    4: {
        "pp2_dp2_ep2": ({"pp": 2, "ep": 2}, {"small": [SMALL], "gathered": [SMALL, *GATHERED]}),
        "cp2_dp2_ep2_etp2": ({"cp": 2, "ep": 2, "etp": 2}, {"recomputed": RECOMPUTED}),
    },
}
# gate and up in one tensor, rotated pairs that are neighbours in the checkpoint
GLM_LAYOUTS = {1: {"tp1": ({}, {"whole": []})}, 2: {"tp2_sp": (SP, {"small": [SMALL]})}}
# the modules of GLM-4.7-Flash are DeepSeek-V3's
ADAPTED = [
    pytest.param(name, marks=proof if name == "glm4_moe_lite" else ())
    for name, row in FAMILIES.items()
    if row.num_adapted
]
CASES = cases_of(LAYOUTS)
MIXTURE_CASES = cases_of(MIXTURE_LAYOUTS)


def run(folder: Path, model: Path, layouts: Layouts) -> dict[str, dict]:
    """Results of `run_layouts`, with adapters free of zeros."""
    make_adapter(folder / "adapter", model, RANK, ALPHA)
    lora = [
        f"actor_rollout_ref.model.lora_rank={RANK}",
        f"actor_rollout_ref.model.lora_alpha={ALPHA}",
        f"actor_rollout_ref.model.lora_adapter_path={folder / 'adapter'}",
    ]
    with_lora = {
        world: {
            name: (sizes, {variant: [*lora, *overrides] for variant, overrides in variants.items()})
            for name, (sizes, variants) in of_world.items()
        }
        for world, of_world in layouts.items()
    }
    reference = shutil.copytree(model, folder / "reference")
    return run_layouts(folder, model, with_lora, reference, overrides=HALF_A_STEP)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("lora")
    model = make_tiny(folder / "model", "qwen3", vocab=67, layers=4, hidden=32, heads=8, kv_heads=4)
    return run(folder, model, LAYOUTS)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("mixture")
    shape = dict(vocab=67, layers=2, hidden=32, heads=4, kv_heads=2, num_experts=4)
    return run(folder, make_tiny(folder / "model", "glm4_moe", **shape), MIXTURE_LAYOUTS)


@pytest.mark.parametrize("case", [case for case in CASES if "bfloat16" not in case])
def test_loss_gradients_of_adapters_and_merged_weights_are_those_of_one_process(results, case):
    got = results[case]
    assert_same_as(results, case, "tp1/kl" if case.endswith("/kl") else "tp1/whole")
    assert got["metrics"]["actor/grad_norm"] > 0.1
    if "gradients" in got:
        assert len(got["gradients"]) == 4 * 7 * 2 and all(g.abs().max() > 0 for g in got["gradients"].values())
    assert got["first"]["actor/ratio_max"] == 1.0  # the policy is the old policy, to the bit


@pytest.mark.parametrize("case", [case for case in MIXTURE_CASES if "kl" not in case])
def test_adapters_of_experts_get_the_gradients_of_all_their_tokens(mixture, case):
    got = mixture[case]
    assert_same_as(mixture, case, "tp1/whole")
    # a dense layer, and one with four experts and a shared one
    assert "gradients" not in got or len(got["gradients"]) == 2 * (4 + 3) + 2 * (4 + 4 * 3 + 3)


@pytest.mark.parametrize("family", ADAPTED)
def test_families_with_other_modules_have_their_adapters_cut_as_they_are(tmp_path, family):
    """Gate and up in one; dense first layers, and shared experts beside four;
    modules whole on each rank."""
    shape = dict(vocab=67, layers=2, hidden=32, heads=4, kv_heads=2, num_experts=4)
    got = run(tmp_path, make_tiny(tmp_path / "model", family, **shape), GLM_LAYOUTS)
    assert_same(got["tp2_sp/small"], got["tp1/whole"])
    num_adapted = FAMILIES[family].num_adapted
    assert num_adapted is not None and len(got["tp1/whole"]["gradients"]) == 2 * num_adapted(4)


def test_the_reference_is_the_model_without_adapters(results):
    assert results["tp1/kl"]["first"]["actor/kl_loss"] > 0.01


def test_the_routers_of_a_reference_without_adapters_choose_by_themselves(mixture):
    """So the KL is the same with recorded experts of the policy,
    and with another model as the reference."""
    kl = {variant: mixture[f"tp1/{variant}"]["first"]["actor/kl_loss"] for variant in MIXTURE_KL}
    assert kl["kl"] > 0.01 and kl["kl_replayed"] != pytest.approx(kl["kl"], rel=0.01)
    assert kl["kl_recorded"] == pytest.approx(kl["kl"], rel=1e-5)
    assert kl["kl_replayed"] == pytest.approx(kl["kl_replayed_apart"], rel=1e-5)


def test_only_adapters_take_gradients_and_optimizer_state_and_the_plan_counts_them(results, mixture):
    cases = [case for by_layout in (results, mixture) for case in by_layout.values()]
    for ranks in (case["states"] for case in cases):
        for _, counted, estimated in ranks:
            assert counted["weights"] == estimated["weights"] and counted["gradients"] == estimated["gradients"]
        for stage in {stage for stage, _, _ in ranks}:
            counted = sum(states["optimizer"] for at, states, _ in ranks if at == stage)
            estimated = sum(states["optimizer"] for at, _, states in ranks if at == stage)
            assert 0 <= estimated - counted <= 2 * len(ranks)
        assert sum(c["gradients"] for _, c, _ in ranks) < sum(c["weights"] for _, c, _ in ranks)
