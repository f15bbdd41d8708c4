"""The report's reading of a run folder, and the contents of its file."""

import base64
import http.client
import json
import random
import re
import threading
import zlib
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

from megatron_dapo.__main__ import main
from megatron_dapo.commands.report.answers import StepFile, answer_files, coded, tokens_bytes
from megatron_dapo.commands.report.embedding import StepAnswers, answers_of, fitting
from megatron_dapo.commands.report.page import summary, whole_page
from megatron_dapo.commands.report.panels import CURVES, SHARE, drawn
from megatron_dapo.commands.report.run_data import config_rows, read_run
from megatron_dapo.commands.report.watch import Watched, make_server
from megatron_dapo.common.ends import End, EndFolder, EndKind
from megatron_dapo.common.files import write_whole
from megatron_dapo.data.token_dump import TokenDump
from megatron_dapo.storage.run_folder import RunFolder
from tests.helpers import REPOSITORY
from tests.report_runs import HOSTILE, START, TOOL, write_branches, write_run

pytestmark = pytest.mark.unit


def records(run: RunFolder) -> list[dict]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def rewrite(run: RunFolder, lines: list[dict]) -> None:
    write_whole(run.metrics, "".join(json.dumps(line) + "\n" for line in lines))


def chunks(page: str) -> dict[str, bytes]:
    """A page's contents, unpacked as a browser does it."""
    parts = re.findall(r'<script type="text/plain" id="chunk-([\w-]+)">([\w+/=]*)</script>', page)
    return {name: zlib.decompress(base64.b64decode(content)) for name, content in parts}


def test_metrics_come_as_columns_with_gaps_and_evaluations_apart(tmp_path):
    run = write_run(tmp_path / "run", num_steps=3)
    lines = records(run)
    del lines[2]["actor/entropy"]  # step 2
    lines[3]["actor/grad_norm"] = None
    rewrite(run, lines)
    data = read_run(run.path)
    assert data.steps["step"] == [1, 2, 3] and data.steps["actor/entropy"][1] is None
    assert data.steps["actor/grad_norm"] == [0.5, 0.5, None]
    assert (data.validations["step"], data.validations["val/accuracy"]) == ([0, 3], [0.25, 0.75])
    assert data.phases["rollout"] == [4.0] * 3 and data.phases["other"] == [0.5, 1.0, 1.0]


def test_servers_of_many_machines_crowd_out_no_other_metric(tmp_path):
    run = write_run(tmp_path / "run", num_steps=3)
    lines = records(run)
    lines[1] |= {f"rollout/{kind}/node{number}:1": 1.0 for number in range(1500) for kind in ("factor", "seats")}
    lines[3]["actor/late"] = 0.25
    rewrite(run, lines)
    steps = read_run(run.path).steps
    assert steps["actor/late"] == [None, None, 0.25] and "rollout/factor/node1:1" in steps


@pytest.mark.parametrize(("shares", "said"), [((0.5, 0.1, None), "34%"), ((0.2, 0.2, None), None)])
def test_the_summary_warns_of_rewarded_cut_responses(tmp_path, shares, said):
    """Of all truncated responses of the run: 6 and 4, and none in the third step."""
    run = write_run(tmp_path / "run", num_steps=3)
    lines = records(run)
    for line, share, number in zip(lines[1:4], shares, (6, 4, 0), strict=True):
        line |= {"dapo/num_truncated_samples": number} | ({} if share is None else {"reward/truncated_correct": share})
    rewrite(run, lines)
    sentence = dict(read_run(run.path).facts).get("Reward")
    assert said is None if sentence is None else sentence.startswith(f"{said} of the truncated responses are judged")


def test_shares_are_made_of_counts(tmp_path):
    steps = read_run(write_run(tmp_path / "run", num_steps=2).path).steps
    assert steps[f"{SHARE}/filtered"] == [0.25, 0.25] and steps[f"{SHARE}/all_correct"] == [0.25, 0.25]
    assert steps[f"{SHARE}/trainer_busy"] == [0.6, 0.6]


def test_a_source_of_held_out_prompts_has_a_line_of_its_own():
    names = ["val/accuracy", "val/aime/accuracy", "val/aime/pass@8", "val/aime/truncation_ratio", "reward/mean"]
    panels = {panel["title"]: panel["series"] for panel in drawn(CURVES, names)}
    assert panels["Held-out accuracy by source"] == [
        ["val/accuracy", "all"],
        ["val/aime/accuracy", "aime/accuracy"],
        ["val/aime/pass@8", "aime/pass@8"],
    ]
    assert panels["Reward"] == [["reward/mean", "shaped"]] and "Entropy" not in panels


def test_events_are_starts_resumes_servers_checkpoints_and_ends(tmp_path):
    run = write_run(tmp_path / "run", num_steps=5)
    lines = records(run)
    lines[3]["rollout/num_servers_current"], lines[3]["weight_sync/num_rejoins"] = 1.2, 1.0  # step 3
    for line in lines[4:]:
        line["time"] += 600
    lines[4]["time/start"] = 2.0  # step 4
    rewrite(run, lines)
    run.checkpoint(3).mkdir(parents=True)
    EndFolder(run.ends, "1").write("trainer-rank-1", End(EndKind.FAILED, 1, "boom", step=5, time=START + 700))
    (run.ends / "damaged.json").write_text("{")
    events = [(event.kind, event.step) for event in read_run(run.path).events]
    assert events == [("start", 0), ("servers", 3), ("rejoin", 3), ("checkpoint", 3), ("resume", 3), ("failure", 5)]
    resume = read_run(run.path).events[4]
    assert resume.text == "Resumed after step 3, 10m02s after it" and resume.time == START + 40 + 600 - 8


@pytest.mark.parametrize(
    "end, state",
    [
        (None, "done"),
        (End(EndKind.SAVED, 85, time=START + 999), "saved"),
        (End(EndKind.HANG, 14, "no progress", time=START + 999), "failed"),
        (End(EndKind.FAILED, 1, "of an earlier start", time=START + 5), "done"),
    ],
)
def test_the_outcome_is_the_newest_end(tmp_path, end, state):
    run = write_run(tmp_path / "run", num_steps=2)
    if end is not None:
        EndFolder(run.ends, "1").write("trainer-rank-0", end)
    data = read_run(run.path)
    assert data.state == state and data.sentence.startswith("2 of 2 steps done")
    assert (end is not None and end.sentence in data.sentence) or state in ("done", "saved")


def test_the_first_failed_process_is_named_and_not_its_victims(tmp_path):
    run = write_run(tmp_path / "run", num_steps=2)
    folder = EndFolder(run.ends, "1")
    folder.write("trainer-rank-0", End(EndKind.PEER_LOST, 1, "connection closed", time=START + 100))
    folder.write("trainer-rank-1", End(EndKind.FAILED, 1, "out of memory", time=START + 101))
    assert read_run(run.path).sentence.endswith("trainer-rank-1 ended (failed): out of memory")


def test_keys_in_which_runs_differ_come_first(tmp_path):
    runs = [read_run(write_run(tmp_path / str(seed), num_steps=2, seed=seed).path) for seed in (1, 7)]
    rows = config_rows(runs)
    assert [(row["key"], row["values"], row["differs"]) for row in rows] == [
        ("trainer.seed", ["1", "7"], True),
        ("data.train_batch_size", ["3", "3"], False),
        ("trainer.total_training_steps", ["2", "2"], False),
    ]


def test_a_folder_without_a_run_is_a_mistake_of_the_user(tmp_path, capsys):
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 2
    assert "is no folder of a run" in capsys.readouterr().err and not (tmp_path / "r.html").exists()
    write_run(tmp_path / "run", num_steps=1)
    assert main(["report", str(tmp_path / "run"), "-o", "/dev/null/r.html"]) == 2
    assert "choose another -o" in capsys.readouterr().err


def test_a_damaged_folder_gives_a_page_of_its_whole_files(tmp_path):
    run = write_run(tmp_path / "run", num_steps=3)
    run.config.write_text("a: [")
    run.machine.write_text("[]")
    run.rollout(1).write_text('{"uid"\n[1]\n{"uid": "left", "responses": [3, {"text": "x", "num_tokens": 1}]}\n')
    run.rollout_tokens(2).write_bytes(b"PK")
    content = chunks(whole_page([run.path]))
    assert json.loads(content["texts-0-0"]) == [{"uid": "left", "responses": [{"text": "x", "num_tokens": 1}]}]
    assert "tokens-0-0" not in content and "tokens-0-1" not in content and "tokens-0-2" in content


def test_a_number_that_no_browser_reads_is_left_out_and_not_its_step(tmp_path):
    run = write_run(tmp_path / "run", num_steps=1)
    response = (
        '{"text": "x", "num_tokens": 1, "reward": NaN, "raw_reward": -1e999, "turns": [{"text": "t", "at": Infinity}]}'
    )
    run.rollout(1).write_text(f'{{"uid": "one", "prompt": "p", "responses": [{response}]}}\n')
    content = chunks(whole_page([run.path]))["texts-0-0"]
    [group] = json.loads(content, parse_constant=lambda name: pytest.fail(name))
    assert group["responses"] == [{"text": "x", "num_tokens": 1, "turns": [{"text": "t"}]}]


@pytest.mark.parametrize("part", [{"gpu_memory_gib": "much"}, {"versions": [1]}, {"versions": None}])
def test_a_damaged_description_of_the_machine_costs_only_its_line(tmp_path, part):
    run = write_run(tmp_path / "run", num_steps=1)
    run.machine.write_text(json.dumps({"trainer_ranks": 2, "device": "cpu", "cpu": "a processor"} | part))
    facts = dict(read_run(run.path).facts)
    assert facts["Trainer"] == "2 ranks on a processor" and "Held-out accuracy" in facts and "Software" not in facts


def test_held_out_answers_stand_beside_those_of_their_prompt(tmp_path):
    run = write_run(tmp_path / "run", num_steps=2)
    answer = {"data_source": "aime", "prompt": "p", "ground_truth": "1", "finish_reason": "stop", "num_tokens": 2}
    lines = [
        answer | {"prompt_index": index, "text": f"{index} {number}", "correct": number == 0}
        for number in (0, 1)
        for index in (4, 9)
    ]
    write_whole(run.validation(2), "".join(json.dumps(line) + "\n" for line in lines))
    files = answer_files(run.path)
    assert [(file.kind, file.step) for file in files] == [("trained", 1), ("trained", 2), ("held-out", 2)]
    groups = files[2].groups()
    assert [[one["text"] for one in group["responses"]] for group in groups] == [["4 0", "4 1"], ["9 0", "9 1"]]
    assert groups[0]["data_source"] == "aime" and tokens_bytes(files[2], groups) is None


def test_an_answer_may_hold_line_separators(tmp_path):
    run = write_run(tmp_path / "run", num_steps=1)
    lines = [json.loads(line) for line in run.rollout(1).read_text().split("\n")[:-1]]
    lines[0]["responses"][0]["text"] = text = "a\u2028b\u2029c\x85d"
    run.rollout(1).write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")
    [file] = answer_files(run.path)
    groups = file.groups()
    assert len(groups) == 3 and groups[0]["responses"][0]["text"] == text
    assert tokens_bytes(file, groups) is not None


def test_what_is_of_the_wrong_kind_is_left_out(tmp_path):
    run = write_run(tmp_path / "run", num_steps=2)
    run.rollout(1).write_text('{"responses": 5}\n')
    end = {"kind": "failed", "step": 1, "time": START + 100}
    run.ends.mkdir(exist_ok=True)
    (run.ends / "a.json").write_text(json.dumps(end | {"sentence": "\ud800 stays"}))
    (run.ends / "b.json").write_text(json.dumps(end | {"sentence": "has no time", "time": float("nan")}))
    content = chunks(whole_page([run.path]))
    [data] = json.loads(content["summary"])["runs"]
    assert [entry["step"] for entry in data["answers"]] == [2]
    assert [event["text"] for event in data["events"] if event["kind"] == "failure"] == ["a ended (failed): ? stays"]


def decoded(code: int) -> float:
    """As the page's tokens.js does it."""
    return 0.0 if code == 0 else float(np.sign(code) * 2 ** ((abs(code) - 96) / 4))


def test_numbers_of_tokens_are_kept_to_nine_percent():
    values = np.concatenate([np.geomspace(1e-7, 200, 400), -np.geomspace(1e-7, 200, 400)])
    restored = np.array([decoded(int(code)) for code in coded(values)])
    assert np.abs(restored / values - 1).max() < 2 ** (1 / 8) - 1 + 1e-6
    assert coded(np.array([0.0, np.nan, 1e9, -1e9, 1e-30])).tolist() == [0, -128, 127, -127, 1]


def test_tokens_reach_the_page_as_they_were_written(tmp_path):
    run = write_run(tmp_path / "run", num_steps=2, mean_length=20)
    dump = TokenDump.read(run.rollout_tokens(2))
    content = chunks(whole_page([run.path]))["tokens-0-1"]
    size = int(np.frombuffer(content, "<u4", 1)[0])
    head, total = json.loads(content[4 : 4 + size]), int(dump.lengths.sum())
    places = np.frombuffer(content, "<u2", total, 4 + size)
    ages = np.frombuffer(content, np.uint8, total, 4 + size + 2 * total)
    assert [head["texts"][place] for place in places] == [dump.texts[token] for token in dump.tokens.tolist()]
    assert np.array_equal(head["newest"] - ages, dump.weight_versions) and set(ages) == {0, 1}
    assert head["lengths"] == dump.lengths.tolist() and set(head["advantages"]) == {1.2, -0.7998}  # float16
    assert head["arrays"] == ["log_probs", "differences"] and len(content) == 4 + size + 5 * total


def test_tokens_of_other_answers_are_not_shown(tmp_path):
    run = write_run(tmp_path / "run", num_steps=2)
    run.rollout_tokens(1).write_bytes(run.rollout_tokens(2).read_bytes())
    [first, _] = answer_files(run.path)
    assert tokens_bytes(first, first.groups()) is None


def test_branches_of_a_trajectory_reach_the_page_with_their_tokens(tmp_path):
    run = write_run(tmp_path / "run", num_steps=1)
    sample = write_branches(run, 2)
    file = answer_files(run.path)[-1]
    [group] = groups = file.groups()
    first, second = group["responses"]
    assert (first["text"], first["num_tokens"], first["num_turns"]) == (
        f"godone\n\ngodone{TOOL * 101}42\n\ndone",
        104,
        4,
    )
    assert [branch["num_tokens"] for branch in first["branches"]] == [2, 104, 1]
    assert [branch["prompt"] for branch in first["branches"]] == ["ask", "ask", " sum"]
    read = {"by": "environment", "text": f"godone{TOOL * 101}"}
    assert [branch["turns"] for branch in first["branches"]] == [
        [{"by": "model", "text": "godone"}],
        [read, {"by": "model", "text": "42"}],
        [{"by": "model", "text": "done"}],
    ]
    assert "turns" not in first and "branches" not in second and len(sample.branches) == 3
    content = tokens_bytes(file, groups)
    head = json.loads(content[4 : 4 + int(np.frombuffer(content, "<u4", 1)[0])])
    assert head["lengths"] == [2, 104, 1, 1] and head["advantages"] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("branches", [5, [], [7], [{"num_tokens": "2"}], [{}, {}], {"num_tokens": 2}, None])
def test_branches_of_the_wrong_kind_are_left_out(tmp_path, branches):
    run = write_run(tmp_path / "run", num_steps=1)
    write_branches(run, 2)
    line = json.loads(run.rollout(2).read_text())
    line["responses"][0]["branches"] = branches
    run.rollout(2).write_text(json.dumps(line) + "\n")
    file = answer_files(run.path)[-1]
    groups = file.groups()
    assert len(groups[0]["responses"]) == 2 and tokens_bytes(file, groups) is None


def ask(url: str, path: str = "tokens/0/trained/1", host: str = "localhost", query: str | None = None) -> int:
    """The status of a part of the page at this address. query: in place of the address's own."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    connection.request("GET", f"/{path}?{address.query if query is None else query}", headers={"Host": host})
    status = connection.getresponse().status
    connection.close()
    return status


@contextmanager
def watched_server(folder: Path):
    server = make_server([folder], 0)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("path", ["", "summary", "texts/0/trained/1", "tokens/0/trained/1", "nowhere"])
def test_a_watched_page_answers_nobody_who_lacks_its_key(tmp_path, path):
    with watched_server(write_run(tmp_path / "run", num_steps=1).path) as server:
        wrong = ("", "key=", "key=x", f"key={'x' * 43}", "token=x", "key=%ff%00", f"{urlsplit(server.url).query}x")
        assert [ask(server.url, path, query=query) for query in wrong] == [403] * len(wrong)
        assert ask(server.url, path) == (404 if path == "nowhere" else 200)


def test_the_key_of_a_watched_page_is_new_each_time_and_only_printed(tmp_path, capsys, monkeypatch):
    run = write_run(tmp_path / "run", num_steps=1)
    keys = []
    for _ in range(2):
        with watched_server(run.path) as server:
            keys.append(parse_qs(urlsplit(server.url).query)["key"][0])
            ask(server.url)
            assert keys[-1] not in server.watched.page and keys[-1] not in server.watched.summary(server.watched.tag())
    assert keys[0] != keys[1] and all(len(key) >= 43 for key in keys)
    assert not any(key in text for key in keys for text in capsys.readouterr())
    monkeypatch.setattr("http.server.ThreadingHTTPServer.serve_forever", raise_interrupt)
    assert main(["report", str(run.path), "--watch", "--port", "0"]) == 0
    assert re.match(r"http://127\.0\.0\.1:\d+/\?key=[\w-]{43} follows ", capsys.readouterr().out)


def raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_watched_page_is_for_names_of_this_machine_at_any_port(tmp_path, capsys):
    hosts = ("127.0.0.1:9000", "localhost:1", "localhost", "evil.org", "127.0.0.1.evil.org:9000", "")
    with watched_server(write_run(tmp_path / "run", num_steps=1).path) as server:
        assert [ask(server.url, host=host) for host in hosts] == [200, 200, 200, 403, 403, 403]
    for error in (ConnectionResetError(), BrokenPipeError(), ValueError("ours")):
        try:
            raise error
        except Exception:
            server.handle_error(None, None)
        assert ("ours" in capsys.readouterr().err) == isinstance(error, ValueError)


def test_a_watched_page_is_sent_only_the_part_that_it_asks_for(tmp_path, monkeypatch):
    watched = Watched([write_run(tmp_path / "run", num_steps=1).path])
    monkeypatch.setattr(
        "megatron_dapo.commands.report.watch.tokens_bytes", lambda *_: pytest.fail("nobody asked for tokens")
    )
    assert watched.answers("texts", 0, "trained", 1)
    monkeypatch.undo()
    monkeypatch.setattr(
        "megatron_dapo.commands.report.watch.texts_bytes", lambda *_: pytest.fail("nobody asked for texts")
    )
    assert watched.answers("tokens", 0, "trained", 1) and watched.answers("tokens", 0, "trained", 2) is None
    RunFolder(watched.folders[0]).rollout_tokens(1).unlink()
    assert watched.answers("tokens", 0, "trained", 1) == "", "a step whose tokens are not there yet is no error"


def test_hostile_text_stays_text(tmp_path):
    folder = tmp_path / "<script>alert(1)</script>"
    run = write_run(folder, num_steps=2)
    page = whole_page([run.path])
    assert HOSTILE not in page and "<script>alert" not in page and "onerror" not in page.partition("<body>")[2][:5000]
    assert HOSTILE in json.loads(chunks(page)["texts-0-1"])[0]["responses"][0]["text"]


def test_a_page_asks_nobody_for_anything(tmp_path):
    page = whole_page([write_run(tmp_path / "run", num_steps=1).path])
    head = page.partition("<body>")[0]
    assert "default-src 'none'" in head and "connect-src 'none'" in head
    assert not re.findall(
        r"<(?:script|img|link|iframe)[^>]*\b(?:src|href)=\"(?!data:,)[^\"]*", page.partition("plotly.js v")[0]
    )


def test_a_page_has_the_formulas_script_once_with_its_licence_and_without_its_font(tmp_path):
    page = whole_page([write_run(tmp_path / "run", num_steps=1).path])
    folder = REPOSITORY / "megatron_dapo" / "commands" / "report" / "page" / "temml"
    assert page.count((folder / "temml.min.js").read_text()) == page.count((folder / "LICENSE").read_text()) == 1
    style = page.partition("<body>")[0]
    assert "math.tml-display" in style and "@font-face" not in style and "url('Temml" not in style


def kept(sizes: list[tuple[int, int]], max_bytes: int) -> list[tuple[int, bool]]:
    answers = [
        StepAnswers(StepFile("trained", step, Path()), 1, 1, "x" * texts, "y" * tokens)
        for step, (texts, tokens) in enumerate(sizes, start=1)
    ]
    carried = fitting(answers, max_bytes)
    assert sum(len(each.texts) + len(each.tokens) for each in carried) <= max_bytes or len(carried) == 1
    return [(each.file.step, bool(each.tokens)) for each in carried]


def test_where_not_all_answers_fit_those_of_steps_at_equal_distances_stay():
    assert kept([(10, 10)] * 5, 100) == [(step, True) for step in range(1, 6)]
    assert [step for step, _ in kept([(10, 0)] * 9, 50)] == [1, 3, 5, 7, 9]
    thinned = kept([(10, 30)] * 9, 150)
    assert [step for step, _ in thinned] == list(range(1, 10)) and thinned[0][1] and thinned[-1][1]
    assert sum(has_tokens for _, has_tokens in thinned) == 2
    assert kept([(100, 0)] * 3, 10) == [(3, False)]
    assert kept([], 10) == []


def test_runs_share_the_room_of_a_page(tmp_path):
    folders = [write_run(tmp_path / str(seed), num_steps=20, mean_length=40, seed=seed).path for seed in (0, 1)]
    whole = sum(len(each.texts) + len(each.tokens) for each in answers_of(folders[:1])[0])
    first, second = answers_of(folders, max_bytes=whole)
    assert 1 < len(first) <= 20 and {len(first), len(second)} != {20}
    assert first[-1].file.step == 20 and second[-1].file.step == 20


def test_large_evaluations_leave_room_for_trained_answers_and_few_files_are_read(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", num_steps=40)
    rng = random.Random(0)
    for step in (0, 40):
        lines = [{"prompt_index": n, "prompt": f"{n}", "text": rng.randbytes(300).hex()} for n in range(200)]
        write_whole(run.validation(step), "".join(json.dumps(line) + "\n" for line in lines))
    read, groups = [], StepFile.groups
    monkeypatch.setattr(StepFile, "groups", lambda file: read.append(file) or groups(file))
    [carried] = answers_of([run.path], max_bytes=20_000)
    trained = [each.file.step for each in carried if each.file.kind == "trained"]
    [evaluation] = [each for each in carried if each.file.kind == "held-out"]
    assert trained[0] == 1 and trained[-1] == 40 and len(trained) > 2
    assert evaluation.file.step == 40 and 0 < evaluation.num_groups < 200 and len(evaluation.texts) <= 6000
    assert sum(len(each.texts) + len(each.tokens) for each in carried) <= 20_000
    read.clear()
    answers_of([run.path], max_bytes=1500)
    assert len(read) < 20


def test_no_other_command_imports_the_drawing_packages():
    """The trainer must not wait for it, nor fail without it."""
    import subprocess
    import sys

    script = "import sys, megatron_dapo.__main__; print([m for m in ('plotly', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "[]"


def test_the_summary_has_no_number_that_json_cannot_hold(tmp_path):
    run = write_run(tmp_path / "run", num_steps=2)
    lines = run.metrics.read_text().replace('"actor/grad_norm": 0.5', '"actor/grad_norm": NaN, "actor/lr": 1e999')
    run.metrics.write_text(lines)
    json.dumps(summary([run.path]), allow_nan=False)
