"""The command line: mistakes end it before anything starts, a dry run shows the planned start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.local import main as local
from megatron_dapo.__main__ import main
from megatron_dapo.config.key_reference import config_reference
from megatron_dapo.config.loader import load_config
from tests.fake_rollout import write_files
from tests.model_json import MODEL_JSON

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
FIVE_MISTAKES = """\
data: {train_files: [a.jsonl], train_batch_size: many}
actor_rollout_ref:
  model: {path: m}
  actor: {clip_high: 0.3, optim: {lr: -1e-6}}
  rollout: {n: 0}
trainer: {test_freq: sometimes}
"""
TWO_TYPOS_AND_THREE_CONTRADICTIONS = """\
data: {train_files: [a.jsonl]}
actor_rollout_ref:
  model: {path: m}
  actor: {clip_high: 0.3, use_kl_loss: true, megatron: {sequence_parallel: true}, optim: {lr: -1e-6}}
algorithm: {dapo: {dynamic_sampling: {enable: true}}}
"""


def sound_config(folder: Path) -> Path:
    (folder / "model").mkdir()
    write_files(folder / "model", num_prompts=2)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL_JSON))
    path = folder / "run.yaml"
    path.write_text(
        # small steps: the plan simulates some of them
        f"data: {{train_files: [{folder}/model/train.jsonl], apply_chat_template: false, train_batch_size: 4}}\n"
        f"reward: {{function: exact_match}}\nactor_rollout_ref: {{model: {{path: {folder}/model}}, "
        f"actor: {{ppo_mini_batch_size: 4}}, rollout: {{n: 2}}}}\n"
        f"trainer: {{run_dir: {folder}/run}}\n"
    )
    return path


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=clean | environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("dry_run", [["--dry-run"], []])
@pytest.mark.parametrize(
    ("content", "keys"),
    [
        (FIVE_MISTAKES, ["clip_high", "train_batch_size", "optim.lr", "rollout.n", "test_freq"]),
        (
            TWO_TYPOS_AND_THREE_CONTRADICTIONS,
            ["clip_high", "optim.lr", "sequence_parallel", "dynamic_sampling", "use_kl_loss"],
        ),
    ],
)
def test_five_mistakes_print_five_sentences_and_exit_2_before_anything_starts(tmp_path, content, keys, dry_run):
    path = tmp_path / "five.yaml"
    path.write_text(content.replace("a.jsonl", f"{tmp_path}/a.jsonl").replace("path: m", f"path: {tmp_path}/m"))
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(MODEL_JSON))
    before = set(tmp_path.rglob("*"))
    watched = (
        "import sys; from megatron_dapo.__main__ import main; code = main(sys.argv[1:]); "
        "assert not {'torch', 'megatron', 'sglang', 'megatron_dapo.trainer'} & set(sys.modules); sys.exit(code)"
    )
    result = command("-c", watched, "train", "--config", str(path), *dry_run)
    count, *sentences = result.stderr.splitlines()
    assert result.returncode == 2 and result.stdout == ""
    assert count == "5 mistakes to correct:" and len(sentences) == 5
    assert all(any(key in sentence for sentence in sentences) for key in keys), result.stderr
    assert set(tmp_path.rglob("*")) == before


def test_a_dry_run_prints_config_and_plan_and_waits_for_no_import_of_torch(tmp_path):
    path = sound_config(tmp_path)
    watched = (
        "import sys; from megatron_dapo.__main__ import main; code = main(sys.argv[1:]); "
        "print('loaded', sorted({'torch', 'megatron', 'sglang', 'transformers'} & set(sys.modules))); sys.exit(code)"
    )
    arguments = ["-c", watched, "train", "--config", str(path), "--dry-run", "trainer.seed=7"]
    result = command(*arguments)
    assert result.returncode == 0, result.stderr
    assert "loaded []" in result.stdout and "Process plan" in result.stdout
    assert not (tmp_path / "run").exists()
    (tmp_path / "printed.yaml").write_text(result.stdout.partition("\nProcess plan")[0])
    assert load_config(tmp_path / "printed.yaml", []) == load_config(path, ["trainer.seed=7"])


def test_overrides_may_stand_before_and_after_options(tmp_path, capsys):
    path = str(sound_config(tmp_path))
    assert main(["train", "trainer.seed=5", "--config", path, "data.seed=6", "--dry-run", "trainer.test_freq=-1"]) == 0
    printed = capsys.readouterr().out
    assert "seed: 5" in printed and "seed: 6" in printed


@pytest.mark.parametrize("arguments", [["train", "--dryrun"], ["config-reference", "a=1"], [], ["fly"]])
def test_an_unknown_argument_exits_2_with_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2 and "usage: python -m megatron_dapo" in capsys.readouterr().err


def test_of_many_ranks_one_reports(tmp_path):
    path = sound_config(tmp_path)
    at_once = "import sys, megatron_dapo.__main__ as program; program._FOR_RANK_0_S = 0; sys.exit(program.main())"
    arguments = ("-c", at_once, "train", "--config", str(path), "trainer.nnodes=2", "--dry-run")
    first, second = (command(*arguments, RANK=rank, WORLD_SIZE="4") for rank in ("0", "1"))
    assert (first.returncode, second.returncode) == (2, 2)
    assert "started 4 processes" in first.stderr and (second.stdout, second.stderr) == ("", "")


def test_the_config_reference_in_docs_is_current():
    current = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert current == config_reference(), "run: python -m megatron_dapo config-reference > docs/config.md"


A_THREAD_THAT_WAITS_FOR_EVER = """
import sys, threading
import megatron_dapo.__main__ as program
def fail():
    threading.Thread(target=threading.Event().wait, name="stuck").start()
    if sys.argv[1] == "raises":
        raise RuntimeError("out of memory, say")
    return 2
program._END_S, program.main = 2.0, fail  # time to write the traceback, on a busy machine too
program.run_and_end()
"""


@pytest.mark.parametrize("how", ["raises", "returns"])
def test_a_failed_run_ends_even_if_something_holds_up_the_interpreter(how):
    result = command("-c", A_THREAD_THAT_WAITS_FOR_EVER, how)
    assert result.returncode == 1 and "Timeout" in result.stderr and "in wait" in result.stderr
    assert ("out of memory, say" in result.stderr) == (how == "raises")


def test_the_config_reference_is_printed(capsys):
    assert main(["config-reference"]) == 0
    assert capsys.readouterr().out == config_reference()


@pytest.mark.parametrize("module", ["megatron_dapo", "launch.local"])
def test_a_recipe_can_be_named_in_place_of_its_file(module, capsys, short_simulation):
    run = {
        "megatron_dapo": lambda *arguments: main(["train", *arguments]),
        "launch.local": lambda *arguments: local(arguments),
    }[module]
    printed = []
    for arguments in (["--config-name", "demo"], ["--config", str(ROOT / "configs" / "demo.yaml")]):
        printed.append((run(*arguments, "--dry-run"), capsys.readouterr().out))
    assert printed[0] == printed[1] and "experiment_name: demo" in printed[0][1]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--config-name", "demoo"], "there is no configs/demoo.yaml; the nearest is demo; known are "),
        (["--config-name", "demo", "--config", "x.yaml"], "not allowed with argument --config-name"),
    ],
)
def test_an_unknown_recipe_and_two_configs_exit_2_and_say_why(arguments, reason, capsys):
    for run in (lambda: main(["train", *arguments]), lambda: local(arguments)):
        with pytest.raises(SystemExit) as end:
            run()
        assert end.value.code == 2 and reason in capsys.readouterr().err
