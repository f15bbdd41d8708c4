"""Loss, metrics, gradients and updated weights do not depend on the cut of a rollout step.

The same 16 samples go through every layout of (TP, PP, virtual PP, SP, DP) for up to four
processes, packed and padded, in micro-batches of several sizes. Every case is compared with the
plain single process. All are `make proofs`; `make test` has a variant at each kind of parallelism.
"""

from functools import partial

import pytest
import torch

from tests.distributed.layout_runs import (
    HALF_A_STEP,
    Layouts,
    assert_same,
    assert_same_as,
    by_world_size,
    cases_of,
    in_short,
    run_layouts,
    with_others,
)  # fmt: skip
from tests.families import own_layers
from tests.proofs import PROOFS
from tests.synthetic import synthetic_groups, with_replayed
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.distributed

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
CUTS = {
    "whole": [],
    "small": ["actor_rollout_ref.actor.max_tokens_per_microbatch=96"],
    "single": ["actor_rollout_ref.actor.max_tokens_per_microbatch=40"],
    "padded": [
        "actor_rollout_ref.actor.max_tokens_per_microbatch=128",
        "actor_rollout_ref.model.use_remove_padding=false",
    ],
}
LAYOUTS = {
    "tp1": {},
    "tp2": {"tp": 2},
    "tp2_sp": {"tp": 2, "sp": True},
    "pp2": {"pp": 2},
    "pp2_vpp2": {"pp": 2, "vpp": 2},
    "dp2": {},
    "tp4": {"tp": 4},
    "tp4_sp": {"tp": 4, "sp": True},
    "pp4": {"pp": 4},
    "dp4": {},
    "tp2_pp2": {"tp": 2, "pp": 2},
    "tp2_sp_pp2": {"tp": 2, "sp": True, "pp": 2},
    "tp2_sp_pp2_vpp2": {"tp": 2, "sp": True, "pp": 2, "vpp": 2},
    "tp2_dp2": {"tp": 2},
    "tp2_sp_dp2": {"tp": 2, "sp": True},
    "pp2_dp2": {"pp": 2},
    "pp2_vpp2_dp2": {"pp": 2, "vpp": 2},
    "cp2": {"cp": 2},
    "tp2_sp_cp2": {"tp": 2, "sp": True, "cp": 2},
    "pp2_cp2": {"pp": 2, "cp": 2},
    "cp2_dp2": {"cp": 2},
    "cp4": {"cp": 4},
}
# 1, 2 or 4 processes: the rest of the ranks are data parallelism
WORLD_SIZES = {name: 1 if name == "tp1" else 2 if name in (*list(LAYOUTS)[1:6], "cp2") else 4 for name in LAYOUTS}
# the head's gradient is in its buffer before backward; the reduction must wait for the hook
OVERLAP = {"overlap": ["actor_rollout_ref.actor.megatron.overlap_grad_reduce=true"]}
DISTRIBUTED_OPTIMIZER = ["actor_rollout_ref.actor.megatron.use_distributed_optimizer=true"]
# the second step's forward waits for the first one's scattered shards; pushed weights are whole
OVERLAP |= {
    "gather": [
        *OVERLAP["overlap"],
        *DISTRIBUTED_OPTIMIZER,
        "actor_rollout_ref.actor.megatron.overlap_param_gather=true",
    ]
}
# every micro-batch in several chunks of the head; the head composed from torch operations
HEADS = {
    "chunks": ["actor_rollout_ref.actor.log_prob_chunk_size=7"],
    "composed": ["actor_rollout_ref.actor.fused_kernels=off"],
}
KL = [
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.1",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.kl_coef=0.05",
    "actor_rollout_ref.rollout.dump_samples=3",
    "actor_rollout_ref.ref.path=REFERENCE",  # other weights than the actor's: a KL other than 0
]
# the reference is the actor as it begins: frozen weights compute the bits of trained ones
OWN_REFERENCE = KL[:2]
# an estimate per token, whitened over the rollout step
REINFORCE = [*KL, "algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.9"]
# replayed samples, with recorded log-probs as old ones, and every reader of old log-probs
REPLAY = [
    "exp_manager.experience_replay.enable=true",
    "algorithm.rollout_correction.rollout_is=token",
    *KL,
]
CORRECTION = "algorithm.rollout_correction"
# responses begun by older weights; whole responses weighed and rejected, by a rank's own work
STALE = ["actor_rollout_ref.rollout.max_staleness=1"]
CORRECTIONS = {
    "weighed": [
        *STALE,
        f"{CORRECTION}.rollout_is=sequence",
        f"{CORRECTION}.rollout_is_threshold=0.001_8.0",
        f"{CORRECTION}.rollout_rs=token_k1",
        f"{CORRECTION}.rollout_rs_threshold=0.5_1.6",
    ],
    "rejected": [
        f"{CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_is_threshold=1.4",
        f"{CORRECTION}.rollout_rs=seq_mean_k1",
        f"{CORRECTION}.rollout_rs_threshold=0.33_3.0",
        f"{CORRECTION}.rollout_token_veto_threshold=0.006",
    ],
    "rejected_k3": [
        f"{CORRECTION}.rollout_rs=seq_mean_k3",
        f"{CORRECTION}.rollout_rs_threshold=1.4",
        "actor_rollout_ref.actor.policy_loss=gspo",
    ],
    "bypass": [*STALE, f"{CORRECTION}.bypass_mode=true"],
}
RECOMPUTE = {
    "recompute_full": ["actor_rollout_ref.actor.megatron.recompute_granularity=full"],
    "recompute_selective": [
        "actor_rollout_ref.actor.megatron.recompute_granularity=selective",
        "actor_rollout_ref.actor.megatron.recompute_modules=[core_attn, mlp]",
    ],
}
# chunks with more layers than others; only the embedding, or only the head. Layout -> of 4 layers
LAYERS = "actor_rollout_ref.actor.megatron.pipeline_layers"
UNEVEN = {
    "pp2": {"uneven": [f"{LAYERS}=[3,1]"], "uneven_recomputed": [f"{LAYERS}=[0,4]", *RECOMPUTE["recompute_full"]]},
    "pp2_vpp2": {"uneven": [f"{LAYERS}=[1,2,1,0]"]},
    "tp2_sp_pp2_vpp2": {"uneven": [f"{LAYERS}=[0,1,2,1]", *DISTRIBUTED_OPTIMIZER]},
    "pp4": {"uneven": [f"{LAYERS}=[0,1,3,0]"]},
}

ONE_OF_A_KIND = ("tp2_sp", "pp2", "dp2")
ALL_KINDS = "tp2_sp_pp2"


def mode(name: str) -> list[str]:
    return [f"actor_rollout_ref.actor.loss_agg_mode={name}"]


def variants(layout: str) -> dict[str, list[str]]:
    """On one process: every mode, cut and estimator. On one layout of each kind: every mode and
    estimator with the cuts of many micro-batches. On one of all kinds at once: every estimator.
    Elsewhere: a mean of means, with weights from all ranks, and one case of every own risk. There
    the cases of the estimator (with gradients) and the sharded optimizer hold the token mean."""
    if layout == "tp1":
        extras = {"kl": KL, "own_reference": OWN_REFERENCE, "reinforce": REINFORCE, "replay": REPLAY}
        extras |= {**CORRECTIONS, **RECOMPUTE, **HEADS}
        product = {f"{m}/{cut}": [*mode(m), *CUTS[cut]] for m in MODES for cut in CUTS}
        return {**product, **{f"{name}/whole": extra for name, extra in extras.items()}}
    if "cp" in layout:
        return context_variants(layout)
    chosen = [("token-mean", "padded"), ("seq-mean-token-mean", "small")]
    other = {"reinforce/small": [*REINFORCE, *CUTS["small"]]}
    if layout in (*ONE_OF_A_KIND, ALL_KINDS):
        cases = {"replay": REPLAY, "kl": KL, **CORRECTIONS}
        other |= {f"{name}/small": [*overrides, *CUTS["small"]] for name, overrides in cases.items()}
    if layout in ONE_OF_A_KIND:
        chosen = [(m, cut) for m in MODES for cut in ("small", "padded")]
        chosen += [("token-mean", "whole"), ("token-mean", "single")]
        other |= {"reinforce/padded": [*REINFORCE, *CUTS["padded"]]}
        other |= {"weighed/padded": [*CORRECTIONS["weighed"], *CUTS["padded"]]}
    modes = {f"{m}/{cut}": [*mode(m), *CUTS[cut]] for m, cut in chosen}
    sharded = {"token-mean/distributed_optimizer": [*DISTRIBUTED_OPTIMIZER, *CUTS["small"]]}
    return {**modes, **sharded, **other, **_extras(layout)}


def context_variants(layout: str) -> dict[str, list[str]]:
    """Only packed: a loss computed by the head itself, with cut tokens, and all that needs whole
    responses. Over four ranks a response is cut into eight."""
    if layout == "cp4":
        return {"kl/small": [*KL, *CUTS["small"]]}
    cases = {"seq-mean-token-mean": mode("seq-mean-token-mean"), "kl": KL}
    if layout == "cp2":
        cases |= {**CORRECTIONS, "reinforce": REINFORCE, "replay": REPLAY}
        cases |= {"recompute_selective": RECOMPUTE["recompute_selective"], "composed": HEADS["composed"]}
    elif layout == "tp2_sp_cp2":
        cases |= {"rejected_k3": CORRECTIONS["rejected_k3"], "chunks": HEADS["chunks"]}
    sharded = {"token-mean/distributed_optimizer": [*DISTRIBUTED_OPTIMIZER, *CUTS["small"]]}
    return {f"{name}/small": [*overrides, *CUTS["small"]] for name, overrides in cases.items()} | sharded


def _extras(layout: str) -> dict[str, list[str]]:
    chosen = {
        "tp2": {"own_reference": OWN_REFERENCE},
        "tp2_sp": {**RECOMPUTE, **HEADS},
        "pp2": {**RECOMPUTE, **HEADS},
        "tp4_sp": HEADS,
        "tp2_sp_dp2": OVERLAP,
    }
    extras = {**chosen.get(layout, {}), **(OVERLAP if layout in ("dp2", "pp2_dp2") else {}), **UNEVEN.get(layout, {})}
    return {f"{name}/small": [*extra, *CUTS["small"]] for name, extra in extras.items()}


DENSE = in_short(by_world_size(LAYOUTS, WORLD_SIZES, variants))


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    """ "layout/variant" -> the run's results, for all layouts."""
    folder = tmp_path_factory.mktemp("layouts")
    # 4 KV heads for TP4, 4 layers for PP4, an odd vocabulary so that some rank cuts its padding off
    model = make_tiny(folder / "model", "qwen3", vocab=67, layers=4, hidden=32, heads=8, kv_heads=4)
    reference = make_tiny(folder / "reference", "qwen3", seed=1, vocab=67, layers=4, hidden=32, heads=8, kv_heads=4)
    return run_layouts(folder, model, DENSE, reference, overrides=HALF_A_STEP)


TIED_LAYOUTS = ("tp1", "tp2_sp", "pp2", "dp2")
HALF_PRECISION = ["actor_rollout_ref.actor.megatron.dtype=bfloat16", *DISTRIBUTED_OPTIMIZER]


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> dict[str, dict]:
    """As `results`, of a tied model: on two stages its embedding and head are two copies."""
    folder = tmp_path_factory.mktemp("tied")
    model = make_tiny(folder / "model", "qwen2", vocab=67, layers=2, hidden=32, heads=4, kv_heads=2, tied=True)
    one = {"whole": [], **HEADS, "bfloat16": HALF_PRECISION}
    several = {"small": CUTS["small"], **HEADS, "bfloat16": HALF_PRECISION}
    of_layout = {"tp1": one, "pp2": {**several, "uneven": [f"{LAYERS}=[2,0]"]}}
    chosen = {name: LAYOUTS[name] for name in TIED_LAYOUTS}
    layouts = by_world_size(chosen, WORLD_SIZES, lambda name: of_layout.get(name, several))
    return run_layouts(folder, model, layouts, overrides=HALF_A_STEP)


# 2 or 4 processes: the rest of the ranks are data parallelism
MIXTURE_LAYOUTS = {
    "tp1": {},
    "tp2_sp": {"tp": 2, "sp": True},  # the experts of both ranks are the same
    "tp2_sp_ep2": {"tp": 2, "sp": True, "ep": 2},
    "dp2_ep2": {"ep": 2},
    "cp2_ep2": {"cp": 2, "ep": 2},
    "tp2_sp_etp2": {"tp": 2, "sp": True, "etp": 2},
    "cp2_etp2": {"cp": 2, "etp": 2},  # an expert is cut over ranks with parts of the same samples
    "tp2_sp_dp2_ep2": {"tp": 2, "sp": True, "ep": 2},
    "tp2_sp_dp2_ep4": {"tp": 2, "sp": True, "ep": 4},
    "pp2_dp2_ep2": {"pp": 2, "ep": 2},
    "tp2_sp_dp2_ep2_etp2": {"tp": 2, "sp": True, "ep": 2, "etp": 2},
    "dp4_ep2_etp2": {"ep": 2, "etp": 2},  # an expert is cut over ranks with other samples
    "cp2_dp2_ep2_etp2": {"cp": 2, "ep": 2, "etp": 2},
}
MIXTURE_VARIANTS = {
    "small": CUTS["small"],
    "padded": CUTS["padded"],
    "distributed_optimizer": [*DISTRIBUTED_OPTIMIZER, *CUTS["small"]],
}
OVERLAPPED = {"overlap": [*OVERLAP["overlap"], *CUTS["small"]]}
RECOMPUTED = {"recompute_selective": RECOMPUTE["recompute_selective"]}
MIXTURE_EXTRAS = {  # the reduction of experts and of the rest, in groups of their own; experts here and elsewhere
    "tp1": RECOMPUTED,
    "tp2_sp_ep2": RECOMPUTED,
    "dp2_ep2": OVERLAPPED | RECOMPUTED,
    "tp2_sp_dp2_ep2": OVERLAPPED,
    "pp2_dp2_ep2": OVERLAPPED | RECOMPUTED | {"uneven": [f"{LAYERS}=[0,2]", *DISTRIBUTED_OPTIMIZER]},
}


def mixture_variants(layout: str) -> dict[str, list[str]]:
    if layout == "cp2_ep2":
        return {"distributed_optimizer": MIXTURE_VARIANTS["distributed_optimizer"], "small": CUTS["small"]}
    if layout in ("cp2_etp2", "dp4_ep2_etp2", "cp2_dp2_ep2_etp2"):
        return {"small": CUTS["small"]}
    return MIXTURE_VARIANTS | MIXTURE_EXTRAS.get(layout, {})


MIXTURE_WORLD_SIZES = {n: 1 if n == "tp1" else 2 if n in list(MIXTURE_LAYOUTS)[1:7] else 4 for n in MIXTURE_LAYOUTS}
MIXTURE = in_short(by_world_size(MIXTURE_LAYOUTS, MIXTURE_WORLD_SIZES, mixture_variants))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> dict[str, dict]:
    """As `results`, of a mixture of experts."""
    folder = tmp_path_factory.mktemp("mixture")
    model = make_tiny(folder / "model", "qwen3_moe", vocab=67, layers=2, hidden=32, heads=4, kv_heads=2)
    sizes, cases = MIXTURE[1]["tp1"]
    return run_layouts(folder, model, {**MIXTURE, 1: {"tp1": (sizes, {**cases, "whole": []})}}, overrides=HALF_A_STEP)


# families with layers of several kinds, in one start; the other ranks are data parallelism
FAMILIES = own_layers(is_mixture=False)
FAMILY_LAYOUTS = {"tp1": {}, "tp2": {"tp": 2}, "tp2_sp": {"tp": 2, "sp": True}, "pp2": {"pp": 2}, "cp2": {"cp": 2}}


def family_variants(layout: str, family: str) -> dict[str, list[str]]:
    small = {"small": CUTS["small"]}
    if layout == "tp2":  # a weight that is whole beside heads that are cut; float32 beside half precision
        return small | {"bfloat16": HALF_PRECISION} if family == "qwen3_5" else {}
    if layout == "cp2":
        return small
    extra = {"tp1": {"whole": [], **RECOMPUTED}, "tp2_sp": {"sharded": [*DISTRIBUTED_OPTIMIZER, *CUTS["small"]]}}
    return small | {"padded": CUTS["padded"]} | extra.get(layout, {})


def variants_of_families(layout: str) -> dict[str, list[str]]:
    return {
        f"{family}/{name}": [f"actor_rollout_ref.model.path=OTHER({family})", *overrides]
        for family in FAMILIES
        for name, overrides in family_variants(layout, family).items()
    }


FAMILY_SIZES = {name: 1 if name == "tp1" else 2 for name in FAMILY_LAYOUTS}
FAMILY_RUNS = in_short(by_world_size(FAMILY_LAYOUTS, FAMILY_SIZES, variants_of_families))
FAMILY_CASES = cases_of(FAMILY_RUNS)


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> dict[str, dict]:
    """As `results`, under "layout/family/variant"."""
    folder = tmp_path_factory.mktemp("families")
    shape = dict(vocab=67, layers=2, hidden=32, heads=4, kv_heads=2)
    models = {family: make_tiny(folder / family, family, **shape) for family in FAMILIES}
    return run_layouts(folder, folder / FAMILIES[0], FAMILY_RUNS, others=models, overrides=HALF_A_STEP)


# the last two have layers of others: Qwen3-Next's, and DeepSeek-V3's before GLM-4.5's experts
OTHERS = (*own_layers(is_mixture=True), *(["qwen3_5_moe", "glm4_moe_lite"] if PROOFS else []))
with_them = partial(with_others, OTHERS)
SMALL = {"small": CUTS["small"]}
TP_EP, PP_EP = {"tp": 2, "sp": True, "ep": 2}, {"pp": 2, "ep": 2}
SHARED_LAYOUTS: Layouts = {
    1: {"tp1": ({}, with_them({"whole": [], "bfloat16": HALF_PRECISION, **RECOMPUTED}))},
    2: {
        "tp2_sp_ep2": (TP_EP, with_them(SMALL | RECOMPUTED)),
        "pp2": ({"pp": 2}, with_them({"uneven": [f"{LAYERS}=[1,2]", *CUTS["small"]]})),
        "cp2_ep2": ({"cp": 2, "ep": 2}, with_them(SMALL)),
    },
    4: {
        "tp2_sp_dp2_ep2": (TP_EP, with_them({"sharded": MIXTURE_VARIANTS["distributed_optimizer"]})),
        "tp2_sp_dp2_ep2_etp2": (TP_EP | {"etp": 2}, SMALL),
        "tp2_sp_cp2_ep2": (TP_EP | {"cp": 2}, with_them(SMALL)),
        "pp2_dp2_ep2": (PP_EP, with_them({"padded": CUTS["padded"]}) | {"uneven": [f"{LAYERS}=[0,3]"]}),
    },
}
SHARED = in_short(SHARED_LAYOUTS)


@pytest.fixture(scope="module")
def shared_mixture(tmp_path_factory) -> dict[str, dict]:
    """As `results`, of a GLM-4.5, and of the others under their names."""
    folder = tmp_path_factory.mktemp("shared_mixture")
    shape = dict(vocab=67, layers=3, hidden=32, heads=4, kv_heads=2)
    seeds = {"qwen3_5_moe": 0}  # of 1, one rounding of each weight changes a gradient's norm by 5e-5
    models = {name: make_tiny(folder / name, name, seed=seeds.get(name, 1), **shape) for name in ("glm4_moe", *OTHERS)}
    return run_layouts(folder, models["glm4_moe"], SHARED, others=models, overrides=HALF_A_STEP)


SHARED_CASES = cases_of(SHARED)
MIXTURE_CASES = cases_of(MIXTURE)
ALL_CASES = cases_of(DENSE)

# each case with its base
OF_TOKEN_MEAN = dict.fromkeys((*RECOMPUTE, *HEADS, *OVERLAP, *UNEVEN["pp2"]), "token-mean")
WHOLE = {case: f"tp1/{OF_TOKEN_MEAN.get(kind := case.split('/')[1], kind)}/whole" for case in ALL_CASES}


@pytest.mark.parametrize("case", [case for case in ALL_CASES if case != WHOLE[case]])
def test_loss_metrics_gradients_and_weights_are_those_of_one_process(results, case):
    assert_same(results[case], results[WHOLE[case]])


@pytest.mark.parametrize(
    "case",
    ["tp1/composed", "tp1/chunks"]
    + [f"{layout}/{variant}" for layout in ("tp2_sp", "pp2") for variant in ("small", "chunks", "composed")]
    + ["pp2/uneven"],
)
def test_a_tied_model_gets_the_gradients_of_both_uses_of_its_weight(tied, case):
    assert_same(tied[case], tied["tp1/whole"])


@pytest.mark.parametrize("case", MIXTURE_CASES)
def test_a_mixture_of_experts_gets_the_gradients_of_all_tokens_wherever_its_experts_are(mixture, case):
    assert_same(mixture[case], mixture["tp1/whole"])
    assert mixture[case]["first"]["actor/ratio_max"] == 1.0  # the policy is the old policy, to the bit
    metrics = mixture[case]["metrics"]
    assert metrics["actor/expert_load_max"] > 1.0 > metrics["actor/expert_load_entropy"] > 0.0
    assert metrics["actor/expert_dropped"] == 0.0


@pytest.mark.parametrize("case", [case for case in FAMILY_CASES if "bfloat16" not in case])
def test_layers_of_other_families_give_the_same_in_every_layout(families, case):
    family = case.split("/")[1]
    assert_same_as(families, case, f"tp1/{family}/whole")
    assert families[case]["first"]["actor/ratio_max"] == 1.0


@pytest.mark.parametrize("case", [case for case in SHARED_CASES if "bfloat16" not in case])
def test_dense_layers_and_shared_experts_get_the_gradients_of_one_process_and_biases_stay(shared_mixture, case):
    name = next((f"{other}_whole" for other in OTHERS if other in case), "whole")
    assert_same_as(shared_mixture, case, f"tp1/{name}")
    assert shared_mixture[case]["first"]["actor/ratio_max"] == 1.0


@pytest.mark.parametrize("case", MIXTURE_CASES)
def test_one_expert_with_a_gradient_that_is_not_finite_stops_all_ranks(mixture, case):
    errors = mixture[case]["errors"]
    assert len(errors) == MIXTURE_WORLD_SIZES[case.partition("/")[0]]
    assert all("gradient norm of a mini-batch is nan" in error for error in errors), errors


def test_the_memory_estimate_counts_weights_gradients_and_optimizer_state_exactly(
    results, tied, mixture, families, shared_mixture
):
    """Of each rank; the optimizer's state over a stage's ranks, which need not share it evenly."""
    every = (results, tied, mixture, families, shared_mixture)
    cases = [(name, case["states"]) for by_layout in every for name, case in by_layout.items()]
    assert any("bfloat16" in name for name, _ in cases) and any("distributed_optimizer" in name for name, _ in cases)
    for name, ranks in cases:
        for _, counted, estimated in ranks:
            for part in ("weights", "gradients"):
                assert counted[part] == estimated[part] > 0, (name, part)
        for stage in {stage for stage, _, _ in ranks}:
            counted = sum(states["optimizer"] for at, states, _ in ranks if at == stage)
            estimated = sum(states["optimizer"] for at, _, states in ranks if at == stage)
            assert 0 <= estimated - counted <= 2 * len(ranks), name  # each rank's average is rounded up


@pytest.mark.parametrize("case", [case for case in ALL_CASES if case.split("/")[1] in ("kl", "reinforce")])
def test_advantages_after_the_models_are_those_of_one_process(results, case):
    """KL in the reward, whitening over all ranks: each sample's advantages, token by token."""
    expected = results[f"tp1/{case.split('/')[1]}/whole"]["estimates"]
    got = results[case]["estimates"]
    assert got.keys() == expected.keys() and len(expected) == (16 if "kl" in case else 32)
    for name, values in expected.items():
        assert torch.allclose(got[name], values, rtol=1e-5, atol=1e-5), name
    assert abs(results[case]["metrics"]["actor/reward_kl_penalty"]) > 1e-3


@pytest.mark.parametrize("case", [case for case in ALL_CASES if case.split("/")[1] in ("kl", "reinforce")])
def test_what_is_kept_of_tokens_for_people_is_that_of_one_process(results, case):
    """Each rank of the last stage knows its samples' advantages and log-probs, and tells rank 0."""
    expected = results[f"tp1/{case.split('/')[1]}/whole"]["dump"]
    got = results[case]["dump"]
    assert len(expected["lengths"]) == 3 * 4 and expected["advantages"].isfinite().sum() > 50
    for name, values in expected.items():
        if name in ("advantages", "log_prob_diffs"):  # in float16: two roundings of 2^-11
            assert torch.allclose(got[name].float(), values.float(), rtol=2**-10, atol=1e-5, equal_nan=True), name
        else:
            assert torch.equal(got[name], values), name


def test_the_cuts_are_really_different(results):
    """Otherwise the comparison above would compare a thing with itself."""
    counts = {cut: results[f"tp1/token-mean/{cut}"]["num_micro_batches"] for cut in CUTS}
    assert sum(counts["whole"]) == 2 and sum(counts["single"]) > sum(counts["small"]) > 4, counts
    modes = {results[f"tp1/{m}/whole"]["metrics"]["actor/grad_norm"] for m in MODES}
    assert len(modes) == len(MODES)


def test_overlapped_gradients_and_weights_go_in_several_buckets(results):
    """Otherwise nothing would be asked for while a layer computes."""
    overlapped = [case for case in ALL_CASES if case.split("/")[1] in OVERLAP]
    assert overlapped and all(results[case]["num_buckets"] >= 4 for case in overlapped)


def test_replayed_tokens_are_counted_and_compared_with_the_policy_that_wrote_them(results):
    """By hand: the first sample of every other group has ratios other than 1, the others have 1."""
    metrics, first = (results["tp1/replay/whole"][name] for name in ("metrics", "first"))
    groups = with_replayed(synthetic_groups(67, num_groups=4))
    counts = [(sample.num_written_tokens, sample.exp_mask) for group in groups for sample in group.samples]
    share = sum(tokens for tokens, replayed in counts if replayed) / sum(tokens for tokens, _ in counts)
    assert metrics["exp_mask_ratio"] == pytest.approx(share)
    assert first["actor/on_pg_clipfrac"] == first["actor/on_pg_clipfrac_lower"] == 0.0
    assert first["actor/ratio_max"] > 1.01 and first["actor/off_pg_loss"] != 0.0


@pytest.mark.parametrize("case", ["tp1/own_reference/whole", "tp2/own_reference/small"])
def test_a_frozen_reference_has_the_log_probs_of_the_actor_to_the_bit(results, case):
    """TP without sequence parallelism: Megatron's first product takes the embedding's output."""
    assert results[case]["first"]["actor/kl_loss"] == 0.0 < results[case]["metrics"]["actor/kl_loss"]


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_corrections_correct_some_tokens_and_not_all(results, name):
    metrics = results[f"tp1/{name}/whole"]["metrics"]
    shares = [value for key, value in metrics.items() if key.endswith(("_masked", "is_truncated"))]
    assert len(shares) == {"weighed": 3, "rejected": 3, "rejected_k3": 2, "bypass": 0}[name]
    assert all(0 < share < 1 for share in shares) and ("actor/rollout_ess_stale" in metrics) == (
        "max_staleness" in CORRECTIONS[name][0]
    )


CUT_BY_SIZE = [case for case in ALL_CASES if case.endswith(("/small", "/whole"))]


@pytest.mark.parametrize("case", [case for case in CUT_BY_SIZE if case.split("/")[1] not in ("replay", "bypass")])
def test_at_the_first_optimizer_step_the_policy_is_the_old_policy(results, case):
    """Exactly: old log-probs come from the same micro-batches, so not even the rounding differs."""
    first = results[case]["first"]
    assert first["actor/ratio_mean"] == first["actor/ratio_max"] == 1.0
    assert first["actor/ppo_kl"] == first["actor/on_pg_clipfrac"] == first["actor/on_pg_clipfrac_lower"] == 0.0
