"""The ladder of acceptance: verdicts follow from exit codes and files, and the first red rung is the last."""

import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from launch.acceptance import verdicts
from launch.acceptance.__main__ import climb, main
from launch.acceptance.ladder import LADDER
from launch.acceptance.report import GREEN, NOT_REACHED, RED, SKIPPED
from launch.acceptance.rung import Attempt, Inputs, Red, Rung, RungVerdict
from launch.acceptance.sizes import Layout, Sizes, sizes_of
from launch.preflight.nodes import NodeFinding
from megatron_dapo.common.errors import UserError

pytestmark = pytest.mark.unit

SIZES = Sizes(0, Layout(), Layout(), Layout(), num_servers=1)
STEP = {"actor/loss": 0.5, "actor/grad_norm": 2.0, "actor/entropy": 3.0, "actor/rollout_kl": -0.25}


def green(attempt: Attempt) -> RungVerdict:
    return RungVerdict("well", {"speed": 7.0, "kind": "a|b"})


def red(attempt: Attempt) -> RungVerdict:
    attempt.log.parent.mkdir(exist_ok=True)
    attempt.log.write_text("the cause\n")
    attempt.commands.append("python -m something")
    raise Red("it broke")


def rung(name: str, climb=green, limit_s: float = 30.0, **more) -> Rung:
    return Rung(name, f"Is {name} well?", limit_s, climb, **more)


@pytest.fixture
def inputs(tmp_path) -> Inputs:
    return Inputs(SIZES, tmp_path)


def report(inputs: Inputs) -> dict:
    return json.loads((inputs.folder / "report.json").read_text())


def test_the_first_red_rung_is_the_last_and_the_report_says_where_to_look(inputs, capsys):
    results = climb([rung("a"), rung("b", red), rung("c")], inputs)
    assert [result.state for result in results] == [GREEN, RED, NOT_REACHED]
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["green", "a"], ["red", "b"]]
    content = report(inputs)
    assert not content["is_accepted"] and content["summary"].startswith("RED at b after 0 s: it broke; its log is ")
    assert [each["state"] for each in content["rungs"]] == [GREEN, RED, NOT_REACHED]
    assert content["rungs"][0]["numbers"] == {"speed": 7.0, "kind": "a|b"}
    page = (inputs.folder / "report.md").read_text()
    assert "    the cause\n" in page and "    python -m something\n" in page and "| c | not reached |" in page


def test_a_rung_that_this_machine_cannot_have_is_skipped_with_its_reason(inputs):
    results = climb([rung("a", red, needs=lambda inputs: "there is no GPU"), rung("b")], inputs)
    assert [(result.state, result.text) for result in results] == [(SKIPPED, "there is no GPU"), (GREEN, "well")]
    assert report(inputs)["is_accepted"] and report(inputs)["summary"] == "ACCEPTED in 0 s; skipped: a"


def test_a_climb_that_starts_higher_up_accepts_nothing(inputs):
    results = climb([rung("a", red), rung("b"), rung("c")], inputs, start="b")
    assert [result.state for result in results] == [NOT_REACHED, GREEN, GREEN]
    assert not report(inputs)["is_accepted"]
    assert report(inputs)["summary"] == "NOT ACCEPTED after 0 s: green so far, without a"


def test_a_report_is_there_after_every_rung(inputs):
    def look(attempt: Attempt) -> RungVerdict:
        assert [each["state"] for each in report(inputs)["rungs"]] == [GREEN, NOT_REACHED]
        assert not report(inputs)["is_accepted"]
        return RungVerdict("")

    assert climb([rung("a"), rung("b", look)], inputs)[1].state == GREEN


def test_files_that_cannot_be_judged_make_their_rung_red(inputs):
    def judge(attempt: Attempt) -> RungVerdict:
        return verdicts.layout([{}], [STEP], on_gpus=False)

    (result,) = climb([rung("a", judge)], inputs)
    assert result.state == RED and result.text.startswith("its files are not what they should be (KeyError: ")


@pytest.fixture
def modules(tmp_path, monkeypatch) -> Path:
    """A folder whose modules the rungs' programs can be."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_a_program_that_fails_makes_its_rung_red_and_its_output_is_kept(inputs, modules):
    (modules / "failing.py").write_text("import sys; print('out', sys.argv[1]); sys.exit(3)")
    (result,) = climb([rung("a", lambda attempt: attempt.module("failing", "of it"))], inputs)
    assert result.state == RED and result.text.startswith("failing ended with exit code 3; its log is ")
    assert Path(result.log).read_text() == "$ python -m failing 'of it'\nout of it\n"


def test_a_program_that_does_not_end_is_ended_at_the_rungs_limit(inputs, modules):
    (modules / "sleeping.py").write_text("import time; time.sleep(600)")
    start = time.monotonic()
    (result,) = climb([rung("a", lambda attempt: attempt.module("sleeping"), limit_s=0.2)], inputs)
    assert result.text.startswith("sleeping had not ended after the rung's 0.2 s") and time.monotonic() - start < 15


def test_a_program_is_killed_with_what_it_started_at_the_moment_that_was_asked_for(inputs, modules):
    started = modules / "started"
    child = f"open({str(started)!r}, 'w').close(); import time; time.sleep(600)"
    (modules / "parent.py").write_text(
        f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"open({str(modules / 'pid')!r}, 'w').write(str(child.pid))\nchild.wait()\nprint('it goes on')\n"
    )
    attempt = Attempt(rung("a"), inputs)
    attempt.module_killed("parent", when=started.exists)
    status = Path(f"/proc/{(modules / 'pid').read_text()}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()
    assert "it goes on" not in attempt.log.read_text()


def test_a_program_that_ends_before_it_is_killed_shows_nothing(inputs, modules):
    (modules / "short.py").write_text("")
    with pytest.raises(Red, match="short ended with exit code 0 before it could be killed"):
        Attempt(rung("a"), inputs).module_killed("short", when=lambda: False)


def metrics(tmp_path: Path, *lines: dict) -> Path:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(STEP | {"time": 0.0} | line) + "\n" for line in lines))
    return file


def test_a_run_must_have_written_each_of_its_steps_with_finite_numbers(tmp_path):
    assert len(verdicts.records(metrics(tmp_path, {"step": 1}, {"step": 2}), 2)) == 2
    for lines, words in (
        ([{"step": 1}], "has the steps \\[1\\], not those from 1 to 2"),
        ([{"step": 1}, {"step": 2, "actor/grad_norm": math.nan}], "actor/grad_norm of step 2 is nan"),
    ):
        with pytest.raises(Red, match=words):
            verdicts.records(metrics(tmp_path, *lines), 2)
    with pytest.raises(Red, match="wrote no"):
        verdicts.records(tmp_path / "none", 2)


def test_a_layout_may_differ_by_rounding_alone():
    assert verdicts.layout([STEP | {"actor/grad_norm": 2.0001}], [STEP], on_gpus=False).numbers["grad_norm"] == 2.0001
    for name in verdicts.COMPARED:
        with pytest.raises(Red, match=name):
            verdicts.layout([STEP | {name: STEP[name] * 1.001}], [STEP], on_gpus=False)
        with pytest.raises(Red, match=name):
            verdicts.layout([STEP | {name: STEP[name] * 1.2}], [STEP], on_gpus=True)
        with pytest.raises(Red, match=name):
            verdicts.layout([STEP | {name: math.nan}], [STEP], on_gpus=True)


def test_a_resumed_run_is_the_same_to_the_bit_on_a_cpu():
    steps = [STEP | {"step": 1}, STEP | {"step": 2}]
    assert "2 steps, the same bits" in verdicts.resumed(steps, steps, on_gpus=False).text
    changed = [steps[0], steps[1] | {"actor/loss": math.nextafter(0.5, 1)}]
    with pytest.raises(Red, match="actor/loss of step 2 is 0.5"):
        verdicts.resumed(changed, steps, on_gpus=False)
    assert "but for rounding" in verdicts.resumed(changed, steps, on_gpus=True).text


SERVED = {
    "step": 1,
    "weight_sync/num_servers": 2,
    "weight_sync/verify_s": 0.1,
    "time/weight_sync": 0.2,
    "actor/rollout_abs_diff": 1e-7,
    "reward/mean": 0.5,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight_sync/num_servers": 1}, "after step 1 1 of 2 servers held the weights, read back"),
        ({"weight_sync/verify_s": None}, "2 of 2 servers held the weights, not read back"),
        ({"actor/rollout_abs_diff": 0.1}, "servers and trainer differ by 1.0e-01"),
        ({"actor/rollout_abs_diff": None}, "no step had tokens"),
    ],
)
def test_servers_must_have_the_weights_and_agree(change, words):
    assert verdicts.servers([SERVED], 2, on_gpus=False).numbers["push_s"] == 0.2
    line = {name: value for name, value in (SERVED | change).items() if value is not None}
    with pytest.raises(Red, match=words):
        verdicts.servers([line], 2, on_gpus=False)


def test_a_model_must_come_back_byte_for_byte_and_whole(tmp_path):
    source, back = tmp_path / "source", tmp_path / "back"
    for folder in (source, back):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")
    (source / "README.md").write_text("not a part of the model")
    assert verdicts.round_trip(source, back).numbers == {"bytes": 9}
    (back / "model.safetensors").write_bytes(b"weightz")
    with pytest.raises(Red, match="byte for byte"):
        verdicts.round_trip(source, back)
    (back / "model.safetensors").unlink()
    with pytest.raises(Red, match="model.safetensors of .* did not come back"):
        verdicts.round_trip(source, back)


def measured(dtype: str, failure: str | None = None, **errors: float) -> dict:
    row = {"provider": "ours", "failure": failure, "errors": errors}
    return {"results": [{"shape": {"name": "7B"}, "dtype": dtype, "rows": [row]}]}


def test_kernels_must_be_near_float64():
    head, loss = dict.fromkeys(verdicts.HEAD_BOUNDS["bfloat16"], 1e-6), {"loss_sum_rel": 1e-7}
    good = measured("bfloat16", **head), measured("float32", **loss)
    assert verdicts.kernels(*good).numbers["head/log_prob_max"] == 1e-6
    for bad, words in (
        ((measured("bfloat16", **head | {"log_prob_max": 1e-3}), good[1]), "ours at 7B: log_prob_max is 1.0e-03"),
        ((measured("bfloat16", **head | {"entropy_max": math.nan}), good[1]), "entropy_max is nan"),
        ((measured("bfloat16", "out of memory", **head), good[1]), "ours at 7B: out of memory"),
        ((good[0], measured("float32")), "the loss was not compared"),
    ):
        with pytest.raises(Red, match=words):
            verdicts.kernels(*bad)


def test_programs_that_see_other_gpus_than_the_ladder_are_noticed():
    versions = dict.fromkeys("torch megatron-core sglang transformer-engine".split(), "1")
    assert verdicts.environment({"gpus": ["H100"] * 8, "versions": versions}, 8).text.startswith("8 x H100; torch 1")
    for gpus, planned in (([], 8), (["H100"], 0)):
        with pytest.raises(Red, match=f"see {len(gpus)} GPUs, the ladder was planned for {planned}"):
            verdicts.environment({"gpus": gpus, "versions": versions}, planned)


def test_the_preflights_table_must_have_an_all_reduce_and_no_problem():
    reduced, limits = NodeFinding("n1", "all-reduce", "300 GB/s over 8 ranks"), NodeFinding("n1", "limits", "few")
    assert verdicts.node([asdict(limits), asdict(reduced)]).text == "all-reduce 300 GB/s over 8 ranks"
    with pytest.raises(Red, match="measured no all-reduce"):
        verdicts.node([asdict(limits)])
    with pytest.raises(Red, match="raise them"):
        verdicts.node([asdict(reduced), asdict(replace(limits, problem="raise them"))])


def test_speed_is_the_median_without_the_first_step_and_none_is_red():
    name = "perf/update_tokens_per_s_per_gpu"
    lines = [{name: value} for value in (1.0, 30.0, 10.0, 20.0)]
    verdict = verdicts.throughput(lines, "it")
    assert verdict.numbers == {name: 20.0} and verdict.text == "it: 20 tokens/s per rank of updates"
    with pytest.raises(Red, match="no tokens per second"):
        verdicts.throughput([{}, {}], "it")


def test_the_sizes_fit_the_gpus():
    for num_gpus in (2, 3, 4, 8, 16):
        sizes = sizes_of(num_gpus)
        beside = sizes.beside_servers.num_ranks + sizes.num_servers * sizes.server_tp
        assert max(sizes.whole.num_ranks, sizes.resumed.num_ranks, beside) <= sizes.num_gpus <= num_gpus
    for sizes in (sizes_of(0), sizes_of(8)):
        assert (sizes.whole, sizes.num_servers) == (Layout(2, 2, 2), 2)
    with pytest.raises(UserError, match="offers 1 GPU, but the ladder needs 2"):
        sizes_of(1)


def test_without_a_run_to_measure_there_is_no_speed(inputs):
    (rung,) = [rung for rung in LADDER if rung.name == "throughput"]
    assert "neither --config nor the rung `layout`" in rung.needs(inputs)
    assert rung.needs(replace(inputs, recipe=("--config", "my.yaml"))) is None
    inputs.run("layout").path.mkdir(parents=True)
    inputs.run("layout").metrics.touch()
    assert rung.needs(inputs) is None


def test_the_list_has_every_rung_and_starts_nothing(capsys, tmp_path):
    assert main(["--list", "--output", str(tmp_path / "new")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [rung.name for rung in LADDER] and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["trainer.seed=2"], "trainer.seed=2 sets a key of the recipe to measure; name that with --config FILE."),
        (["--output", "FOLDER"], "is not empty; give a new folder"),
        (["--config-name", "dapo_7b"], "actor_rollout_ref.model.path is"),
        (["--config-name", "dapo_7b", "trainer.sed=1"], "nearest known key is trainer.seed"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(words, sentence, capsys, tmp_path):
    (tmp_path / "file").touch()
    assert main([str(tmp_path) if word == "FOLDER" else word for word in words]) == 2
    assert sentence in capsys.readouterr().err


def test_every_rung_has_a_limit_and_a_name_of_its_own_for_its_log():
    assert len({rung.name for rung in LADDER}) == len(LADDER)
    assert all(rung.limit_s > 0 for rung in LADDER)
