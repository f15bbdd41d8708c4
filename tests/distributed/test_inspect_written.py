"""inspect_checkpoint on Megatron's files: layouts show in the pieces, and make no difference."""

import json
from pathlib import Path

import pytest

from checkpoints_tools.inspect_checkpoint import main
from tests.forked_ranks import run_ranks
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.distributed

VOCAB, HIDDEN = 67, 32


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, str]:
    """The same model, written at two layouts; "other": another model at the first."""
    folder = tmp_path_factory.mktemp("written")
    models = {
        seed: make_tiny(folder / f"hf{seed}", "qwen2", vocab=VOCAB, hidden=HIDDEN, layers=2, seed=seed)
        for seed in (0, 1)
    }
    paths, commands = {}, []
    for name, seed, layout in (("tp2", 0, "--tp"), ("pp2", 0, "--pp"), ("other", 1, "--tp")):
        paths[name] = str(folder / name)
        arguments = ["--hf-model", str(models[seed]), "--output", paths[name], layout, "2"]
        commands.append(["hf_to_megatron", arguments])
    task = folder / "task.json"
    task.write_text(json.dumps(commands))
    run_ranks(Path(__file__).with_name("convert_worker.py"), 2, str(task))
    return paths


def report(capsys, *arguments: str) -> dict:
    main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("name", "num_pieces"), [("tp2", 2), ("pp2", 1)])
def test_it_shows_the_layout_whole_shapes_and_how_they_were_cut(written, capsys, name, num_pieces):
    shown = report(capsys, written[name], "--verify")
    assert shown["is_whole"] and shown["contents"] == ["model"]
    assert shown["common"]["written_with"][name[:2]] == 2
    tensors = {tensor["name"]: tensor for tensor in shown["tensors"]}
    embedding = tensors["embedding.word_embeddings.weight"]
    assert embedding["shape"] == [VOCAB, HIDDEN]  # not padded
    assert len(embedding["pieces"]) == num_pieces
    files = {piece["file"] for tensor in tensors.values() for piece in tensor["pieces"]}
    assert len(files) == 2  # a file per rank


def test_the_same_model_at_two_layouts_does_not_differ(written, capsys):
    shown = report(capsys, "--diff", written["tp2"], written["pp2"])
    assert shown["equal"] and shown["num_equal"] > 10


def test_another_model_differs_in_every_tensor(written, capsys):
    shown = report(capsys, "--diff", written["tp2"], written["other"])
    assert shown["num_equal"] == 0 and not shown["only_a"] and not shown["unlike"]
    assert all(change["relative"] > 0.01 for change in shown["changed"])
