"""A converted model gets its card and goes to a repository of the Hub, here a stand-in."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from checkpoints_tools import hf_to_megatron, hub, megatron_to_hf
from megatron_dapo.checkpointing.config_changes import config_to_plain
from megatron_dapo.checkpointing.manifest import write_manifest
from megatron_dapo.config.loader import load_config
from megatron_dapo.storage.run_folder import RunFolder
from tests.hub_stand_in import Hub, running_hub
from tests.tiny_models import make_tiny

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")]  # of httpx

TOKEN = "hf_a-token-of-the-tests"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Of a run, but for the optimizer and the counters of the rollout."""
    folder = tmp_path_factory.mktemp("runs")
    model = make_tiny(folder / "base", "qwen2", vocab=67, layers=1)
    run = RunFolder(folder / "sums").create()
    run.config.write_text("{}")
    run.metrics.write_text("".join(json.dumps({"step": s, "val/accuracy": s / 100}) + "\n" for s in (0, 12, 50)))
    checkpoint = run.checkpoint(12)
    assert hf_to_megatron.main(["--hf-model", str(model), "--output", str(checkpoint)]) == 0
    (checkpoint / "conversion.json").unlink()
    config = load_config(None, [f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.n=3"])
    (checkpoint / "trainer.json").write_text(json.dumps({"step": 12, "config": config_to_plain(config)}))
    write_manifest(checkpoint, ["model"])
    return checkpoint


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    with running_hub(TOKEN) as stand_in:
        monkeypatch.setattr(constants, "ENDPOINT", stand_in.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield stand_in
        huggingface_hub.close_session()


def convert(checkpoint: Path, out: Path, *options: str) -> int:
    return megatron_to_hf.main(["--checkpoint", str(checkpoint), "--output", str(out), *options])


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("mode", ["lfs", "regular"])
def test_the_folder_goes_to_a_private_repository_in_place_of_an_earlier_model(
    checkpoint, stand_in, tmp_path, capfd, monkeypatch, mode
):
    """By git-lfs, and by the pipeline of Xet, whose own service has no stand-in."""
    stand_in.weights_mode = mode
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", mode == "lfs")
    stand_in.files = {
        "model-00001-of-00002.safetensors": b"old",
        "model.safetensors.index.json": b"old",
        "LICENSE": b"x",
    }
    assert convert(checkpoint, tmp_path / "out", "--push-to-hub", "model") == 0, "of the token's owner"
    assert stand_in.files == files_of(tmp_path / "out") | {"LICENSE": b"x"}
    assert stand_in.is_private is True
    card = stand_in.files["README.md"].decode()
    assert (
        "by 12 steps" in card and "| accuracy | 0 | 0.12 |" in card and "| `actor_rollout_ref.rollout.n` | 3 |" in card
    )
    said = "".join(capfd.readouterr())
    assert f"{stand_in.url}/me/model/commit/0a1b2c: sent" in said
    assert TOKEN not in said and not any(TOKEN in request for request in stand_in.requests)


@pytest.mark.parametrize("token", ["hf_another", "hf_\x01broken", None])
def test_a_wrong_token_is_refused_before_the_conversion(checkpoint, stand_in, tmp_path, capsys, monkeypatch, token):
    monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN")
    assert convert(checkpoint, tmp_path / "out", "--push-to-hub", "me/model") == 2
    said = capsys.readouterr().err
    assert said.startswith("1 mistake to correct:\n--push-to-hub is me/model, but ") and "HF_TOKEN" in said
    assert len(said.splitlines()) == 2 and (token is None or token not in said)
    assert not (tmp_path / "out").exists() and not stand_in.files


@pytest.mark.parametrize("name", ["a/b/c", "me/model name", "../me", "--"])
def test_a_name_that_is_none_is_refused_at_once(stand_in, name):
    with pytest.raises(hub.UserError, match="give OWNER/NAME"):
        hub.open_repository(name)


def test_a_hub_that_fails_later_leaves_the_folder_and_says_how_to_go_on(checkpoint, stand_in, tmp_path, capsys):
    stand_in.refuses = "/commit/"
    out = tmp_path / "out"
    assert convert(checkpoint, out, "--push-to-hub", "me/model") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "You may not do that" in said and f"`hf upload me/model {out}` sends it again." in said
    assert {"config.json", "model.safetensors", "README.md"} <= files_of(out).keys()


def test_a_silent_hub_is_left_after_a_deadline(stand_in: Hub, monkeypatch):
    monkeypatch.setattr(hub, "TIMEOUT_S", 0.2)
    stand_in.is_silent = True
    with pytest.raises(hub.UserError, match="did not take it .*[Tt]ime"):
        hub.open_repository("me/model")


def test_without_the_option_a_trained_model_has_its_card_and_a_converted_one_none(checkpoint, stand_in, tmp_path):
    assert convert(checkpoint, tmp_path / "trained") == 0
    assert (tmp_path / "trained" / "README.md").is_file() and not stand_in.requests
    copied = shutil.copytree(checkpoint, tmp_path / "copied")
    assert convert(copied, tmp_path / "alone") == 0
    assert "None were taken." in (tmp_path / "alone" / "README.md").read_text(), "the metrics are those of a run"
    (copied / "trainer.json").unlink()
    write_manifest(copied, ["model"])
    assert convert(copied, tmp_path / "model") == 0
    assert not (tmp_path / "model" / "README.md").exists()


def test_another_programs_state_is_a_sentence(checkpoint, tmp_path, capsys):
    copied = shutil.copytree(checkpoint, tmp_path / "copied")
    for state in ({"step": 1}, {"config": {"data": 3}, "step": 1}, {"config": [], "step": "x"}):
        (copied / "trainer.json").write_text(json.dumps(state))
        write_manifest(copied, ["model"])
        assert convert(copied, tmp_path / "out") == 2
        assert "trainer.json` is damaged" in capsys.readouterr().err and not (tmp_path / "out").exists()
