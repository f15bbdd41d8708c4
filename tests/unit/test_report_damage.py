"""Damage to a run's folder ends in a page of its whole parts, or in one sentence.

Never in a traceback, never in a wait, and within bounds of memory.
"""

import io
import json
import os
import re
import shutil
import struct
import zipfile
import zlib
from base64 import b64decode
from functools import cache

import numpy as np
import pytest

from megatron_dapo.__main__ import main
from megatron_dapo.common.ends import End, EndFolder, EndKind
from megatron_dapo.data.token_dump import TokenDump
from megatron_dapo.storage.run_folder import RunFolder
from tests.bounded_process import run_bounded
from tests.report_runs import START, write_run, write_validation

pytestmark = pytest.mark.unit

DEEP = "[" * 100_000 + "]" * 100_000
HUGE = "1" + "0" * 400
# kinds for the viewer's JavaScript: there a number has no toLowerCase and an object has no length
KINDS_OF = {
    "text": str,
    "reward": int | float,
    "raw_reward": int | float,
    "correct": bool,
    "finish_reason": str,
    "num_tokens": int,
    "num_turns": int,
    "prompt": str,
    "answer": str,
    "replayed": bool,
    "reward_error": str,
}


@pytest.fixture
def run(tmp_path) -> RunFolder:
    """Three steps with answers, tokens, validation, a checkpoint,
    a machine and an end: the page's whole input."""
    run = write_run(tmp_path / "run", num_steps=3)
    write_validation(run, 3, [1, 4])
    run.checkpoint(2).mkdir(parents=True)
    run.machine.write_text(json.dumps({"trainer_ranks": 2, "device": "cpu", "cpu": "one", "versions": {"torch": "2"}}))
    EndFolder(run.ends, "1").write("trainer-rank-0", End(EndKind.DONE, 0, step=3, time=START + 50))
    return run


def in_metrics(**values: object):
    """Change these values in the record of step 1. Text that begins with = is put there
    as it stands."""

    def damage(run: RunFolder) -> None:
        first, *lines = run.metrics.read_text().splitlines()
        record = json.loads(lines[0]) | values
        lines[0] = re.sub(r'"=([^"]*)"', r"\1", json.dumps(record))
        run.metrics.write_text("\n".join([first, *lines]) + "\n")

    return damage


def in_all_metrics(**values: object):
    """Change these values in every record that has them."""

    def damage(run: RunFolder) -> None:
        records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        assert any(name in record for record in records for name in values)
        lines = [record | {name: values[name] for name in record.keys() & values.keys()} for record in records]
        run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))

    return damage


def line_in(path_of, content: str | bytes):
    """Put a line before the existing ones."""

    def damage(run: RunFolder) -> None:
        path = path_of(run)
        line = content.encode() if isinstance(content, str) else content
        path.write_bytes(line + b"\n" + path.read_bytes())

    return damage


def put(path_of, content: str | bytes):
    def damage(run: RunFolder) -> None:
        path_of(run).write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


def fifo(path_of):
    def damage(run: RunFolder) -> None:
        path_of(run).unlink(missing_ok=True)
        os.mkfifo(path_of(run))

    return damage


def folder(path_of):
    def damage(run: RunFolder) -> None:
        path_of(run).unlink(missing_ok=True)
        path_of(run).mkdir()

    return damage


def link(path_of, target: str):
    def damage(run: RunFolder) -> None:
        path_of(run).unlink(missing_ok=True)
        path_of(run).symlink_to(target)

    return damage


def endless(path_of):
    """Sixty gigabytes, of which the disk holds none."""

    def damage(run: RunFolder) -> None:
        with path_of(run).open("ab") as file:
            file.truncate(60 << 30)

    return damage


def many_names(run: RunFolder) -> None:
    """Eight hundred records, each with its own eight hundred names: a table of them would have 5e8
    places."""
    lines = [json.dumps({"step": s, "time": START, **{f"m/{s}-{n}": 1 for n in range(800)}}) for s in range(4, 804)]
    run.metrics.write_text(run.metrics.read_text() + "\n".join(lines) + "\n")


def response(**values: object):
    """Change these values in the first answer of step 1."""

    def damage(run: RunFolder) -> None:
        lines = run.rollout(1).read_text().splitlines()
        group = json.loads(lines[0])
        group["responses"][0] |= values
        run.rollout(1).write_text("\n".join([re.sub(r'"=([^"]*)"', r"\1", json.dumps(group)), *lines[1:]]) + "\n")

    return damage


def stored(**arrays: np.ndarray):
    """Put other arrays into the tokens of step 1."""

    def damage(run: RunFolder) -> None:
        with np.load(run.rollout_tokens(1)) as file:
            whole = {name: file[name] for name in file.files}
        with run.rollout_tokens(1).open("wb") as file:
            np.savez_compressed(file, **(whole | arrays))

    return damage


@cache
def packed_zeros() -> bytes:
    """An archive with an array of 1.3 GB of zeros, more than the bound of memory, in a few
    megabytes."""
    header = str({"descr": "<i4", "fortran_order": False, "shape": (325_000_000,)}).ljust(117) + "\n"
    head = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()
    file = io.BytesIO()
    with (
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("lengths.npy", "w", force_zip64=True) as member,
    ):
        member.write(head)
        for _ in range(1300):
            member.write(bytes(1_000_000))
    return file.getvalue()


def bomb(run: RunFolder) -> None:
    run.rollout_tokens(1).write_bytes(packed_zeros())


def claims_much(run: RunFolder) -> None:
    """Eight terabytes by its header, and nothing behind it."""
    header = str({"descr": "<f8", "fortran_order": False, "shape": (10**12,)}).ljust(117) + "\n"
    with zipfile.ZipFile(run.rollout_tokens(1), "w") as archive:
        archive.writestr("lengths.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode())


def of_numpy(run: RunFolder) -> None:
    np.save(run.rollout_tokens(1).with_suffix(".npy"), np.zeros(3))
    run.rollout_tokens(1).with_suffix(".npy").replace(run.rollout_tokens(1))


def infinite_advantages(run: RunFolder) -> None:
    with np.load(run.rollout_tokens(1)) as file:
        advantages = file["advantages"]
    stored(advantages=np.full_like(advantages, np.inf))(run)


def moved(name: str):
    def damage(run: RunFolder) -> None:
        run.path.rename(run.path.parent / name)
        os.symlink(name, run.path)

    return damage


def gone(make):
    def damage(run: RunFolder) -> None:
        shutil.rmtree(run.path)
        make(run.path)

    return damage


def alias_bomb(depth: int = 12) -> str:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    return "\n".join([*lines, *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, depth))])


def metrics(run):
    return run.metrics


def config(run):
    return run.config


def machine(run):
    return run.machine


def end(run):
    return run.ends / "trainer-rank-1.json"


def texts(run):
    return run.rollout(1)


def tokens(run):
    return run.rollout_tokens(1)


def held_out(run):
    return run.validation(3)


def end_with(**fields: object):
    whole = {"kind": "failed", "sentence": "s", "step": 1, "time": START + 60}
    return put(end, re.sub(r'"=([^"]*)"', r"\1", json.dumps(whole | fields)))


DAMAGE = {
    "metrics: no times": in_all_metrics(time=None),
    "metrics: a time that is text": in_metrics(time="yesterday"),
    "metrics: a time after all calendars": in_metrics(time=1e300),
    "metrics: a time that no float holds": in_metrics(time=f"={HUGE}"),
    "metrics: a reward that is text": in_metrics(**{"reward/mean": "high"}),
    "metrics: a reward that is a list": in_metrics(**{"reward/mean": [1]}),
    "metrics: seconds that are text": in_metrics(**{"time/step": "8"}),
    "metrics: seconds that are no number": in_metrics(**{"time/step": "=NaN", "time/rollout": "=Infinity"}),
    "metrics: a value that no float holds": in_metrics(**{"reward/mean": f"={HUGE}", "time/step": f"=-{HUGE}"}),
    "metrics: values at the end of the floats": in_metrics(**{"time/step": 1.7e308, "time/rollout": 1.7e308}),
    "metrics: a number of 5000 digits": in_metrics(**{"reward/mean": f"={'9' * 5000}"}),
    "metrics: counts that are text": in_metrics(**{"dapo/num_filtered_groups": "1", "perf/trainer_waiting": "x"}),
    "metrics: an accuracy that is null": in_all_metrics(**{"val/accuracy": None}),
    "metrics: an accuracy that is text": in_all_metrics(**{"val/accuracy": "good"}),
    "metrics: servers without their number": in_metrics(**{"rollout/num_servers": None}),
    "metrics: servers that are text": in_all_metrics(**{"rollout/num_servers": "two"}),
    "metrics: tokens that are text": in_metrics(**{"perf/total_num_tokens": "many", "rollout/num_tokens": {}}),
    "metrics: joins that are text": in_metrics(**{"weight_sync/num_rejoins": "one"}),
    "metrics: a step that no float holds": line_in(metrics, f'{{"step": {HUGE}, "time": {START}}}'),
    "metrics: a step before the first": line_in(metrics, f'{{"step": -7, "time": {START}}}'),
    "metrics: a step of 299 digits at the end": lambda run: run.metrics.write_text(
        run.metrics.read_text() + f'{{"step": 1{"0" * 298}, "time": {START + 31}}}\n'
    ),
    "metrics: a deep line": line_in(metrics, f'{{"step": 1, "a": {DEEP}}}'),
    "metrics: bytes": line_in(metrics, bytes(range(256))),
    "metrics: names of half characters": in_metrics(**{"\ud800/x": 1}),
    "metrics: many names": many_names,
    "metrics: empty": put(metrics, ""),
    "metrics: missing": lambda run: run.metrics.unlink(),
    "metrics: a pipe": fifo(metrics),
    "metrics: a folder": folder(metrics),
    "metrics: a link to itself": link(metrics, "metrics.jsonl"),
    "metrics: a device without end": link(metrics, "/dev/zero"),
    "metrics: sixty gigabytes": endless(metrics),
    "config: a date": put(config, "trainer: {total_training_steps: 3, seed: 2024-05-06}"),
    "config: a date as a key": put(config, "2024-05-06: 1"),
    "config: aliases of aliases": put(config, alias_bomb()),
    "config: deep": put(config, f"a: {DEEP}"),
    "config: a tag of Python": put(config, "a: !!python/object/apply:os.getcwd []"),
    "config: steps that are text": put(config, "trainer: {total_training_steps: many}"),
    "config: steps that are a list": put(config, "trainer: {total_training_steps: [3]}"),
    "config: steps that no float holds": put(config, f"trainer: {{total_training_steps: {HUGE}}}"),
    "config: not a number": put(config, "trainer: {seed: .nan, total_training_steps: .inf}"),
    "config: a section that is a list": put(config, "trainer: [1]\ndata: 3"),
    "config: bytes": put(config, bytes(range(256))),
    "config: a pipe": fifo(config),
    "config: sixty gigabytes": endless(config),
    "machine: deep": put(machine, f'{{"cpu": {DEEP}}}'),
    "machine: values of other kinds": put(machine, '{"gpu_memory_gib": [1], "device": {}, "versions": [1], "cpu": 3}'),
    "machine: a number that no float holds": put(machine, f'{{"gpu_memory_gib": {HUGE}, "device": "x"}}'),
    "machine: a pipe": fifo(machine),
    "end: deep": put(end, DEEP),
    "end: a time that is text": end_with(time="now"),
    "end: a time that no float holds": end_with(time=f"={HUGE}"),
    "end: a step that is text": end_with(step="two"),
    "end: a step that no float holds": end_with(step=f"={HUGE}"),
    "end: a kind that is a list": end_with(kind=[1], sentence=None),
    "end: a pipe": fifo(end),
    "end: a folder": folder(end),
    "answers: a text that is a number": response(text=5),
    "answers: figures that are text": response(num_tokens="9", reward="high", raw_reward=[], correct="yes"),
    "answers: a reward that no float holds": response(reward=f"={HUGE}"),
    "answers: turns that are a number": response(turns=3),
    "answers: turns that are text": response(turns=["a", {"by": 1}]),
    "answers: no list": line_in(texts, '{"responses": 5, "prompt": "p"}'),
    "answers: a prompt that is a list": line_in(
        texts, '{"uid": 1, "prompt": [1], "ground_truth": {}, "responses": [{"text": "x"}]}'
    ),
    "answers: deep": response(turns=f"={'[' * 900}{']' * 900}"),
    "answers: very deep": line_in(texts, f'{{"responses": {DEEP}}}'),
    "answers: a pipe": fifo(texts),
    "answers: a folder": folder(texts),
    "answers: a link to nothing": link(texts, "nowhere"),
    "answers: sixty gigabytes": endless(texts),
    "answers: a step of 30 digits": lambda run: shutil.copyfile(texts(run), run.rollout(10**30)),
    "answers: a step in other digits": lambda run: shutil.copyfile(
        texts(run), run.rollouts / "step_\u0661\u0661\u0661\u0661\u0661\u0661.jsonl"
    ),
    "tokens: a bomb": bomb,
    "tokens: a header of terabytes": claims_much,
    "tokens: cut off": lambda run: tokens(run).write_bytes(tokens(run).read_bytes()[:200]),
    "tokens: one array and no archive": of_numpy,
    "tokens: pickled": stored(lengths=np.array([{}], dtype=object)),
    "tokens: infinite": infinite_advantages,
    "tokens: lengths below 0": stored(lengths=np.array([-(2**31), 2**31 - 1], dtype=np.int64)),
    "tokens: deep texts": stored(texts=np.frombuffer(DEEP.encode(), dtype=np.uint8)),
    "tokens: a pipe": fifo(tokens),
    "tokens: sixty gigabytes": endless(tokens),
    "held out: a place that is deep": line_in(held_out, f'{{"prompt_index": {"[" * 900 + "]" * 900}, "text": "x"}}'),
    "held out: values of other kinds": line_in(held_out, '{"prompt_index": {}, "prompt": 3, "text": [], "answer": 4}'),
    "held out: a pipe": fifo(held_out),
    "folder: a name that is not UTF-8": moved("\udcff\udcfe"),
    "folder: a file": gone(lambda path: path.write_text("")),
    "folder: a link to itself": gone(lambda path: path.symlink_to(path.name)),
    "folder: a pipe": gone(os.mkfifo),
}
# damage after which there is no run to show
NO_RUN = {
    f"metrics: {what}"
    for what in ("missing", "a pipe", "a folder", "a link to itself", "a device without end", "sixty gigabytes")
} | {"folder: a file", "folder: a link to itself", "folder: a pipe"}


def chunks(page: str) -> dict[str, bytes]:
    """A page's contents, unpacked as a browser does it."""
    parts = re.findall(r'<script type="text/plain" id="chunk-([\w-]+)">([\w+/=]*)</script>', page)
    return {name: zlib.decompress(b64decode(content)) for name, content in parts}


def as_browser(content: bytes) -> object:
    """JSON as browsers read it: they know no NaN."""
    return json.loads(content, parse_constant=lambda name: pytest.fail(f"{name} in a page"))


def check_page(page: str) -> None:
    """The whole parts are there: the last step, its answers and their tokens; and all is of the
    kind that scripts read."""
    content = chunks(page)
    [data] = as_browser(content["summary"])["runs"]
    assert data["steps"]["reward/mean"][data["steps"]["step"].index(3)] is not None
    assert all(abs(time) < 1e11 for time in [*data["steps"]["time"], *(event["time"] for event in data["events"])])
    places = {(entry["kind"], entry["step"]): place for place, entry in enumerate(data["answers"])}
    last = as_browser(content[f"texts-0-{places['trained', 3]}"])
    assert len(last) == 3 and f"tokens-0-{places['trained', 3]}" in content
    for name in (name for name in content if name.startswith("texts")):
        for group in as_browser(content[name]):
            assert all(isinstance(group.get(key, ""), str) for key in ("uid", "prompt", "ground_truth", "data_source"))
            for answer in group["responses"]:
                for key, kind in KINDS_OF.items():
                    assert key not in answer or (isinstance(answer[key], kind)), (key, answer[key])
                assert all(isinstance(turn["text"], str) for turn in answer.get("turns", []))
    for name in (name for name in content if name.startswith("tokens")):
        size = int(np.frombuffer(content[name], "<u4", 1)[0])
        as_browser(content[name][4 : 4 + size])


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_folder_ends_in_a_page_or_a_sentence(run, what, monkeypatch):
    monkeypatch.setattr("plotly.offline.get_plotlyjs", str)  # megabytes, and the same in every page
    DAMAGE[what](run)
    page = run.path.parent / "page.html"
    ended = run_bounded(lambda: main(["report", str(run.path), "-o", str(page)]))
    assert ended.code == (2 if what in NO_RUN else 0), ended.error[-1500:]
    assert "Traceback" not in ended.error and "Error" not in ended.error
    if what in NO_RUN:
        assert ended.error.startswith("1 mistake to correct:\n") and len(ended.error.splitlines()) == 2
        assert run.path.name in ended.error and not page.exists()
    elif what != "metrics: empty":
        check_page(page.read_text())


def test_an_archive_that_would_unpack_to_gigabytes_is_not_unpacked(run, monkeypatch):
    bomb(run)
    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", lambda *_: pytest.fail("it was unpacked"))
    assert TokenDump.read(tokens(run)) is None


def test_the_check_of_a_page_sees_a_value_that_no_browser_reads(run):
    page = run.path.parent / "page.html"
    assert main(["report", str(run.path), "-o", str(page)]) == 0
    check_page(page.read_text())
    with pytest.raises(pytest.fail.Exception):
        as_browser(b'{"a": NaN}')
