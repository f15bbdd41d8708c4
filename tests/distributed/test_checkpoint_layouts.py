"""A checkpoint continues the run: bit for bit in its own layout, to rounding in every other.

Each start goes through the cases of one number of processes in turn; later ones load earlier saves.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from megatron_dapo.checkpointing.manifest import write_manifest
from tests.distributed.checkpoint_worker import MOMENTS
from tests.forked_ranks import run_ranks
from tests.proofs import PROOFS
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.distributed

# name: (processes, sizes, sharded optimizer); a vocabulary of 67 is padded with TP 2
WRITERS = {"tp2": (2, {"tp": 2}, False), "tp2_cp2": (4, {"tp": 2, "sp": True, "cp": 2}, True)}
READERS = {
    "pp2": (2, {"pp": 2}, False),
    "pp2_vpp2_uneven": (2, {"pp": 2, "vpp": 2, "pipeline_layers": [0, 3, 1, 0]}, True),
    "pp2_dp2": (4, {"pp": 2}, True),
    "tp2_pp2": (4, {"tp": 2, "sp": True, "pp": 2}, False),
    "cp2_dp2": (4, {"cp": 2}, True),  # to a checkpoint the same as DP 4
    "tp1": (1, {}, False),
}
# of a mixture of experts behind a dense layer: spread over tensor-parallel ranks, over these and
# data-parallel ones, on every rank, or cut
MIXTURE_WRITERS = {
    "moe_tp2_ep2": (2, {"tp": 2, "sp": True, "ep": 2}, False),
    "moe_dp2": (2, {}, False),
    "moe_tp2_etp2": (2, {"tp": 2, "sp": True, "etp": 2}, True),
    "moe_tp2_dp2_ep2": (4, {"tp": 2, "sp": True, "ep": 2}, True),
    "moe_dp4_ep2_etp2": (4, {"ep": 2, "etp": 2}, False),
}
MOE_READERS = {
    "pp2_uneven": (2, {"pp": 2, "pipeline_layers": [2, 0]}, False),
    "dp2_ep2": (2, {"ep": 2}, True),
    "tp2": (2, {"tp": 2, "sp": True}, True),
    "dp4_ep4": (4, {"ep": 4}, False),
    "dp4_ep2_etp2": (4, {"ep": 2, "etp": 2}, True),
    "tp1": (1, {}, False),
}
# of gpt-oss: sinks, and experts with biases
BIASED_WRITERS = {"biased_tp2_ep2": (2, {"tp": 2, "sp": True, "ep": 2}, True)}
BIASED_READERS = {"dp2_ep2": (2, {"ep": 2}, False), "pp2": (2, {"pp": 2}, True), "tp1": (1, {}, False)}
# of adapters: a checkpoint holds nothing else
LORA_WRITERS = {"lora_tp2": (2, {"tp": 2, "sp": True}, True)}
LORA_READERS = {"pp2": (2, {"pp": 2}, False), "tp1": (1, {}, True)}
LORA_MIXTURE_WRITERS = {"lora_moe_tp2_etp2": (2, {"tp": 2, "sp": True, "etp": 2}, True)}
LORA_MIXTURE_READERS = {
    "dp2_ep2": (2, {"ep": 2}, False),
    "dp4_ep2_etp2": (4, {"ep": 2, "etp": 2}, True),
    "tp1": (1, {}, True),
}
# the layouts in which two steps, a checkpoint and two steps must equal four steps
SAME = {
    "tp1": (1, {}, False),
    "pp2_vpp2_uneven": (2, {"pp": 2, "vpp": 2, "pipeline_layers": [2, 1, 1, 0]}, True),
    "tp2_dp2": (4, {"tp": 2, "sp": True}, True),
    "dp2_half": (2, {}, True),
    "moe_dp2_ep2": (2, {"ep": 2}, True),
    "lora_dp2_half": (2, {}, True),
}
# there also from a checkpoint that was not written in the background
SAVED_AT_ONCE = ("tp1", "dp2_half")
STEPS, END = 2, 4


def is_moe(name: str) -> bool:
    return "moe" in name


def is_lora(name: str) -> bool:
    return name.startswith("lora")


def adapters(name: str) -> list[str]:
    """The overrides of a run of this name."""
    return ["actor_rollout_ref.model.lora_rank=2"] if is_lora(name) else []


def kind_of(name: str, weights: str = "start") -> str:
    """The model of a writer's checkpoint. weights: "start", or "other" values,
    which loading must overwrite."""
    if is_lora(name):
        return "moe" if is_moe(name) else "start"  # weights that are in no checkpoint
    if name.startswith("biased"):
        return {"start": "biased", "other": "other_biased"}[weights]
    return {"start": "moe", "other": "other_moe"}[weights] if is_moe(name) else weights


# files of a number of processes can be read by the same number, and by later ones; see `results`
READ_BY = (
    (WRITERS, READERS),
    (MIXTURE_WRITERS, MOE_READERS),
    (BIASED_WRITERS, BIASED_READERS),
    (LORA_WRITERS, LORA_READERS),
    (LORA_MIXTURE_WRITERS, LORA_MIXTURE_READERS),
)
ALL_WRITERS = {name: case for writers, _ in READ_BY for name, case in writers.items()}
READERS_OF = {name: readers for writers, readers in READ_BY for name in writers}
# every writer is read by each third reader; by all of them where it is alone, and in proofs
PAIRS = [
    (writer, reader)
    for writers, readers in READ_BY
    for column, (reader, (to_read, *_)) in enumerate(readers.items())
    for row, (writer, (to_write, *_)) in enumerate(writers.items())
    if (to_write, to_read) != (4, 2) and (PROOFS or len(writers) == 1 or (row + column) % 3 == 0)
]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    """Name of a case -> its results."""
    folder = tmp_path_factory.mktemp("checkpoints")
    shape = dict(vocab=67, layers=4, hidden=32, heads=4, kv_heads=2)
    mixture = dict(shape, layers=2, num_experts=4)
    models = {
        "start": make_tiny(folder / "start", "qwen2", **shape),
        # values outside the load stay
        "other": make_tiny(folder / "other", "qwen2", seed=5, **shape),
        "tied": make_tiny(folder / "tied", "qwen2", tied=True, **shape),
        "other_tied": make_tiny(folder / "other_tied", "qwen2", tied=True, seed=5, **shape),
        "longer": make_tiny(folder / "longer", "qwen2", **{**shape, "layers": 6}),
        "wider": make_tiny(folder / "wider", "qwen2", **{**shape, "vocab": 70}),
        "plain": make_tiny(folder / "plain", "llama", **shape),
        "moe": make_tiny(folder / "moe", "glm4_moe", **mixture),
        "other_moe": make_tiny(folder / "other_moe", "glm4_moe", seed=5, **mixture),
        "biased": make_tiny(folder / "biased", "gpt_oss", **mixture),
        "other_biased": make_tiny(folder / "other_biased", "gpt_oss", seed=5, **mixture),
        "fewer_experts": make_tiny(folder / "fewer_experts", "glm4_moe", **{**mixture, "num_experts": 2}),
    }
    by_layout: dict[str, dict] = {}
    for world in (2, 4, 1):
        if world == 1:
            damage(folder)
        out, task = folder / f"results{world}.pt", folder / f"task{world}.json"
        cases = [{**case, "model": str(models[case["model"]])} for case in cases_of(world, folder)]
        task.write_text(json.dumps({"out": str(out), "cases": cases}))
        run_ranks(Path(__file__).with_name("checkpoint_worker.py"), world, str(task))
        by_layout.update(torch.load(out, weights_only=False))
    return by_layout


def cases_of(world: int, folder: Path) -> list[dict]:
    """In an order with each save before its loads."""
    cases = []
    for name, (processes, sizes, sharded) in ALL_WRITERS.items():
        case = dict(sizes=sizes, sharded=sharded, steps=(0, STEPS), more=STEPS + 1, model=kind_of(name))
        case["overrides"] = adapters(name)
        if processes == world:
            cases.append(dict(case, name=f"write/{name}", save=str(folder / f"from_{name}")))
    if world == 2:
        tied = dict(sizes={"tp": 2}, steps=(0, STEPS), more=STEPS + 1, save=str(folder / "tied_ckpt"))
        cases.append(dict(tied, name="write/tied", model="tied"))
        cases.append(dict(name="verified", model="start", sizes={}, verify=str(damaged_files(folder / "damaged"))))
        read = dict(sizes={"pp": 2}, steps=(STEPS, STEPS), more=STEPS + 1, load=str(folder / "tied_ckpt"))
        cases.append(dict(read, name="read/tied/pp2", model="other_tied"))
        cases.append(dict(name="failed", model="start", sizes={}, save=str(folder / "failed"), failing_rank=1))
    for writer, reader in PAIRS:
        processes, sizes, sharded = READERS_OF[writer][reader]
        if processes == world:
            case = dict(sizes=sizes, sharded=sharded, steps=(STEPS, STEPS), more=STEPS + 1)
            case |= dict(model=kind_of(writer, "other"), load=str(folder / f"from_{writer}"))
            case["overrides"] = adapters(writer)
            cases.append(dict(case, name=f"read/{writer}/{reader}"))
    for name, (processes, sizes, sharded) in SAME.items():
        if processes == world:
            cases += continuation(name, sizes, sharded, folder)
    if world == 2:
        half = dict(sizes={"tp": 2}, dtype="bfloat16", load=str(folder / "same_dp2_half_blocking"))
        cases.append(dict(half, name="read/half/tp2", model="other"))
        even = dict(sizes={"pp": 2}, load=str(folder / "same_pp2_vpp2_uneven_blocking"))
        cases.append(dict(even, name="read/uneven/pp2", model="other"))
    return cases + (refusals(folder) if world == 1 else [])


def continuation(name: str, sizes: dict, sharded: bool, folder: Path) -> list[dict]:
    """Four steps; four with a save after two, while training goes on;
    two from that checkpoint."""
    case = dict(sizes=sizes, sharded=sharded, dtype="bfloat16" if "half" in name else "float32")
    through = dict(case, steps=(0, STEPS), more=END, model=kind_of(name), overrides=adapters(name))
    saved = str(folder / f"same_{name}")
    resumed = dict(case, name=f"resumed/{name}", load=saved, steps=(STEPS, STEPS), more=END)
    resumed |= dict(model=kind_of(name, "other"), overrides=adapters(name))
    cases = [
        dict(through, name=f"blocking/{name}", save=f"{saved}_blocking"),
        dict(through, name=f"background/{name}", save=saved, background=True),
        resumed,
    ]
    if name in SAVED_AT_ONCE:
        cases.append(dict(resumed, name=f"resumed_blocking/{name}", load=f"{saved}_blocking"))
    return cases


NUM_FILES, CUT, FLIPPED, GONE = 12, 3, (4, 5), 7


def damaged_files(folder: Path) -> Path:
    folder.mkdir()
    for number in range(NUM_FILES):
        (folder / f"file{number:02}").write_bytes(bytes([number]) * (100 + number))
    write_manifest(folder, ["model"])
    os.truncate(folder / f"file{CUT:02}", 50)
    (folder / f"file{GONE:02}").unlink()
    for number in FLIPPED:
        with (folder / f"file{number:02}").open("r+b") as file:
            file.write(b"x")
    return folder


def damage(folder: Path) -> None:
    for name, file in (("cut_tensors", "__0_0.distcp"), ("cut_index", ".metadata")):
        path = shutil.copytree(folder / "from_tp2", folder / name) / file
        os.truncate(path, path.stat().st_size // 2)


def refusals(folder: Path) -> list[dict]:
    whole, weights = str(folder / "from_tp2"), str(folder / "weights")
    return [
        dict(name="stock", model="start", sizes={}, stock=True, load=str(folder / "from_tp2_cp2")),
        dict(name="weights/write", model="start", sizes={}, steps=(0, 1), save=weights, weights_only=True),
        dict(name="weights/read", model="other", sizes={}, load=weights, weights_only=True),
        dict(name="weights/of_training", model="other", sizes={}, load=whole, weights_only=True),
        dict(name="refused/no_optimizer", model="other", sizes={}, load=weights),
        dict(name="refused/longer", model="longer", sizes={}, load=whole),
        dict(name="refused/wider", model="wider", sizes={}, load=whole),
        dict(name="refused/no_bias", model="plain", sizes={}, load=whole),
        dict(name="refused/experts", model="fewer_experts", sizes={}, load=str(folder / "from_moe_tp2_ep2")),
        dict(name="refused/dtype", model="start", sizes={}, load=whole, dtype="bfloat16"),
        dict(name="refused/cut_tensors", model="other", sizes={}, load=str(folder / "cut_tensors")),
        dict(name="refused/cut_index", model="other", sizes={}, load=str(folder / "cut_index")),
        dict(name="refused/adapters", model="start", sizes={}, load=str(folder / "from_lora_tp2"), weights_only=True),
        dict(name="refused/nothing", model="start", sizes={}, load=str(folder / "nowhere")),
    ]


def assert_close(actual: dict[str, float], expected: dict[str, float]) -> None:
    assert actual.keys() == expected.keys() and len(actual) > 5
    for name, value in expected.items():
        # a loss is a mean of terms of order 1 that cancel, others are differences of log-probs.
        # Even small sums keep a few float32 roundings of 6e-8
        precision = dict(rel=1e-6) if name == "actor/lr" else dict(rel=1e-5, abs=2e-6)
        assert actual[name] == pytest.approx(value, **precision), name


READS = [*(f"{writer}/{reader}" for writer, reader in PAIRS), "tied/pp2"]


@pytest.mark.parametrize("read", READS)
def test_weights_and_moments_are_the_same_at_another_layout(results, read):
    written, loaded = results[f"write/{read.split('/')[0]}"]["tensors"], results[f"read/{read}"]["tensors"]
    assert written.keys() == loaded.keys()
    assert sum(name.startswith(MOMENTS) for name in written) * 3 == len(written) * 2
    for name, tensor in written.items():
        assert torch.equal(tensor, loaded[name]), name


@pytest.mark.parametrize("read", READS)
def test_next_step_is_the_same_at_another_layout(results, read):
    assert_close(results[f"read/{read}"]["metrics"][STEPS], results[f"write/{read.split('/')[0]}"]["metrics"][STEPS])


def test_half_precision_is_the_same_at_another_layout_and_without_a_sharded_optimizer(results):
    written, loaded = results["blocking/dp2_half"]["tensors"], results["read/half/tp2"]["tensors"]
    assert written.keys() == loaded.keys()
    assert sum(name.startswith("fp32_param.") for name in written) * 4 == len(written)
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in written.items())


def test_a_checkpoint_of_uneven_chunks_is_the_same_in_even_ones(results):
    written, loaded = results["blocking/pp2_vpp2_uneven"]["tensors"], results["read/uneven/pp2"]["tensors"]
    assert written.keys() == loaded.keys() and len(written) == 3 * 51
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in written.items())


def test_every_rank_writes_files_of_bounded_size(results):
    """torch's writer keeps a file's contents in memory until the file ends."""
    files = results["write/tp2_cp2"]["files"]
    assert files == [f"__{number}_0.distcp" for number in range(len(files))] and len(files) >= 8


def test_megatron_itself_reads_the_tensors(results):
    """Under its names, whole and unpadded, though tensor-,
    data- and sequence-parallel ranks wrote them."""
    read, written = results["stock"], results["write/tp2_cp2"]["tensors"]
    layer = "decoder.layers.2.mlp"
    pairs = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        f"{layer}.linear_fc1.weight_w": "model.layers.2.mlp.gate_proj.weight",
        f"{layer}.linear_fc1.weight_v": "model.layers.2.mlp.up_proj.weight",
        f"{layer}.linear_fc2.weight": "model.layers.2.mlp.down_proj.weight",
    }
    for megatron, hugging_face in pairs.items():
        assert torch.equal(read[megatron], written[hugging_face]), megatron
        for moment in MOMENTS:
            assert torch.equal(read[f"optimizer.state.{moment}.{megatron}"], written[f"{moment}.{hugging_face}"])


def test_report_says_that_generators_cannot_continue_at_another_layout(results):
    report = results["read/tp2/pp2"]["report"]
    assert report["restored"] == ("model", "optimizer", "lr_schedule")
    assert len(report["not_restored"]) == 1 and "tp2" in report["not_restored"][0]
    assert report["written_with"] == {"tp": 2, "pp": 1, "vpp": 0, "dp": 1, "ep": 1, "world_size": 2}


@pytest.mark.parametrize("name", [*SAME, *(f"blocking/{name}" for name in SAVED_AT_ONCE)])
def test_three_steps_and_three_resumed_equal_six_bit_for_bit(results, name):
    """Metrics, and of every rank every parameter and optimizer tensor."""
    resumed = results[f"resumed_{name}" if "/" in name else f"resumed/{name}"]
    name = name.removeprefix("blocking/")
    through = results[f"blocking/{name}"]
    for step in range(STEPS, END):
        assert through["metrics"][step] == resumed["metrics"][step]
    assert len(through["everything"]) == SAME[name][0]
    for rank, (expected, actual) in enumerate(zip(through["everything"], resumed["everything"], strict=True)):
        assert len(expected) == len(actual) > 40
        assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True)), rank


@pytest.mark.parametrize("name", SAME)
def test_generators_continue_in_the_same_layout(results, name):
    assert results[f"resumed/{name}"]["report"]["restored"] == ("model", "optimizer", "lr_schedule", "rng")
    assert results[f"resumed/{name}"]["draws"] == results[f"background/{name}"]["draws"]


@pytest.mark.parametrize("name", SAME)
def test_saving_in_the_background_does_not_change_training(results, name):
    blocking, background = results[f"blocking/{name}"], results[f"background/{name}"]
    assert blocking["metrics"] == background["metrics"]
    pairs = zip(blocking["everything"], background["everything"], strict=True)
    assert all(torch.equal(a, b) for ranks in pairs for a, b in zip(*ranks, strict=True))


def test_failed_write_is_an_error_on_every_rank(results):
    for errors in results["failed"]["errors"]:  # written at once, and in the background
        *ranks, state = errors
        assert len(ranks) == 2 and ranks[0] == ranks[1]
        assert re.search(r"rank 1 on \S+: \[Errno 27\] File too large", ranks[0]) and "rank 0" not in ranks[0]
        assert state == "incomplete"


def test_ranks_share_the_reading_of_checksums_and_all_know_of_every_damaged_file(results):
    (damage, first), (same, second) = results["verified"]["ranks"]
    assert damage == same and [phrase.split()[0] for phrase in damage] == ["file03", "file07", "file04", "file05"]
    readable = {f"file{number:02}" for number in range(NUM_FILES)} - {"file03", "file07"}
    assert len(first) == len(second) == 5 and {*first, *second} == readable


def test_weights_can_be_saved_and_loaded_without_an_optimizer(results):
    written = results["weights/write"]["everything"][0]
    read = results["weights/read"]["everything"][0]
    num_parameters = 3 + 7 * 4
    assert all(torch.equal(a, b) for a, b in zip(written[:num_parameters], read[:num_parameters], strict=True))
    assert results["weights/read"]["report"]["restored"] == ("model",)
    assert results["weights/of_training"]["report"]["restored"] == ("model",)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no_optimizer", ["has a model and no optimizer"]),
        ("longer", ["lacks decoder.layers.4.mlp.linear_fc1.layer_norm_weight", "and 44 more"]),
        ("wider", ["embedding.word_embeddings.weight ((67, 32) there, (70, 32) here)"]),
        ("no_bias", ["has, which this model has not, decoder.layers.0.self_attention.linear_qkv.bias"]),
        (
            "experts",
            ["has, which this model has not, decoder.layers.1.mlp.experts.experts.2.linear_fc1.weight_v", "more"],
        ),
        ("dtype", ["float32", "bfloat16", "megatron.dtype"]),
        ("cut_tensors", ["cannot be read (rank 0: ", "; choose another checkpoint."]),
        ("cut_index", ["cut_index", ".metadata is damaged", "truncated", "; use another checkpoint."]),
        ("adapters", ["holds adapters (LoRA)", "the run's model/", "lora_adapter_path"]),
        ("nothing", ["is no torch_dist checkpoint", "nowhere"]),
    ],
)
def test_another_models_or_a_damaged_checkpoint_is_refused_by_name(results, case, words):
    error = results[f"refused/{case}"]["error"]
    assert all(word in error for word in words), error
    assert "\n" not in error
