"""Telemetry: the sinks' records, a step's line on the console, the closing table."""

import errno
import io
import json
import math
import os
import pty
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import Mock

import pytest

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import write_whole
from megatron_dapo.config.loader import load_config
from megatron_dapo.data.samples import Group
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry import closing_table as report
from megatron_dapo.telemetry.closing_table import Summary, closing_table, read_metrics
from megatron_dapo.telemetry.console import RUN_FIGURES, StepTable, duration
from megatron_dapo.telemetry.sample_table import sample_table
from megatron_dapo.telemetry.sinks import SINKS, Console, Record
from megatron_dapo.telemetry.telemetry import NullTelemetry, Telemetry
from megatron_dapo.telemetry.timers import PhaseTimers
from tests.helpers import REPOSITORY
from tests.synthetic import synthetic_groups

pytestmark = pytest.mark.unit


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def telemetry(tmp_path, *sinks: str, steps: int = 4) -> Telemetry:
    config = load_config(None, [f"trainer.logger=[{', '.join(sinks)}]", f"trainer.total_training_steps={steps}"])
    return Telemetry(config, RunFolder(tmp_path))


def run(log, steps: int) -> None:
    log.log_validation(0, {"val/accuracy": 0.25})
    for step in range(1, steps + 1):
        with log.phase("rollout"):
            pass
        log.log(step, {"reward/mean": step / 10, "actor/entropy": 1.0})
    log.log_validation(steps, {"val/accuracy": 0.75})
    log.close()


def test_seconds_of_nested_phases_are_counted_once():
    clock = Clock()
    timers = PhaseTimers(clock)
    with timers.phase("rollout"):
        clock.now += 2
        with timers.phase("weight_sync"):
            clock.now += 3
    clock.now += 1
    with timers.phase("rollout"):
        clock.now += 4
    assert timers.step_seconds() == 10.0
    assert timers.take() == {"time/rollout": 6.0, "time/weight_sync": 3.0, "time/step": 10.0}
    assert timers.take() == {} and timers.step_seconds() == 0.0


def test_a_phase_that_raises_is_still_timed():
    clock = Clock()
    timers = PhaseTimers(clock)
    with pytest.raises(KeyError), timers.phase("update"):
        clock.now += 5
        raise KeyError
    assert timers.take()["time/update"] == 5.0


def test_every_line_of_metrics_jsonl_is_valid_json_with_step_and_time(tmp_path):
    log = telemetry(tmp_path, "jsonl")
    log.log(1, {"reward/mean": math.nan, "actor/grad_norm": math.inf, "actor/lr": 1e-6})
    lines = RunFolder(tmp_path).metrics.read_text().splitlines()  # before close: every record is flushed
    log.close()
    record = json.loads(lines[0], parse_constant=pytest.fail)
    assert record["step"] == 1 and record["time"] > 1e9
    assert (record["reward/mean"], record["actor/grad_norm"], record["actor/lr"]) == (None, None, 1e-6)


def test_a_repeated_run_in_the_same_folder_replaces_the_first_one(tmp_path):
    run(telemetry(tmp_path, "jsonl"), steps=4)
    with RunFolder(tmp_path).metrics.open("a") as file:
        file.write('{"step": 5, "torn')
    run(telemetry(tmp_path, "jsonl"), steps=2)
    assert [record["step"] for record in read_metrics(RunFolder(tmp_path).metrics)] == [0, 1, 2, 2]


def test_a_resumed_run_continues_the_first_one(tmp_path):
    lines = [{"step": step, "run": run} for run, steps in enumerate([range(1, 7), range(4, 9)]) for step in steps]
    write_whole(tmp_path / "m", "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "ru')
    records = read_metrics(tmp_path / "m")
    assert [(record["step"], record["run"]) for record in records] == [
        *((step, 0) for step in (1, 2, 3)),
        *((step, 1) for step in (4, 5, 6, 7, 8)),
    ]


def test_the_records_of_a_long_run_are_read_in_one_pass(tmp_path, monkeypatch):
    lines = "".join(f'{{"step": {step}}}\n' for step in range(300))
    write_whole(tmp_path / "m", lines)
    places = Mock(side_effect=report._place)
    monkeypatch.setattr(report, "_place", places)
    assert [record["step"] for record in read_metrics(tmp_path / "m")] == [*range(300)]
    assert places.call_count < 1500


def test_a_resumed_run_removes_the_records_after_its_checkpoint(tmp_path):
    run(telemetry(tmp_path, "jsonl", "tensorboard"), steps=4)
    config = load_config(None, ["trainer.logger=[jsonl, tensorboard]"])
    resumed = Telemetry(config, RunFolder(tmp_path), resumed_after=2)
    for step in (3, 4, 5):
        resumed.log(step, {"reward/mean": -float(step)})
    resumed.close()
    lines = [json.loads(line) for line in RunFolder(tmp_path).metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert [line["reward/mean"] for line in lines[1:]] == [0.1, 0.2, -3.0, -4.0, -5.0]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(RunFolder(tmp_path).tensorboard)).Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 3, 4, 5]


def test_a_resumed_run_keeps_its_steps_beside_damaged_lines_of_metrics_jsonl(tmp_path, caplog):
    run(telemetry(tmp_path, "jsonl"), steps=4)
    path = RunFolder(tmp_path).metrics
    lines = path.read_bytes().splitlines(keepends=True)
    garbage = [
        b"\xff\xfe\n",
        bytes(40) + b"\n",
        b"[1]\n",
        b'{"time": 1.0}\n',
        b"{oops\n",
        b'{"step": "x"}\n',
        b"[" * 10**5 + b"\n",
    ]
    path.write_bytes(b"".join([*garbage[:3], *lines[:3], *garbage[3:], *lines[3:], bytes(9)]))
    assert [record["step"] for record in read_metrics(path)] == [0, 1, 2, 3, 4, 4]
    resumed = Telemetry(load_config(None, ["trainer.logger=[jsonl]"]), RunFolder(tmp_path), resumed_after=2)
    resumed.log(3, {"reward/mean": 0.5})
    resumed.close()
    assert path.read_bytes().splitlines(keepends=True)[:3] == lines[:3]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2, 3]
    assert "7 damaged lines are removed" in caplog.text


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file grows beyond num_bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_training_goes_on_on_a_full_disk_and_no_metric_is_lost_when_there_is_room_again(tmp_path, caplog):
    log, path = telemetry(tmp_path, "jsonl"), RunFolder(tmp_path).metrics
    log.log(1, {"reward/mean": 0.1})
    with full_disk(path.stat().st_size + 10):  # a part of the next line fits
        log.log(2, {"reward/mean": 0.2})
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1]  # and none is torn
        log.log(3, {"reward/mean": 0.3})
    log.log(4, {"reward/mean": 0.4})
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["reward/mean"]) for line in lines] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    messages = ["metrics for jsonl cannot be written at step 2 ([Errno 27] File too large); training goes on"]
    assert caplog.messages == messages


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's thread
def test_tensorboard_goes_on_when_there_is_room_again(tmp_path, caplog):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log, step = telemetry(tmp_path, "tensorboard", steps=10_000), 1
    log.log(step, {"reward/mean": 0.1})
    with full_disk(1):
        while not caplog.messages:  # a thread writes: the failure shows some calls later
            step += 1
            log.log(step, {"reward/mean": 0.1})
            time.sleep(0.01)
        for _ in range(5):
            step += 1
            log.log(step, {"reward/mean": 0.1})
    for _ in range(3):
        step += 1
        log.log(step, {"reward/mean": 0.2})
    log.close()
    folder = RunFolder(tmp_path).tensorboard
    written = [event.step for event in EventAccumulator(str(folder)).Reload().Scalars("reward/mean")]
    assert written == [*range(1, len(written) - 2), step - 2, step - 1, step]
    assert len([*folder.iterdir()]) == 2, "the file from before, and that of the writer from then on"
    assert "metrics for tensorboard cannot be written" in caplog.text and "at the end" not in caplog.text


class FullDisk:
    def write(self, record):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_no_sink_that_cannot_write_ends_the_run_or_keeps_the_others_from_writing(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(SINKS, "tensorboard", lambda *_: FullDisk())
    run(telemetry(tmp_path, "tensorboard", "jsonl"), steps=3)
    assert len(read_metrics(RunFolder(tmp_path).metrics)) == 5
    assert sum("metrics for tensorboard cannot be written" in text for text in caplog.messages) == 1


def test_a_metrics_file_that_cannot_be_made_is_one_sentence(tmp_path):
    RunFolder(tmp_path).metrics.mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be written .*another trainer\.run_dir"):
        telemetry(tmp_path, "jsonl")


def hostile_groups() -> list[Group]:
    [group] = synthetic_groups(14, num_groups=1, n=20)
    samples = [replace(sample, response_text="</code>\n\n# I am a heading", reward=0.5) for sample in group.samples]
    return [replace(group, samples=tuple(samples))]


def test_tensorboard_gets_some_responses_as_text_that_nothing_in_them_can_end(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = telemetry(tmp_path, "tensorboard", steps=200)
    for step in range(1, 201):
        log.log(step, {}, hostile_groups())
    log.close()
    texts = (
        EventAccumulator(str(RunFolder(tmp_path).tensorboard), {"tensors": 0}).Reload().Tensors("samples/text_summary")
    )
    assert [text.step for text in texts] == [1, *range(4, 201, 4)]
    text = texts[0].tensor_proto.string_val[0].decode()
    assert text.count("tokens, ") == 16 and "\n    # I am a heading\n" in text and "\n# I" not in text


def test_who_keeps_no_responses_sends_none_to_loggers():
    config = load_config(None, ["actor_rollout_ref.rollout.dump_samples=0"])
    assert sample_table(config, 1, hostile_groups()) is None
    assert sample_table(load_config(None, []), 1, None) is None


def test_only_the_sinks_of_trainer_logger_are_used(tmp_path, capsys):
    run(telemetry(tmp_path, "console"), steps=2)
    assert "held out, after step 2: accuracy 0.750" in capsys.readouterr().out
    assert not RunFolder(tmp_path).metrics.exists()


# the reader goes after the first line; the others would stay in a pipe's buffer to the end
OUTLIVES_ITS_READER = """
import sys
from contextlib import nullcontext
from types import SimpleNamespace
# which imports torch, and has no part in what is written
sys.modules["megatron_dapo.platform.watchdog"] = SimpleNamespace(phase=nullcontext)
from megatron_dapo.config.loader import load_config
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry.telemetry import Telemetry
log = Telemetry(load_config(None, ["trainer.logger=[console, jsonl]"]), RunFolder(sys.argv[1]))
log.log(1, {"reward/mean": 0.5})
sys.stdin.readline()
for step in range(2, 6):
    log.log(step, {"reward/mean": 0.5})
log.close()
sys.exit(85)
"""


@pytest.mark.parametrize("kind", ["pipe", "terminal", "closed"])
def test_a_run_continues_with_its_exit_code_after_its_reader_is_gone(tmp_path, kind):
    ours, its = pty.openpty() if kind == "terminal" else os.pipe()
    command = [sys.executable, "-c", OUTLIVES_ITS_READER, str(tmp_path)]
    if kind == "closed":
        command = ["bash", "-c", 'exec "$@" >&-', "bash", *command]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=its, cwd=REPOSITORY, text=True)
    os.close(its)
    while kind != "closed" and b"1/" not in os.read(ours, 4096):
        pass
    os.close(ours)
    process.communicate("go on\n", timeout=60)
    assert process.returncode == 85
    assert [record["step"] for record in read_metrics(RunFolder(tmp_path).metrics)] == [1, 2, 3, 4, 5]


def test_console_lines_stay_aligned_and_show_missing_values_as_dashes():
    table = StepTable(total_steps=1000)
    full = {"reward/mean": -0.5, "actor/entropy": math.nan, "dapo/num_kept_groups": 512.0, "time/step": 3.0}
    first = table.line(1, full | {"dapo/num_filtered_groups": 1024.0, "rollout/tokens_per_s": 123456.7})
    header, line = first.split("\n")
    bare = table.line(1000, {})
    assert len(header) == len(line) == len(bare)
    assert "-0.500" in line and "512/1024" in line and "nan" in line and "50m" not in bare
    assert line.endswith("49m57s") and bare.split()[1:3] == ["-", "-"]


def test_the_console_ends_with_one_line_about_all_steps(tmp_path, capsys):
    log = telemetry(tmp_path, "console", steps=2)
    gpu = {"perf/mfu/actor": 0.3, "perf/max_memory_allocated_gb": 40.0, "perf/max_memory_reserved_gb": 60.0}
    speed = {"perf/update_tokens_per_s_per_gpu": 500.0, "perf/rollout_tokens_per_s_per_gpu": 100.0}
    counts = {"rollout/num_retractions": 2.0, "rollout/num_cached_tokens": 7.0, "response_length/max": 90.0}
    waits = {"rollout/servers_waiting": 0.5, "perf/trainer_waiting": 0.25}
    first = {**gpu, **speed, **counts, **waits, "rollout/kv_used_max": 0.8}
    assert first.keys() == {figure.metric for figure in RUN_FIGURES}
    log.log(1, first)
    log.log(2, {name: 1.1 * value for name, value in first.items() if name != "rollout/kv_used_max"})  # no look at it
    log.log_validation(2, {"val/accuracy": 0.75, "response_length/max": 1000.0})
    log.close()
    assert capsys.readouterr().out.splitlines()[-1] == (
        "all steps: MFU 31.5%   525 tokens/s/rank trained   105 sampled   memory 44.0 GiB   reserved 66.0 GiB   "
        "KV cache 80%   4 retractions   15 cached tokens   servers wait 52%   trainer waits 26%   longest response 99"
    )


def test_the_console_says_once_in_a_row_that_cut_responses_are_paid(tmp_path, capsys):
    log = telemetry(tmp_path, "console", steps=6)
    for step, share in enumerate((0.2, 0.34, 0.5, None, 0.0, 0.21), start=1):
        log.log(step, {} if share is None else {"reward/truncated_correct": share})
    log.close()
    said = [line for line in capsys.readouterr().out.splitlines() if "judged right" in line]
    assert [line.partition(" of the truncated")[0] for line in said] == ["step 2: 34%", "step 6: 21%"]


def test_a_terminal_shows_one_remaining_time(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    console = Console(total_steps=40)
    console.write(Record(1, {"time/step": 5.0}, is_validation=False))
    console.close()
    assert "1/40" in terminal.getvalue() and "steps" in terminal.getvalue()
    assert terminal.getvalue().count("left") == 1  # the title of the column


def test_the_console_says_once_that_most_responses_are_cut(capsys):
    console = Console(total_steps=40)
    shares = [
        ("val", 0, 0.75),
        ("dapo", 1, 0.9),
        ("dapo", 2, 0.5),
        ("dapo", 3, 0.51),
        ("val", 3, 0.1),
        ("dapo", 4, 0.6),
    ]
    for kind, step, share in shares:
        console.write(Record(step, {f"{kind}/truncation_ratio": share}, is_validation=kind == "val"))
    console.write(Record(5, {}, is_validation=False))
    said = [line.partition(" of the responses are cut") for line in capsys.readouterr().out.splitlines()]
    assert [first for first, words, _ in said if words] == ["held out: 75%", "step 1: 90%", "step 3: 51%"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.6, "1m00s"), (187, "3m07s"), (7500, "2h05m"), (math.inf, "-")]
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


def test_the_closing_table_compares_the_ends_of_the_run_and_accounts_for_all_time():
    records = [{"step": 0, "val/accuracy": 0.25, "time/validation": 4.0}]
    records += [
        {"step": s, "reward/mean": s / 100, "time/rollout": 2.0, "time/update": 1.0, "time/step": 3.5}
        for s in range(1, 31)
    ]
    records += [{"step": 30, "val/accuracy": 0.75, "time/validation": 4.0, "time/step": 4.0}]
    summary = Summary.of(records)
    assert (summary.num_steps, summary.window, summary.val_before, summary.val_after) == (30, 10, 0.25, 0.75)
    assert summary.first["reward/mean"] == pytest.approx(0.055)
    assert summary.last["reward/mean"] == pytest.approx(0.255)
    assert summary.seconds == pytest.approx({"rollout": 60.0, "update": 30.0, "validation": 8.0, "other": 15.0})

    rows = {
        line.split("  ")[0].strip(): line.split()[-2:] for line in closing_table(summary).splitlines() if line.strip()
    }
    assert rows["held-out accuracy"] == ["0.250", "0.750"]
    assert rows["mean reward"] == ["0.055", "0.255"]
    assert "entropy" not in rows


def test_the_closing_table_shows_the_cost_of_lost_servers():
    def step(number: int, current: float, tokens: int, rejoins: int) -> dict:
        servers = {"rollout/num_servers": 3, "rollout/num_servers_current": current, "weight_sync/num_rejoins": rejoins}
        return {"step": number, "time/step": 2.0, "rollout/num_tokens": tokens, **servers}

    steps = [
        step(1, 3.0, 300, 0) | {"time/step": 9.0, "time/start": 7.0},
        step(2, 2.1, 100, 1),
        step(3, 1.5, 200, 2),
        step(4, 2.99, 300, 0),
    ]
    lines = [" ".join(line.split()) for line in closing_table(Summary.of(steps)).splitlines()]
    assert "servers that joined again 3" in lines
    assert "tokens/s, all servers there 150" in lines and "some away 75 -50% in 2 steps" in lines
    assert "some away" not in closing_table(Summary.of(steps[:1]))


def test_other_ranks_make_the_same_calls():
    run(NullTelemetry(), steps=2)
    public = {name for name in vars(Telemetry) if not name.startswith("_")}
    assert public == {name for name in vars(NullTelemetry) if not name.startswith("_")}
