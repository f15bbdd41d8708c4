"""A run's early refusals come in seconds, from a dry run and before servers start,
not after a minute."""

import json
from pathlib import Path

import pytest

import launch.local
from megatron_dapo.__main__ import main
from megatron_dapo.checkpointing.config_changes import config_to_plain
from megatron_dapo.checkpointing.folders import write_trainer_state
from megatron_dapo.checkpointing.manifest import write_manifest
from megatron_dapo.checkpointing.resume import CONTENTS
from megatron_dapo.checks import loss_trial
from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.first_look import NUM_ROWS
from tests.fake_rollout import write_files
from tests.model_json import MODEL_JSON

pytestmark = pytest.mark.unit

ROW = {"prompt": "p1", "label": "right", "data_source": "fake"}
LOSSES = """
import torch
def right(sequences):
    assert all(s.entropy is not None and s.ref_log_probs is None for s in sequences)
    print("asked for", len(sequences))
    return sum((s.mask * -s.log_probs).sum() for s in sequences), len(sequences), {"own/length": (8.0, 2)}
def a_mean(sequences):
    return torch.stack([s.log_probs.mean() for s in sequences])
def half(sequences):
    return sequences[0].log_probs.sum(), 2.5, {}
def needs_a_run(sequences):
    return torch.distributed.get_world_size(torch.distributed.new_group())
"""


@pytest.fixture
def arguments(tmp_path, monkeypatch) -> list[str]:
    """The command line of a run without mistakes, which does not start."""
    model = tmp_path / "model"
    model.mkdir()
    write_files(model, num_prompts=4)
    (model / "config.json").write_text(json.dumps(MODEL_JSON))
    (tmp_path / "my_losses.py").write_text(LOSSES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(launch.local, "run_local", lambda config: 99)
    return [
        f"data.train_files=[{model}/train.jsonl]",
        "data.apply_chat_template=false",
        # small steps: every dry run estimates its time by a simulation of six of them
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=2",
        "reward.function=exact_match",
        f"actor_rollout_ref.model.path={model}",
        f"trainer.run_dir={tmp_path}/run",
    ]


def refusal(arguments: list[str], capsys) -> str:
    """The common words of a dry run and of the launcher; nothing if the run would start."""
    codes_and_words = []
    for run, started in (
        (lambda: main(["train", "--dry-run", *arguments]), 0),
        (lambda: launch.local.main(["--dry-run", *arguments]), 0),
        (lambda: launch.local.main(arguments), 99),
    ):
        code = run()
        words = capsys.readouterr().err
        assert code == (2 if words else started), (code, words)
        codes_and_words.append(words)
    assert len(set(codes_and_words)) == 1
    return codes_and_words[0]


def prompts(tmp_path: Path, *rows: dict, name: str = "mine.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_run_without_mistakes_starts(arguments, capsys):
    assert refusal(arguments, capsys) == ""


APPENDED = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <eos> {% endfor %}"
ASKS = "{% if add_generation_prompt %}<assistant> {% endif %}"


@pytest.mark.parametrize(
    ("template", "history", "words"),
    [
        (APPENDED + ASKS, "tokens", ""),
        ("{{ messages | length }} " + APPENDED + ASKS, "tokens", ""),
        (APPENDED + "{{ messages[0].content }} " + ASKS, "tokens", "set it to rendered, or use another template"),
        (APPENDED + "{{ messages[0].content }} " + ASKS, "rendered", ""),
    ],
)
def test_a_template_that_appended_turns_would_contradict_is_refused(template, history, words, arguments, capsys):
    (folder,) = (word.partition("=")[2] for word in arguments if word.startswith("actor_rollout_ref.model.path"))
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": template}))
    keys = ("enable=true", "command=[sh]", f"history={history}")
    text = refusal(
        [
            *arguments,
            "data.apply_chat_template=true",
            "data.max_prompt_length=16",
            *(f"actor_rollout_ref.rollout.agent.{key}" for key in keys),
        ],
        capsys,
    )
    assert (words in text) if words else not text


def without(column: str) -> dict:
    return {name: value for name, value in ROW.items() if name != column}


BAD_ROWS = {
    "no answer": ([ROW, without("label")], "mine.jsonl, row 2: the answer is missing"),
    "no prompt": ([without("prompt")], "mine.jsonl, row 1: column 'prompt' is missing"),
    "no row": ([], "mine.jsonl: the file has no rows"),
    "two answers": ([ROW, ROW | {"label": "wrong"}], "row 2: the answer is 'wrong', but 'right' for the same prompt"),
    "all too long": ([ROW | {"prompt": "p1 " * 9}], "all 1 prompts are longer than data.max_prompt_length = 8"),
}


@pytest.mark.parametrize("key", ["train_files", "val_files"])
@pytest.mark.parametrize("name", BAD_ROWS)
def test_rows_that_no_run_takes_are_named(arguments, tmp_path, capsys, name, key):
    rows, words = BAD_ROWS[name]
    path = prompts(tmp_path, *rows)
    assert words in refusal([*arguments, "data.max_prompt_length=8", f"data.{key}=[{path}]"], capsys)


def test_rows_behind_the_first_are_left_to_the_run(arguments, tmp_path, capsys):
    long = [ROW | {"prompt": f"p{number} " * 9} for number in range(NUM_ROWS)]
    path = prompts(tmp_path, *long, ROW)
    assert refusal([*arguments, "data.max_prompt_length=8", f"data.train_files=[{path}]"], capsys) == ""


def test_conversations_are_looked_at_too(arguments, tmp_path, capsys):
    bad = prompts(tmp_path, {"prompt": "p1", "response": 3.5})
    of_a_rollout = ("reward.", "actor_rollout_ref.rollout.", "actor_rollout_ref.actor.")
    settings = [setting for setting in arguments if not setting.startswith(of_a_rollout)]
    assert main(["sft", "--dry-run", *settings, f"data.train_files=[{bad}]"]) == 2
    assert f"{bad}, row 1, column 'response': expected text" in capsys.readouterr().err


def test_a_data_source_without_a_verifier_is_named(arguments, capsys):
    words = refusal([*arguments, "reward.function=by_data_source"], capsys)
    assert "by_data_source has no verifier for data source 'fake'" in words


def test_a_negative_score_under_a_mean_of_rewards_is_named(arguments, capsys):
    words = refusal([*arguments, "reward.function=math_dapo", "algorithm.adv_estimator=maxrl"], capsys)
    assert "reward.function is math_dapo, which scores wrong answers of 'fake' -1, but" in words


# ---------------------------------------------------------------------------------- the checkpoint

LR = "actor_rollout_ref.actor.optim.lr"


def save(arguments: list[str], tmp_path: Path, step: int) -> Path:
    folder = tmp_path / "run" / "checkpoints" / f"step_{step:06d}"
    folder.mkdir(parents=True)
    config = load_and_validate(None, arguments)
    write_trainer_state(folder, {"step": step, "config": config_to_plain(config)})
    write_manifest(folder, CONTENTS)
    return folder


def test_a_config_that_does_not_go_on_from_its_checkpoint_is_named(arguments, tmp_path, capsys):
    save(arguments, tmp_path, 3)
    assert refusal(arguments, capsys) == ""
    words = refusal([*arguments, f"{LR}=3e-6"], capsys)
    assert f"{LR} is 3e-06, but was 1e-06 in the run that wrote step_000003" in words
    assert refusal([*arguments, f"{LR}=3e-6", f"trainer.accept_changes=[{LR}]"], capsys) == ""
    assert "trainer.resume is never" in refusal([*arguments, "trainer.resume=never"], capsys)


def test_a_damaged_checkpoint_is_passed_over_as_the_run_does(arguments, tmp_path, capsys):
    save(arguments, tmp_path, 3)
    newest = save([*arguments, f"{LR}=3e-6"], tmp_path, 4)
    state = newest / "trainer.json"
    state.write_bytes(b"{" * state.stat().st_size)
    assert refusal(arguments, capsys) == ""
    (tmp_path / "run" / "checkpoints" / "step_000003" / "manifest.json").unlink()
    words = refusal(arguments, capsys)
    assert "holds no whole checkpoint" in words and "step_000004: trainer.json has another content" in words


# ------------------------------------------------------------------------------ a loss of one's own


OWN = "actor_rollout_ref.actor.loss_function=my_losses"


def test_a_loss_whose_answer_no_run_takes_is_named(arguments, capsys):
    assert main(["train", "--dry-run", *arguments, f"{OWN}:a_mean"]) == 2
    words = capsys.readouterr().err
    assert "the function must return (summed loss, count, metrics)" in words and "a tensor of shape [2]" in words


@pytest.mark.parametrize(
    ("name", "words"), [("right", None), ("half", "a whole number as its count, not 2.5"), ("absent", "cannot import")]
)
def test_a_trial_of_a_loss_reports_the_fault(arguments, tmp_path, name, words):
    loss_trial.main([f"my_losses:{name}", str(tmp_path / "sentences.json"), "--entropy"])
    sentences = json.loads((tmp_path / "sentences.json").read_text())
    assert len(sentences) == (1 if words else 0) and all(words in sentence for sentence in sentences)


def test_an_exception_in_a_trial_is_no_verdict(arguments, capsys):
    assert main(["train", "--dry-run", *arguments, f"{OWN}:needs_a_run"]) == 0
