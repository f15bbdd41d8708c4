"""The program from Python: public names, runs as columns, the examples of the page, the notebook."""

import ast
import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import megatron_dapo
from checkpoints_tools import hf_to_megatron, job, megatron_to_hf
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import write_whole
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.yaml_dialect import parse_yaml
from megatron_dapo.library import conversion, start
from megatron_dapo.library.run import Run
from megatron_dapo.public_names import PUBLIC
from megatron_dapo.storage.run_folder import RunFolder
from tests.api_reference import api_reference
from tests.report_runs import write_branches, write_run, write_validation

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"(?s)```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"))


def block(part: str) -> str:
    """The only example of docs/python.md with this part."""
    (one,) = (text for text in BLOCKS if part in text)
    return one


def written(tmp_path: Path) -> RunFolder:
    """A run of three steps in runs/demo."""
    return write_run(tmp_path / "runs" / "demo", num_steps=3)


# ---------------------------------------------------------------------------------- public names


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_imported_from_the_package(name):
    assert getattr(megatron_dapo, name) is getattr(sys.modules[PUBLIC[name]], name)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_no_module_of_the_package(name):
    """Its import would take the name's place."""
    assert find_spec(f"megatron_dapo.{name}") is None


def test_the_python_reference_is_current():
    current = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert current == api_reference(), "run: python -m tests.api_reference > docs/api.md"
    assert re.findall(r"(?m)^### (\w+)$", current) == list(PUBLIC)


def test_the_examples_of_the_page_use_public_names_only():
    for text in BLOCKS:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("megatron_dapo"):
                assert node.module == "megatron_dapo" and {alias.name for alias in node.names} <= PUBLIC.keys()


# ---------------------------------------------------------------------------------- a run


def test_metrics_are_columns_with_gaps_and_evaluations_apart(tmp_path):
    run = written(tmp_path)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    del lines[2]["actor/entropy"]  # step 2
    lines[3] |= {"actor/grad_norm": None, "actor/only_text": "high", "actor/switch": True, "actor/huge": 1e300}
    write_whole(run.metrics, "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "reward/mean": 1')
    metrics = Run(run.path).metrics()
    assert metrics["step"].tolist() == [1, 2, 3] and metrics["step"].dtype == np.int64
    assert metrics["reward/mean"].tolist() == [line["reward/mean"] for line in lines[1:4]]
    assert np.isnan(metrics["actor/entropy"]).tolist() == [False, True, False]
    assert np.isnan(metrics["actor/grad_norm"]).tolist() == [False, False, True]
    assert not {"actor/only_text", "actor/switch", "actor/huge", "val/accuracy"} & metrics.keys()
    assert {column.dtype for name, column in metrics.items() if name != "step"} == {np.dtype(np.float64)}
    validations = Run(str(run.path)).validations()
    assert (validations["step"].tolist(), validations["val/accuracy"].tolist()) == ([0, 3], [0.25, 0.75])


def test_a_run_without_a_step_has_no_rows(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    run = Run(tmp_path)
    assert [len(column) for column in run.metrics().values()] == [0] and run.steps() == []
    with pytest.raises(UserError, match="no responses of step 1: it has none"):
        run.samples(1)


def test_a_run_that_keeps_no_metrics_is_a_run_too(tmp_path):
    """`train` returns it after its end (trainer.logger=[console])."""
    folder = written(tmp_path)
    folder.metrics.unlink()
    run = Run(folder.path)
    assert run.steps() == [1, 2, 3] and run.config().data.train_batch_size == 3
    with pytest.raises(UserError, match="metrics.jsonl cannot be read"):
        run.metrics()


def test_a_folder_without_metrics_is_no_run(tmp_path):
    with pytest.raises(UserError, match="is no folder of a run: it has no metrics.jsonl and no config.yaml"):
        Run(tmp_path / "nowhere")


def test_responses_and_their_tokens_are_in_one_order(tmp_path):
    run = Run(written(tmp_path).path)
    assert run.steps() == [1, 2, 3]
    samples, tokens = run.samples(2), run.tokens(2)
    assert len(samples) == len(tokens) == 12 and [sample["uid"][-1] for sample in samples] == list("000011112222")
    assert all(sample["ground_truth"] == str(2 + int(sample["uid"][-1])) for sample in samples)
    for sample, arrays in zip(samples, tokens, strict=True):
        assert {len(values) for values in arrays.values()} == {sample["num_tokens"]}
        assert "".join(arrays["texts"]) == sample["text"] + "<eos>"
        assert np.allclose(arrays["advantages"], 1.2 if sample["correct"] else -0.8, atol=1e-3)


def test_tokens_of_an_agent_have_a_row_for_each_branch(tmp_path):
    folder = written(tmp_path)
    first = write_branches(folder, 1)
    run = Run(folder.path)
    rows = run.tokens(1)
    assert [len(row["tokens"]) for row in rows] == [
        *(len(branch.response_tokens) for branch in first.branches),
        len(rows[-1]["tokens"]),
    ]
    assert len(run.samples(1)) == 2 and len(run.samples(1)[0]["branches"]) == len(first.branches)


def test_held_out_answers_are_read_by_step(tmp_path):
    folder = written(tmp_path)
    write_validation(folder, 3, [1, 4])
    run = Run(folder.path)
    assert run.steps(held_out=True) == [3]
    answers = run.samples(3, held_out=True)
    assert [answer["correct"] for answer in answers] == [True, False, False, False, True, True, True, True]
    with pytest.raises(UserError, match="no held-out responses of step 2: it has some of 1 steps, 3 to 3"):
        run.samples(2, held_out=True)


def test_damaged_files_are_a_sentence_or_left_out(tmp_path):
    folder = written(tmp_path)
    folder.rollout_tokens(1).write_bytes(folder.rollout_tokens(1).read_bytes()[:-40])
    folder.rollout(1).write_text("[]\nno json\n" + folder.rollout(1).read_text())
    run = Run(folder.path)
    assert len(run.samples(1)) == 12
    for step in (1, 7):
        with pytest.raises(UserError, match=f"the tokens of step {step} are unknown"):
            run.tokens(step)


def test_metrics_become_a_data_frame_where_pandas_is(tmp_path, monkeypatch):
    metrics = Run(written(tmp_path).path).metrics()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="pip install pandas"):
        metrics.to_pandas()
    frame = SimpleNamespace(set_index=lambda name: (name, "by step"))
    seen = []
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda data: seen.append(data) or frame))
    assert metrics.to_pandas() == ("step", "by step") and seen == [metrics]


def test_a_run_is_read_without_torch():
    code = (
        "import sys, megatron_dapo.library.run; sys.exit(bool({'torch', 'transformers', 'pandas'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


# ---------------------------------------------------------------------------------- a start


@pytest.mark.parametrize("recipe", ["demo", "one_node_sft", "dapo_32b", "calculator"])
def test_settings_mean_the_same_as_a_file(recipe):
    path = ROOT / "configs" / f"{recipe}.yaml"
    tree, _ = parse_yaml(path.read_text(encoding="utf-8"))
    assert "extends" not in tree
    assert load_config(None, start.overrides_of(tree)) == load_config(path)


def test_settings_are_any_text_and_only_what_a_file_can_hold(tmp_path):
    settings = {"trainer.experiment_name": "on", "trainer": {"run_dir": tmp_path / "\u00fc: 'x' \U0001f600 {a}"}}
    config = load_config(None, start.overrides_of(settings))
    assert config.trainer.experiment_name == "on"
    assert config.trainer.run_dir == f"{tmp_path}/\u00fc: 'x' \U0001f600 {{a}}"
    with pytest.raises(TypeError):
        start.overrides_of({"trainer.seed": {1, 2}})


def test_mistakes_of_settings_come_together_before_anything_starts(monkeypatch):
    monkeypatch.setattr(start, "run_local", lambda config: pytest.fail("started"))
    with pytest.raises(UserError) as error:
        start.train({"trainer": {"seeds": 2}, "data.train_batch_size": "many"})
    assert any("trainer.seeds" in sentence for sentence in error.value.sentences)
    assert any("data.train_batch_size is 'many'" in sentence for sentence in error.value.sentences)


def started(monkeypatch, folder: Path, code: int) -> None:
    """Have a start write a run and end with this code."""
    (folder / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(start, "checked_config", partial(start.checked_config, check_files=False))
    monkeypatch.setattr(start, "first_look", lambda config: None)

    def run_local(config) -> int:
        write_run(RunFolder.of(config.trainer).path, num_steps=2)
        return code

    monkeypatch.setattr(start, "run_local", run_local)


@pytest.mark.parametrize("code", [0, 85])
def test_the_start_of_the_page_gives_the_run(tmp_path, monkeypatch, code):
    started(monkeypatch, tmp_path, code)
    names: dict = {}
    exec(block("import UserError, train"), names)
    assert names["run"].metrics()["step"].tolist() == [1, 2]


def test_ctrl_c_before_there_is_anything_to_save_is_the_interrupt_that_it_was(tmp_path, monkeypatch):
    started(monkeypatch, tmp_path, 130)
    with pytest.raises(KeyboardInterrupt):
        exec(block("import UserError, train"), {})


def test_a_failed_run_is_an_error_that_names_its_logs(tmp_path, monkeypatch):
    started(monkeypatch, tmp_path, 1)
    with pytest.raises(RuntimeError, match=r"failed with exit code 1; its output is in .*logs"):
        exec(block("import UserError, train"), {})


# ---------------------------------------------------------------------------------- conversion


def ended(code: int, stderr: str):
    return lambda command, **options: SimpleNamespace(returncode=code, stderr=stderr)


@pytest.mark.parametrize(
    ("stderr", "sentences"),
    [
        ("reading ...\n2 mistakes to correct:\nOne.\nTwo.\n", ["One.", "Two."]),
        ("usage: x\nx: error: argument --dtype: invalid choice\n", ["x: error: argument --dtype: invalid choice"]),
        ("", ["convert to-megatron refused its arguments."]),
    ],
)
def test_mistakes_of_a_conversion_are_its_sentences(monkeypatch, stderr, sentences):
    monkeypatch.setattr(conversion.subprocess, "run", ended(2, stderr))
    with pytest.raises(UserError) as error:
        conversion.convert_to_megatron("a", "b")
    assert error.value.sentences == sentences


def test_the_conversions_of_the_page_are_commands_of_the_tools(monkeypatch):
    commands = []

    def run(command: list[str], **options) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(conversion.subprocess, "run", run)
    exec(block("import convert_to_huggingface"), {})
    assert [command[1:5] for command in commands] == [
        ["-m", "megatron_dapo", "convert", form] for form in ("to-megatron", "to-hf")
    ]
    there, back = (
        hf_to_megatron.parser().parse_args(commands[0][5:]),
        megatron_to_hf.parser().parse_args(commands[1][5:]),
    )
    assert (there.hf_model, there.output, there.dtype) == ("models/base", "models/base-megatron", "auto")
    assert (back.checkpoint, back.output, back.dtype) == ("models/base-megatron", "models/base-again", "auto")


@pytest.mark.parametrize("names", [("RANK", "WORLD_SIZE", "LOCAL_RANK"), *job._LAUNCHERS], ids=lambda names: names[0])
def test_a_conversion_by_a_rank_of_another_job_waits_for_no_other_rank(monkeypatch, names):
    seen: list[dict[str, str]] = []
    for name in names:
        monkeypatch.setenv(name, "2")
    monkeypatch.setattr(conversion.subprocess, "run", lambda *_, env, **__: seen.append(env) or ended(0, "")([]))
    conversion.convert_to_megatron("a", "b")
    assert job.torchrun_variables(seen[0]) == {} and "RANK" not in seen[0] and "PATH" in seen[0]


def test_a_broken_conversion_is_an_error_with_its_last_words(monkeypatch):
    monkeypatch.setattr(conversion.subprocess, "run", ended(134, "x" * 9000 + "Aborted"))
    with pytest.raises(RuntimeError, match="convert to-hf failed with exit code 134: x+Aborted"):
        conversion.convert_to_huggingface("a", "b")


# ---------------------------------------------------------------------------------- the examples


def test_the_reading_of_the_page_prints_a_run(tmp_path, monkeypatch, capsys):
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(block("metrics = run.metrics()"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("3 ") and printed[1] == "[0.25 0.75]" and printed[2] == "3"
    assert sum(line.startswith(("True ", "False ")) for line in printed) == 12


def test_the_loss_of_the_page_is_the_same_by_head_and_by_formula():
    """After one step: two right tokens are likelier, one wrong is less likely."""
    torch.manual_seed(0)
    names: dict = {}
    exec(block("fused_dapo_head(hidden"), names)
    before = names["result"]
    assert float(before.loss_sum.detach()) == pytest.approx(-(1 + 1 - 1)) and int(names["count"]) == 3
    by_head = {name: names[name].weight.grad.clone() for name in ("embedding", "output")}
    with torch.no_grad():  # back to the weights before the step
        for name, gradient in by_head.items():
            names[name].weight += 0.1 * gradient
    names["optimizer"].zero_grad()
    exec(block("import TokenOutputs"), names)
    for name, gradient in by_head.items():
        assert torch.allclose(names[name].weight.grad, gradient, atol=1e-6)
    assert torch.allclose(names["log_probs"], before.log_probs, atol=1e-5)
    assert float(names["total"] / names["number"]) == 1.0

    exec(block("import schedule"), names)
    micro_batches = names["micro_batches"]
    assert len(micro_batches) == 2 and len(micro_batches[0]) == len(micro_batches[1])
    assert sorted(id_ for rank in micro_batches for batch in rank for id_ in batch.sample_ids) == [0, 1, 2, 3, 4]
    assert all(sum(batch.lengths) <= 8 for rank in micro_batches for batch in rank)


def test_the_scores_of_the_page_are_right(capsys):
    exec(block("import pass_at_k"), {})
    first, second, third = capsys.readouterr().out.splitlines()
    assert float(first) == 0.9  # 1 - C(13, 8) / C(16, 8)
    assert ast.literal_eval(second) == {"avg@3": pytest.approx(2 / 3), "pass@3": 1.0, "maj@3": 1.0}
    assert third == "1.0 True"


def test_the_notebook_reads_the_run_of_the_demo(tmp_path, monkeypatch):
    notebook = json.loads((ROOT / "examples" / "notebooks" / "run.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    printed = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "stored without the output of a machine"
            with redirect_stdout(io.StringIO()) as out:
                exec("".join(cell["source"]), names)
            printed.append(out.getvalue())
    assert printed[0].startswith("3 steps") and all(printed)
    assert "held out, after step 3: 0.750" in printed[2] and "time/rollout" in printed[3]
    assert "'What is 3+0?' pass@2 0.83" in printed[4]  # two right of four: 1 - 1/6
    assert "advantages: -0.80 to 1.20" in printed[5]
