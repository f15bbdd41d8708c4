"""The command eval: figures, answers kept over a kill, comparisons,
and mistakes in one sentence."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatron_dapo.__main__ import main
from megatron_dapo.commands.evaluation.answer_file import AnswerFile
from megatron_dapo.config.derived import shares_gpus
from megatron_dapo.rewards.worker_pool import WorkerLost
from megatron_dapo.servers import supervisor
from megatron_dapo.servers.server_error import ServerError
from megatron_dapo.storage.lease import Holder, LeaseFolder
from megatron_dapo.storage.run_folder import RunFolder
from tests.answer_records import ANSWER
from tests.fake_rollout import RIGHT, WORDS, WRONG, Script, rollout_folder, server_in_thread
from tests.helpers import REPOSITORY
from tests.model_json import MODEL_JSON

pytestmark = pytest.mark.unit

ROLLOUT = "actor_rollout_ref.rollout"
WORDS_OF = {0: ("right", "wrong", "wrong", "wrong_long"), 1: ("right", "right", "wrong", "right"), 2: RIGHT}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With a model of readable shape, and prompts p0, p1 of aime and p2 of amc."""
    for made in rollout_folder(tmp_path, monkeypatch):
        (made / "config.json").write_text(json.dumps({**MODEL_JSON, "vocab_size": len(WORDS)}))
        rows = [{"prompt": f"p{number}", "label": "right", "data_source": source}
                for number, source in enumerate(("aime", "aime", "amc"))]  # fmt: skip
        (made / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        yield made


def command(folder, server, *more, output="out"):
    return [
        "eval", f"--model={folder}", f"--data={folder}/held_out.jsonl", f"--output={folder}/{output}",
        *([f"--server={server.url}"] if server else []),
        "data.apply_chat_template=false", "data.max_prompt_length=4", "data.max_response_length=8",
        f"{ROLLOUT}.val_n=4", f"{ROLLOUT}.val_temperature=1.0", f"{ROLLOUT}.server.startup_timeout_s=20.0",
        "reward.function=fake_rewards:score", "reward.num_workers=1", *more,
    ]  # fmt: skip


def kept(folder, output="out"):
    return [json.loads(line) for line in (folder / output / "answers.jsonl").read_text().splitlines()]


def results(folder, output="out"):
    return json.loads((folder / output / "results.json").read_text())


def sentence(capsys):
    """The one mistake of the command."""
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[0] == "1 mistake to correct:", lines
    return lines[1]


def test_figures_per_data_source_and_over_all_come_from_the_kept_answers(folder, capsys):
    with server_in_thread(Script(WORDS_OF)) as server:
        assert main(command(folder, server)) == 0
        figures = results(folder)["figures"]
        values = {source: {name: each["value"] for name, each in some.items() if name != "num_prompts"}
                  for source, some in figures.items()}  # fmt: skip
        assert values["aime"] == pytest.approx(
            {"avg@4": 0.5, "pass@4": 1, "maj@4": 0.5, "reward": 0.5, "length": 22 / 8, "truncated": 1 / 8}
        )
        assert values["amc"]["maj@4"] == 1 and values["all"]["avg@4"] == pytest.approx(2 / 3)
        assert [figures[source]["num_prompts"] for source in ("aime", "amc", "all")] == [2, 1, 3]
        bounds = figures["all"]["avg@4"]
        assert bounds["low"] == 0.25 and bounds["high"] == 1 and figures["amc"]["avg@4"]["low"] is None
        shown = capsys.readouterr().out
        assert re.search(r"aime: 2 prompts\n  avg@4 +0\.500   \[0\.250, 0\.750\]", shown) and "tokens/s" in shown
        assert {record["step"] for record in kept(folder)} == {1}, "the servers' weight version"
        num_requests = len(server.requests)
        before = results(folder)
        assert main(command(folder, server)) == 0 and len(server.requests) == num_requests, "all is there"
        assert results(folder) == before


def test_after_kill_9_the_same_command_goes_on_and_asks_for_no_answer_twice(folder, capsys):
    with server_in_thread(Script(WORDS_OF)) as server:
        server.script.delays = [600.0] * 8 + [0.0] * 4
        environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{folder}"}
        run = [sys.executable, "-m", "megatron_dapo", *command(folder, server)]
        with subprocess.Popen(run, cwd=folder, env=environment, stdout=subprocess.DEVNULL) as process:
            answers, deadline = folder / "out" / "answers.jsonl", time.monotonic() + 60
            while not answers.exists() or answers.read_bytes().count(b"\n") < 4:
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.02)
            process.kill()
        first = kept(folder)
        assert len(first) == 4 and len(server.requests) == 12
        with answers.open("ab") as file:
            file.write(b'{"step": 1, "prompt_index": 2, "num')  # cut off by a kill
        server.script.delays = []
        assert main(command(folder, server)) == 0
        assert len(server.requests) == 12 + 8
    assert "4 of 12 answers are there already" in capsys.readouterr().out
    records = kept(folder)
    assert records[:4] == first
    assert Counter((record["prompt_index"], record["number"]) for record in records) == Counter(
        (prompt, number) for prompt in range(3) for number in range(4)
    )


SERVER = """
import asyncio, sys
from tests.fake_rollout import FakeServer, Script

async def main():
    server = FakeServer(Script(), version=0)
    server.port = int(sys.argv[1])
    await server.start()
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_it_starts_servers_if_none_is_named_and_ends_them(folder, monkeypatch):
    def stand_in(config, host, port, gpus):
        return supervisor.ServerCommand((sys.executable, "-c", SERVER, str(port)), {"PYTHONPATH": str(REPOSITORY)})

    monkeypatch.setattr(supervisor, "sglang_command", stand_in)
    assert main(command(folder, None, f"{ROLLOUT}.server.num_servers=2")) == 0
    assert len(kept(folder)) == 12
    logs = (folder / "out" / "logs" / "eval.log").read_text()
    (pids := re.findall(r"server-\d starts at .* \(pid (\d+)", logs)).sort()
    assert len(pids) == 2 and not any(psutil.pid_exists(int(pid)) for pid in pids)


def test_an_evaluation_ignores_shared_gpus_and_fp8_weights(folder, monkeypatch):
    """Its servers have no trainer beside them, follow no run's lease, and read the checkpoint."""
    configs = []

    def stand_in(config, host, port, gpus):
        configs.append(config)
        return supervisor.ServerCommand((sys.executable, "-c", SERVER, str(port)), {"PYTHONPATH": str(REPOSITORY)})

    monkeypatch.setattr(supervisor, "sglang_command", stand_in)
    LeaseFolder(RunFolder(folder / "out").lease).write(Holder.TRAINER)
    keys = ["actor_rollout_ref.hybrid_engine=true", f"{ROLLOUT}.quantization=fp8", f"{ROLLOUT}.server.num_servers=2"]
    assert main(command(folder, None, *keys)) == 0
    assert len(kept(folder)) == 12 and not any(shares_gpus(config) for config in configs)
    assert {config.actor_rollout_ref.rollout.quantization for config in configs} == {None}


def test_two_servers_answer_and_must_hold_the_same_weights(folder, capsys):
    with server_in_thread() as first, server_in_thread() as second:
        assert main(command(folder, first, f"--server={second.url}")) == 0
        assert first.requests and second.requests and len(first.requests) + len(second.requests) == 12
        second.version = 2
        assert main(command(folder, first, f"--server={second.url}", output="other")) == 2
        assert "hold different weight versions" in sentence(capsys)


def test_answers_of_other_servers_or_weights_are_not_shown_as_this_models(folder, capsys):
    """Although all are there already."""
    with server_in_thread() as first, server_in_thread() as second:
        assert main(command(folder, first)) == 0
        capsys.readouterr()
        for server, version, words in (
            (second, 1, f"servers was ['{first.url}'] and is ['{second.url}']"),
            (first, 7, "weight_version was 1 and is 7"),
            (None, 1, f"servers was ['{first.url}'] and is None"),
        ):
            first.version = version
            assert main(command(folder, server)) == 2 and words in sentence(capsys)


def test_another_checkpoint_is_converted_again(tmp_path, monkeypatch):
    from megatron_dapo.commands.evaluation import command as module

    def convert(words, check):
        output = Path(words[-1])
        output.mkdir(parents=True)  # so the old folder is gone
        (output / "config.json").write_text("{}")
        converted.append(Path(words[-3]).name)
        return subprocess.CompletedProcess(words, 0)

    converted = []
    monkeypatch.setattr(module.subprocess, "run", convert)
    for name in ("step_1", "step_2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.distcp").touch()
    for name in ("step_1", "step_1", "step_2"):
        assert module._converted(tmp_path / name, tmp_path / "out") == tmp_path / "out" / "model"
    assert converted == ["step_1", "step_2"]
    os.utime(tmp_path / "step_2" / "0.distcp", (1, 1))
    module._converted(tmp_path / "step_2", tmp_path / "out")
    assert converted == ["step_1", "step_2", "step_2"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/step_000001"])
def test_answers_are_not_put_into_the_folder_of_a_run(folder, name, capsys):
    (folder / "out" / name).mkdir(parents=True)
    assert main(command(folder, None)) == 2
    assert "out is the folder of a run" in sentence(capsys) and not (folder / "out" / "answers.jsonl").exists()


def test_verdicts_of_answers_before_a_kill_count_too(folder, capsys):
    """As after a kill in the middle, and after one before the check of the last answer."""
    for num_kept in (11, 12):
        with server_in_thread() as server:
            assert main(command(folder, server)) == 0
            records = [{**record, "reward_error": "crash: -9"} for record in kept(folder)]
            (folder / "out" / "answers.jsonl").write_text(
                "".join(json.dumps(each) + "\n" for each in records[:num_kept])
            )
            capsys.readouterr()
            assert main(command(folder, server)) == 2
            assert f"{num_kept} of 12 responses got no verdict (crash {num_kept})" in sentence(capsys)
            assert len(kept(folder)) == 12 - num_kept, "what has no verdict is asked for again"
            assert main(command(folder, server)) == 0 and len(kept(folder)) == 12
        shutil.rmtree(folder / "out")


def test_verdicts_are_checked_although_nobody_is_asked(folder, capsys):
    with server_in_thread() as server:
        assert main(command(folder, server)) == 0
    settings = folder / "out" / "settings.json"
    written = {**json.loads(settings.read_text()), "servers": None}
    del written["weight_version"]
    settings.write_text(json.dumps(written))
    assert main(command(folder, None)) == 0
    records = [{**record, "reward_error": "crash: -9"} for record in kept(folder)]
    (folder / "out" / "answers.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    capsys.readouterr()
    assert main(command(folder, None)) == 2 and kept(folder) == []
    assert "12 of 12 responses got no verdict" in sentence(capsys)


def test_another_mistake_costs_no_answers_without_a_verdict(folder, capsys):
    with server_in_thread() as server:
        assert main(command(folder, server)) == 0
        first, *others = kept(folder)
        failed = {**first, "reward_error": "crash: -9"}
        (folder / "out" / "answers.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (failed, *others)))
        server.version = 7
        assert main(command(folder, server)) == 2
    assert len(kept(folder)) == 12


@pytest.mark.parametrize("error", [
    WorkerLost("worker 7: gone"), ServerError("http://a:1", "/model_info", None, "gone"), OSError(28, "gone", "x"),
])  # fmt: skip
def test_what_fails_is_one_sentence(folder, error, monkeypatch, capsys):
    from megatron_dapo.commands.evaluation import answering

    async def answer(*_):
        raise error

    monkeypatch.setattr(answering, "answer", answer)
    with server_in_thread() as server:
        assert main(command(folder, server)) == 1
    assert f"The evaluation failed: {error}\n0 of 12 answers" in capsys.readouterr().err


def test_a_server_that_does_not_say_its_version_is_not_waited_for_as_for_weights():
    from megatron_dapo.commands.evaluation.answering import _common_version

    waits = []

    async def weight_version(timeout_s=600.0):
        waits.append(timeout_s)
        return 3

    server = SimpleNamespace(url="http://a:1", client=SimpleNamespace(weight_version=weight_version))
    assert asyncio.run(_common_version(SimpleNamespace(servers=[server]))) == 3 and waits[0] <= 10


def test_what_is_left_out_of_the_files_is_said_and_kept_with_the_figures(folder, capsys):
    with (folder / "held_out.jsonl").open("a") as file:
        file.write('{"prompt": "p0", "label": "right", "data_source": "aime"}\n')
    with server_in_thread() as server:
        assert main(command(folder, server)) == 0
    assert "held_out.jsonl: 3 prompts of 4 rows, 1 duplicates" in capsys.readouterr().out
    (file,) = results(folder)["files"]
    assert (file["num_rows"], file["num_kept"], file["num_duplicates"], file["num_overlong"]) == (4, 3, 1, 0)


def test_answers_are_whole_lines_despite_faults_of_the_disk(tmp_path, monkeypatch):
    path = tmp_path / "answers.jsonl"
    records = [{**ANSWER, "number": number, "text": "a" * 50} for number in range(4)]
    path.write_text(json.dumps(records[0]))  # a kill cut off its newline
    answers = AnswerFile(path)
    answers.add(records[1])
    assert AnswerFile(path).records == records[:2]
    answers._file = ShortWrites(answers._file, num_before_full=None)
    answers.add(records[2])
    assert AnswerFile(path).records == records[:3]
    answers._file = ShortWrites(answers._file, num_before_full=2)
    with pytest.raises(OSError, match=f"No space.*{path}"):
        answers.add(records[3])
    assert AnswerFile(path).records == answers.records == records[:3]


class ShortWrites:
    """A file that takes 7 bytes per write, and after some writes none."""

    def __init__(self, file, num_before_full):
        self._file, self._num_left = file, num_before_full

    def write(self, content):
        if self._num_left is not None:
            if not self._num_left:
                raise OSError(28, "No space left on device")
            self._num_left -= 1
        return self._file.write(content[:7])

    def __getattr__(self, name):
        return getattr(self._file, name)


def test_answers_of_another_evaluation_are_not_mixed_with(folder, capsys):
    with server_in_thread() as server:
        assert main(command(folder, server)) == 0
        capsys.readouterr()
        for change in (f"{ROLLOUT}.val_temperature=0.5", "data.max_response_length=7"):
            assert main(command(folder, server, change)) == 2
            assert (
                "has the answers of another evaluation" in (said := sentence(capsys)) and change.split("=")[0] in said
            )
        server.version = 7
        assert main(command(folder, server, f"{ROLLOUT}.val_n=8")) == 2
        assert "val_n was 4 and is 8" in sentence(capsys)


def test_mistakes_are_one_sentence_each(folder, capsys):
    (folder / "no_column.jsonl").write_text('{"question": "p0", "label": "right"}\n')
    (folder / "raises.py").write_text("def score(*args, **kwargs):\n    raise LookupError('no such table')\n")
    with server_in_thread() as server:
        for change, words in (
            ("reward.function=fake_rewards:no_such_score", "no_such_score"),
            ("reward.function=math_daop", "the nearest is math_dapo"),
            (f"data.val_files=[{folder}/missing.jsonl]", "missing.jsonl, which is not a file here"),
            (f"data.val_files=[{folder}/no_column.jsonl]", "no_column.jsonl, row 1"),
            (f"actor_rollout_ref.model.path={folder}/nothing", "is not a folder here"),
            (f"{ROLLOUT}.val_temperature=0.0", "all answers to a prompt are the same"),
            (f"{ROLLOUT}.server_urls=[localhost]", "not of the form http://host:port"),
            ("reward.function=raises:score", "12 of 12 responses got no verdict (exception 12)"),
        ):
            assert main(command(folder, server, change)) == 2, change
            assert words in sentence(capsys), change
        assert kept(folder) == [], "what has no verdict is asked for again"
        assert main(command(folder, server)) == 0 and len(kept(folder)) == 12
    absent = ["--server=http://127.0.0.1:9", f"{ROLLOUT}.server.startup_timeout_s=0.3"]
    assert main(command(folder, None, *absent, output="absent")) == 2
    assert "--server names http://127.0.0.1:9, not all of them healthy within 0.3 s" in sentence(capsys)
    assert main(["eval", f"--data={folder}/held_out.jsonl"]) == 2
    assert "give --model DIR, or --checkpoint DIR" in sentence(capsys)


def test_answers_survive_the_loss_of_servers(folder, capsys):
    with server_in_thread() as server:
        server.failures = [500] * 100
        assert main(command(folder, server, f"{ROLLOUT}.max_retries=1")) == 1
    said = capsys.readouterr().err
    assert "The evaluation failed: a request" in said and "the same command goes on" in said


def test_a_comparison_pairs_the_prompts_and_names_changed_ones(folder, capsys):
    with server_in_thread(Script(WORDS_OF)) as server:
        assert main(command(folder, server, output="a")) == 0
        server.script.responses = {0: RIGHT, 1: ("right", "right", "wrong", "right"), 2: WRONG}
        assert main(command(folder, server, output="b")) == 0
    capsys.readouterr()
    assert main(["eval", "--compare", f"{folder}/a", f"{folder}/b/answers.jsonl"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"aime: 2 prompts\n.*\n  avg +0\.500 +0\.875 +\+0\.375   \[\+0\.000, \+0\.750\]", shown)
    assert re.search(r"all: 3 prompts\n.*\n  avg +0\.667 +0\.583 +-0\.083", shown)
    assert re.search(r"solved only by B \(.*\): 1\n  0\.25 -> 1\.00   aime   p0\n", shown)
    assert re.search(r"solved only by A \(.*\): 1\n  1\.00 -> 0\.00   amc   p2\n", shown)
    assert main(["eval", "--compare", f"{folder}/a", f"{folder}/nothing"]) == 2
    assert "give the folder of an evaluation" in sentence(capsys)


def test_a_model_of_a_run_is_asked_as_that_run_asks_it(folder, monkeypatch, capsys):
    """Its config names reward, lengths and files; the servers
    of the run are not this evaluation's."""
    from megatron_dapo.commands.evaluation import command as module

    asked = []
    monkeypatch.setattr(module, "_Evaluation", lambda config, *_: asked.append(config) or Done())
    run = folder / "runs" / "demo"
    (run / "model").mkdir(parents=True)
    (run / "model" / "config.json").write_text((folder / "config.json").read_text())
    overrides = command(folder, None)[4:]
    lines = [f"data.val_files=[{folder}/held_out.jsonl]", f"{ROLLOUT}.server_urls=[http://gone:1]", *overrides]
    from megatron_dapo.config.loader import load_config, to_yaml

    (run / "config.yaml").write_text(to_yaml(load_config(None, lines)))
    monkeypatch.chdir(folder)
    assert main(["eval", "--model", str(run / "model"), f"{ROLLOUT}.val_n=2"]) == 0
    (config,) = asked
    assert config.reward.function == "fake_rewards:score" and config.data.max_response_length == 8
    assert config.actor_rollout_ref.rollout.server_urls == [] and config.actor_rollout_ref.rollout.val_n == 2
    assert config.trainer.run_dir == "evals/demo-model-held_out"


class Done:
    def run(self):
        return 0


def test_ctrl_c_ends_the_command_and_says_how_to_go_on(folder):
    with server_in_thread() as server:
        server.hold.clear()
        environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{folder}"}
        run = [sys.executable, "-m", "megatron_dapo", *command(folder, server)]
        with subprocess.Popen(run, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
            deadline = time.monotonic() + 60
            while server.num_open < 12:
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=30)
    assert process.returncode == 130 and "0 of 12 answers" in said and "the same command goes on" in said
