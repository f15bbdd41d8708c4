"""The Megatron model is the Hugging Face model: log-probs at every family and layout,
tensors out."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.parity_worker import BUCKET_BYTES
from tests.families import FAMILIES, ROUNDINGS, TinyFamily, as_served, parity_models
from tests.forked_ranks import run_ranks
from tests.proofs import PROOFS, covering
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.distributed

MODELS = parity_models(is_mixture=False)
MIXTURES = parity_models(is_mixture=True)
UNEVEN = {"pp": 2, "vpp": 2, "pipeline_layers": [0, 2, 1, 1]}
LAYOUTS = {
    1: {"tp1": {}},
    2: {
        "tp2": {"tp": 2},
        "tp2_sp": {"tp": 2, "sp": True},
        "pp2": {"pp": 2},
        "pp2_vpp2_uneven": UNEVEN,
        "cp2": {"cp": 2},
    },
    4: {"tp2_pp2": {"tp": 2, "pp": 2}, "tp2_sp_pp2": {"tp": 2, "sp": True, "pp": 2}},
}
# the ranks beside tensor and expert parallelism are data parallelism:
# every such rank has the same sequences here
MIXTURE_LAYOUTS = {
    1: {"tp1": {}},
    2: {
        "tp2_sp": {"tp": 2, "sp": True},
        "tp2_sp_ep2": {"tp": 2, "sp": True, "ep": 2},
        "dp2_ep2": {"ep": 2},
        "tp2_sp_etp2": {"tp": 2, "sp": True, "etp": 2},
        "pp2_vpp2_uneven": UNEVEN,
        "cp2_ep2": {"cp": 2, "ep": 2},
    },
    4: {
        "tp2_sp_dp2_ep2": {"tp": 2, "sp": True, "ep": 2},
        "tp2_sp_dp2_ep4": {"tp": 2, "sp": True, "ep": 4},
        "tp2_sp_dp2_ep2_etp2": {"tp": 2, "sp": True, "ep": 2, "etp": 2},
        "dp4_etp2": {"etp": 2},
        "tp2_sp_pp2_ep2": {"tp": 2, "sp": True, "pp": 2, "ep": 2},
        "pp2_dp2_ep2": {"pp": 2, "ep": 2},
    },
}


def has_layout(model: str, sizes: dict) -> bool:
    """Megatron-core cuts no experts with biases. Kimi-K2 has DeepSeek-V3's layers, and one process
    shows its settings."""
    return (family_of(model).cuts_experts or "etp" not in sizes) and (PROOFS or model != "kimi_k2" or not sizes)


def family_of(model: str) -> TinyFamily:
    return FAMILIES[(MODELS | MIXTURES)[model]["family"]]


PAIRS = [
    f"{layout}/{model}"
    for models, layouts_of in ((MODELS, LAYOUTS), (MIXTURES, MIXTURE_LAYOUTS))
    for layouts in layouts_of.values()
    for layout, sizes in layouts.items()
    for model in models
    if has_layout(model, sizes)
]
CASES = [f"{model}/{layout}" for layout, _, model in (pair.partition("/") for pair in covering(PAIRS))]


def hugging_face_log_probs(
    path: Path, sequences: list[list[int]], dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """Of transformers."""
    from transformers import AutoModelForCausalLM

    how = dict(attn_implementation="eager", experts_implementation="eager")
    model = as_served(AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **how).eval())
    answers = []
    with torch.no_grad():
        for tokens in sequences:
            ids = torch.tensor([tokens])
            log_p = torch.log_softmax(model(ids).logits[0], -1)
            answers.append(log_p[:-1].gather(1, ids[0, 1:, None])[:, 0])
    return answers


def rounding(exact: list[torch.Tensor], path: Path, sequences: list[list[int]]) -> float:
    """By how much transformers is off in float32."""
    rounded = hugging_face_log_probs(path, sequences, torch.float32)
    return (torch.cat(rounded).double() - torch.cat(exact)).abs().max().item()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(results by "model/layout/packing", oracle by model, folder of checkpoints and exports,
    error by model)."""
    folder = tmp_path_factory.mktemp("parity")
    models = MODELS | MIXTURES
    paths = {name: make_tiny(folder / name, layers=4, hidden=64, **options) for name, options in models.items()}
    rng = random.Random(0)
    sequences = [[rng.randrange(128) for _ in range(length)] for length in (13, 40, 2, 60, 24, 7)]
    results = {}
    for world in LAYOUTS:
        task = folder / f"task{world}.json"
        layouts = [
            (layout, sizes, {name: str(paths[name]) for name in names if f"{name}/{layout}" in CASES})
            for names, layouts_of in ((MODELS, LAYOUTS), (MIXTURES, MIXTURE_LAYOUTS))
            for layout, sizes in layouts_of[world].items()
        ]
        task.write_text(json.dumps({"layouts": layouts, "sequences": sequences, "out": str(folder)}))
        run_ranks(Path(__file__).with_name("parity_worker.py"), world, str(task))
        results.update(torch.load(folder / f"log_probs{world}.pt"))
    oracle = {name: hugging_face_log_probs(path, sequences) for name, path in paths.items()}
    errors = {
        name: family_of(name).error or ROUNDINGS * rounding(oracle[name], path, sequences)
        for name, path in paths.items()
    }
    return results, oracle, folder, errors


@pytest.mark.parametrize(
    ("case", "packing"),
    [
        (case, packing)
        for case in CASES
        for packing in ("packed", "padded")
        if (packing, "/cp2" in case) != ("padded", True)
    ],
)
def test_log_probs_equal_those_of_transformers(runs, case, packing):
    results, oracle, _, errors = runs
    got, model = results[f"{case}/{packing}"], case.partition("/")[0]
    assert sorted(got) == list(range(len(oracle[model])))
    for index, expected in enumerate(oracle[model]):
        # log-probs of these random models reach -20: float32 logits of that size are right to one
        # part in a million
        torch.testing.assert_close(got[index].double(), expected, rtol=1e-6, atol=errors[model])


@pytest.mark.parametrize("case", CASES)
def test_export_gives_back_the_checkpoint_bit_for_bit(runs, case):
    (model, layout), folder = case.split("/"), runs[2]
    original = load_file(folder / model / "model.safetensors")
    exported = folder / f"{model}-{layout}"
    tensors = load_file(exported / "model.safetensors")  # one file at every layout
    assert tensors.keys() == original.keys()
    for name, tensor in original.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name
    assert (exported / "config.json").read_text() == (folder / model / "config.json").read_text()


# a stage of an uneven split may have one layer, a large part of a bucket
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.partition("/")[0] in MIXTURES and not case.endswith("uneven")]
)
def test_gathering_a_bucket_takes_its_slices_and_the_bucket_on_any_rank(runs, case):
    """And, for a moment, one parameter's parts: never a whole layer's experts, much less the
    model's. Servers take gpt-oss's experts in stacks of a layer, which are larger than a bucket."""
    assert runs[0][f"{case}/peaks"]
    for peak, largest, whole in runs[0][f"{case}/peaks"]:
        bound = 2 * max(BUCKET_BYTES, largest) + largest
        assert peak <= bound
        assert bound < whole / 3 if case.partition("/")[0] != "gpt_oss" else BUCKET_BYTES < largest


@pytest.mark.parametrize("scaled", ["llama3_rope", "mistral_yarn"])
def test_scaled_frequencies_change_the_answers(runs, scaled):
    """Otherwise the parity of the scaled model would show nothing.
    Both have the parameters of `llama`."""
    _, oracle, *_ = runs
    assert max((a - b).abs().max() for a, b in zip(oracle["llama"], oracle[scaled], strict=True)) > 1e-4
