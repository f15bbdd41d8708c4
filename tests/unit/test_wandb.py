"""The real client of Weights & Biases, offline: a run's data arrive under their names,
with step and table."""

import json
import struct
import time
from pathlib import Path

import pytest

from megatron_dapo.config.loader import load_config
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry.sample_table import COLUMNS
from megatron_dapo.telemetry.telemetry import Telemetry
from tests.synthetic import synthetic_groups

pytest.importorskip("wandb", reason="wandb is not installed: .venv/bin/python -m pip install -e '.[wandb]'")
pytestmark = pytest.mark.unit


BLOCK = 32768  # of the file, which is a LevelDB log


def records(file: Path) -> list:
    """The records of an offline run's file."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = file.read_bytes()
    at, parts, parsed = 7, b"", []  # behind the file's own head
    while len(content) - at > 7:
        if (left := BLOCK - at % BLOCK) < 7:  # too little for a head: filled up
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        if at + 7 + size > len(content):  # it is still being written
            break
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part of one
            parsed.append(Record.FromString(parts))
            parts = b""
    return parsed


def wait_for_end(file: Path) -> None:
    """Another process writes the file: a record at its end says that all is there."""
    deadline = time.monotonic() + 30
    while "exit" not in [record.WhichOneof("record_type") for record in records(file)]:
        assert time.monotonic() < deadline, "the client never ended"
        time.sleep(0.05)


def history(file: Path) -> list[dict]:
    """The log, line by line, by name."""
    lines = [record.history for record in records(file) if record.WhichOneof("record_type") == "history"]
    return [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in line.item} for line in lines
    ]


def test_metrics_and_samples_arrive_under_their_own_names(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = load_config(None, ["trainer.logger=[wandb]", "trainer.experiment_name=mine"])
    for resumed_after in (None, 1):  # a resumed run goes on as the same one
        log = Telemetry(config, RunFolder(tmp_path), resumed_after)
        log.log(2, {"reward/mean": 0.5, "time/rollout": 2.0}, synthetic_groups(14, num_groups=2, n=4))
        log.log_validation(2, {"val/accuracy": 0.75, "val/aime/pass@8": 1.0})
        log.close()
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1, "one id"
    for file in files:
        wait_for_end(file)
        step, validation = history(file)
        assert (step["step"], step["reward/mean"], step["time/rollout"]) == (2, 0.5, 2.0)
        assert (validation["step"], validation["val/accuracy"], validation["val/aime/pass@8"]) == (2, 0.75, 1.0)
        assert (step["samples._type"], step["samples.nrows"]) == ("table-file", 8)
        table = json.loads((file.parent / "files" / step["samples.path"]).read_text(encoding="utf-8"))
        assert table["columns"] == list(COLUMNS) and len(table["data"]) == 8
        kinds = {each.WhichOneof("record_type"): each for each in records(file)}
        definition = kinds["metric"].metric
        assert (definition.glob_name, definition.step_metric) == ("*", "step")
