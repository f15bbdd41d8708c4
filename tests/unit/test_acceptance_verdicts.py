"""Verdicts from the files of the ladder's programs: each has its red cases."""

import json
import math
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path

import pytest

from launch.acceptance import verdicts
from launch.acceptance.rung import Red
from launch.acceptance.server_kills import StartedServer
from launch.preflight.nodes import NodeFinding

pytestmark = pytest.mark.unit

STEP = {
    "actor/loss": 0.5,
    "actor/grad_norm": 2.0,
    "actor/entropy": 3.0,
    "actor/rollout_kl": -0.25,
    "actor/ppo_kl": 0.125,
}


def metrics(tmp_path: Path, *lines: dict) -> Path:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(STEP | {"time": 0.0} | line) + "\n" for line in lines))
    return file


def test_a_run_must_have_written_each_of_its_steps_with_finite_numbers(tmp_path):
    assert len(verdicts.records(metrics(tmp_path, {"step": 1}, {"step": 2}), 2)) == 2
    for lines, words in (
        ([{"step": 1}], "has the steps \\[1\\], not 1 to 2"),
        ([{"step": 1}, {"step": 2, "actor/grad_norm": math.nan}], "actor/grad_norm of step 2 is no finite number"),
        ([{"step": 1}, {"step": 2, "actor/loss": None}], "actor/loss of step 2 is no finite number"),
    ):
        with pytest.raises(Red, match=words):
            verdicts.records(metrics(tmp_path, *lines), 2)
    with pytest.raises(Red, match="wrote no"):
        verdicts.records(tmp_path / "none", 2)


def test_a_null_metric_is_out_of_every_bound(tmp_path):
    """metrics.jsonl has null for NaN and inf."""
    (line,) = verdicts.records(metrics(tmp_path, SERVED | {"actor/entropy": None, "actor/rollout_abs_diff": None}), 1)
    with pytest.raises(Red, match="actor/entropy is nan"):
        verdicts.layout([line], [STEP], on_gpus=True)
    with pytest.raises(Red, match="actor/entropy of step 1"):
        verdicts.resumed([line], [STEP | {"step": 1}], 1, on_gpus=True)
    with pytest.raises(Red, match="differ by nan"):
        verdicts.servers([SERVED, line], 2, on_gpus=True)


def test_a_step_whose_ratio_is_1_compares_neither_old_log_probs_nor_clipping():
    still = STEP | {"actor/ppo_kl": 0.0}
    with pytest.raises(Red, match="no ratio moved"):
        verdicts.layout([still], [still], on_gpus=False)


def test_a_layout_may_differ_only_by_rounding():
    assert verdicts.layout([STEP | {"actor/grad_norm": 2.0001}], [STEP], on_gpus=False).numbers["grad_norm"] == 2.0001
    for name in verdicts.COMPARED:
        with pytest.raises(Red, match=name):
            verdicts.layout([STEP | {name: STEP[name] * 1.001}], [STEP], on_gpus=False)
        with pytest.raises(Red, match=name):
            verdicts.layout([STEP | {name: STEP[name] * 1.4}], [STEP], on_gpus=True)
        with pytest.raises(Red, match=name):
            verdicts.layout([STEP | {name: math.nan}], [STEP], on_gpus=True)


def test_a_resumed_run_is_the_same_to_the_bit_on_a_cpu():
    steps = [STEP | {"step": 1}, STEP | {"step": 2}]
    verdict = verdicts.resumed(steps, steps, 1, on_gpus=False)
    assert verdict.text.startswith("2 steps, resumed after 1: the same bits")
    changed = [steps[0], steps[1] | {"actor/loss": math.nextafter(0.5, 1)}]
    with pytest.raises(Red, match="actor/loss of step 2 is 0.5"):
        verdicts.resumed(changed, steps, 1, on_gpus=False)
    assert "but for rounding" in verdicts.resumed(changed, steps, 1, on_gpus=True).text


def test_a_run_must_be_killed_between_its_first_checkpoint_and_its_last(tmp_path):
    for step in (1, 3):
        (tmp_path / f"step_{step:06d}").mkdir()
    assert verdicts.saved_before_the_kill(tmp_path, 4) == 3
    with pytest.raises(Red, match="checkpoint of step 3 of 3: its resume would show nothing"):
        verdicts.saved_before_the_kill(tmp_path, 3)
    with pytest.raises(Red, match="checkpoint of step 0 of 4"):
        verdicts.saved_before_the_kill(tmp_path / "none", 4)


def test_a_second_life_must_go_on_from_the_newest_checkpoint(tmp_path):
    log = tmp_path / "checkpoints.log"
    log.write_text("Resumed after step 2 from runs/a\n  not restored: nothing is missing\n")
    verdicts.resumed_after(log, 2)
    with pytest.raises(Red, match="resumed after step 2, its newest checkpoint is that of step 3"):
        verdicts.resumed_after(log, 3)
    log.write_text("Saved\n")
    with pytest.raises(Red, match="resumed nowhere"):
        verdicts.resumed_after(log, 2)


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


LEFT_OUT = "WARNING weight sync: left out http://h:2; the push is repeated. ConnectionError: reset\n"


SENT = "weight_sync/send_s"
TURN = {f"weight_sync/{phase}_s": 1.0 for phase in ("sleep", "park", "wake", "send")}
HELD = {"weight_sync/asleep_used_gb": 5.5, "weight_sync/parked_kept_gb": 0.25}


def turns(*changes: dict) -> list[dict]:
    """Two quiet steps, one in which all servers die asleep, and one with all of them again. changes:
    of the first steps."""
    steady = SERVED | TURN | HELD
    nobody = {name: value for name, value in steady.items() if name not in ("weight_sync/verify_s", SENT)}
    lines = [steady, steady, nobody | {"weight_sync/num_servers": 0}, steady]
    return [line | dict(change) for line, change in zip_longest(lines, changes, fillvalue={})]


def test_turns_on_the_same_gpus_must_leave_each_other_the_same_memory():
    asleep, _ = HELD
    verdict = verdicts.shared_gpus(turns({}, {asleep: 5.55}, {asleep: 5.6}, {asleep: 5.6}), 2, 1, on_gpus=True)
    assert verdict.numbers["asleep_used_gb"] == 5.6 and verdict.numbers["wake_s"] == 1.0
    for name in HELD:
        for later, words in (
            (HELD[name] + 0.1, "something is kept"),
            (50.0, "is 50.00, at most"),
            (math.nan, "is nan"),
        ):
            with pytest.raises(Red, match=words):
                verdicts.shared_gpus(turns({}, {name: later}), 2, 1, on_gpus=True)
        with pytest.raises(Red, match="at most"):
            verdicts.shared_gpus(turns({}, {}, {}, {name: 50.0}), 2, 1, on_gpus=True)
    several = turns(*4 * [{asleep: 12.0}])
    assert verdicts.shared_gpus(several, 2, 8, on_gpus=True)
    with pytest.raises(Red, match="at most 6.5 was expected"):
        verdicts.shared_gpus(several, 2, 1, on_gpus=True)
    on_cpu = [{name: value for name, value in line.items() if name not in HELD} for line in turns()]
    assert "parked_kept_gb" not in verdicts.shared_gpus(on_cpu, 2, 2, on_gpus=False).numbers


def test_servers_killed_asleep_miss_one_push_and_are_back_in_the_next():
    assert "killed asleep" in verdicts.shared_gpus(turns(), 2, 1, on_gpus=True).text
    for step, count, words in ((0, 1, "after step 1 1 of 2"), (2, 1, "not all died asleep"), (3, 0, "0 of 2")):
        changes = [{}, {}, {}, {}]
        changes[step] = {"weight_sync/num_servers": count}
        with pytest.raises(Red, match=words):
            verdicts.shared_gpus(turns(*changes), 2, 1, on_gpus=True)


def test_a_server_must_have_died_in_a_push_and_the_others_have_gone_on(tmp_path):
    log, died = tmp_path / "trainer-rank-0.log", StartedServer("server-1", "http://h:2", 7)
    log.write_text(LEFT_OUT)
    verdict = verdicts.lost_servers([SERVED, SERVED], log, died, 1, [12.0, 8.0], on_gpus=False)
    assert verdict.numbers["longest_away_s"] == 12.0
    assert "2 steps without a stop; server-1 died in a push; back after 12 s and 8 s" in verdict.text
    verdict = verdicts.lost_servers([SERVED, SERVED], log, died, 3, [12.0, 8.0], on_gpus=False)
    assert "server-1 died in a push at kill 3;" in verdict.text and verdict.numbers["kills_until_one_in_a_push"] == 3
    unread = {name: value for name, value in SERVED.items() if name != "weight_sync/verify_s"}
    for lines, text, words in (
        ([SERVED], LEFT_OUT.replace("h:2", "h:1"), "no push left out http://h:2"),
        ([SERVED], LEFT_OUT.replace("sync: left", "sync: pause: left"), "no push left out http://h:2"),
        ([SERVED, unread | {"step": 2}], LEFT_OUT, "after step 2 no server's weights were read back"),
        ([SERVED, SERVED | {"actor/rollout_abs_diff": 0.3}], LEFT_OUT, "differ by 3.0e-01"),
    ):
        log.write_text(text)
        with pytest.raises(Red, match=words):
            verdicts.lost_servers(lines, log, died, 1, [12.0], on_gpus=False)
    with pytest.raises(Red, match="no push left out a server"):
        verdicts.lost_servers([SERVED], log, None, 1, [12.0], on_gpus=False)


def test_a_run_of_any_length_must_have_every_step(tmp_path):
    assert len(verdicts.records(metrics(tmp_path, {"step": 1}, {"step": 2}), None)) == 2
    with pytest.raises(Red, match="has the steps \\[1, 3\\], not 1 to 3"):
        verdicts.records(metrics(tmp_path, {"step": 1}, {"step": 3}), None)


def test_a_model_must_come_back_byte_for_byte_and_whole(tmp_path):
    source, back = tmp_path / "source", tmp_path / "back"
    for folder in (source, back):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "tokenizer.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")
    (source / "README.md").write_text("not a part of the model")
    assert verdicts.round_trip(source, back).numbers == {"bytes": 11}
    (back / "model.safetensors").write_bytes(b"weightz")
    with pytest.raises(Red, match="byte for byte"):
        verdicts.round_trip(source, back)
    (back / "model.safetensors").unlink()
    (back / "tokenizer.json").unlink()
    with pytest.raises(Red, match="model.safetensors, tokenizer.json of .* did not come back"):
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


def junit(tmp_path: Path, *cases: str) -> Path:
    """The record of tests as pytest writes it."""
    file = tmp_path / "tests.xml"
    file.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return file


def test_tests_on_gpus_must_have_run_and_none_may_be_skipped(tmp_path):
    passed = '<testcase classname="tests.gpu.test_kernels" name="test_loss"/>'
    skip = '<skipped type="pytest.skip" message="no TE"/>'
    skipped = f'<testcase classname="tests.gpu.test_two_gpus" name="test_sum">{skip}</testcase>'
    assert verdicts.gpu_tests(junit(tmp_path, passed, passed)).text == "2 tests passed, none skipped"
    with pytest.raises(Red, match=r"1 of 2 tests were skipped: tests.gpu.test_two_gpus.test_sum \(no TE\)$"):
        verdicts.gpu_tests(junit(tmp_path, passed, skipped))
    with pytest.raises(Red, match="6 of 6 tests were skipped: .*; and 1 more"):
        verdicts.gpu_tests(junit(tmp_path, *6 * [skipped]))
    with pytest.raises(Red, match="no test ran on a GPU"):
        verdicts.gpu_tests(junit(tmp_path))
