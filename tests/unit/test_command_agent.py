"""Agents that are commands, in real processes: their task and its result, and that nothing of them
is left."""

import asyncio
import json
import math
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatron_dapo.agents import command_process
from megatron_dapo.agents.interface import Outcome
from megatron_dapo.common.errors import UserError
from tests.agent_pools import KEY, REWARD_KEY, endpoint, failure, in_pool, task

pytestmark = pytest.mark.unit

AGENT = """
import json, os, signal, subprocess, sys, time

task_file, result_file, notes, url, model = sys.argv[1:]
with open(task_file) as file:
    task = json.load(file)

def note(text):
    with open(notes, "a") as file:
        print(text, file=file)

def result(text):
    with open(result_file, "w") as file:
        file.write(text)

note(os.path.dirname(task_file))
word = task["prompt"]
if word == "echo":
    names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "TMPDIR")
    seen = {name: os.environ[name] for name in names}
    seen |= {"secrets": [*{"HF_TOKEN", "MY_API_KEY"} & {*os.environ}], "PYTHONPATH": os.environ.get("PYTHONPATH")}
    seen |= {"url": url, "model": model, "task": task, "cwd": os.getcwd()}
    seen |= {"mode": os.stat(os.path.dirname(task_file)).st_mode}
    seen |= {"cmdlines": open("/proc/self/cmdline").read() + open(f"/proc/{os.getppid()}/cmdline").read()}
    seen |= {"stdin": sys.stdin.read()}
    note(json.dumps(seen))
    result('{"reward": 0.5, "correct": true, "metrics": {"tools": 2}}')
elif word == "nothing":
    pass
elif word == "exit":
    result('{"reward": 1}')
    print("first\\nno such tool\\n")
    sys.exit(3)
elif word == "signal":
    os.kill(os.getpid(), signal.SIGSEGV)
elif word == "link":
    os.symlink("/etc/passwd", result_file)
elif word == "pipe":
    os.mkfifo(result_file)
elif word == "folder":
    os.mkdir(result_file)
elif word == "large":
    result('{"error": "' + "x" * (1 << 20) + '"}')
elif word == "daemon":
    script = "sleep 600 & echo $! >> " + notes + "; exec sleep 600"
    child = subprocess.Popen(["sh", "-c", script], start_new_session=True)
    note(child.pid)
    while len(open(notes).read().split()) < 3:
        time.sleep(0.01)
elif word in ("wait", "stubborn"):
    if word == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    note(os.getpid())
    try:
        while True:
            time.sleep(0.05)
    finally:
        note("finally")
else:
    result(word)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    return tmp_path


def command(folder, program=sys.executable):
    words = ("{task_file}", "{result_file}", str(folder / "notes"), "url={base_url}", "{model}")
    return [program, str(folder / "agent.py"), *words]


def with_command(folder, use, **keys):
    return in_pool(folder, use, **{"command": command(folder), "num_workers": 1} | keys)


async def notes(folder, number):
    """The first notes of an agent, once it has made so many."""
    path = folder / "notes"
    while not path.exists() or len(path.read_text().split()) < number:
        await asyncio.sleep(0.01)
    return path.read_text().split()


def test_a_command_gets_its_task_and_no_argument_holds_a_key(folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "1")
    monkeypatch.setenv("MY_API_KEY", "1")
    own = endpoint("http://127.0.0.1:8000")
    outcome = with_command(folder, lambda pool: pool.run(task("echo"), own, math.inf), pass_env=["MY_API_KEY"])
    assert outcome == Outcome(0.5, True, None, {"tools": 2.0})
    private, seen = (folder / "notes").read_text().split("\n", 1)
    seen = json.loads(seen)
    assert KEY not in seen["cmdlines"] and REWARD_KEY not in seen["cmdlines"]
    assert seen["OPENAI_API_KEY"] == seen["ANTHROPIC_API_KEY"] == KEY
    assert seen["OPENAI_BASE_URL"] == f"http://127.0.0.1:8000/t/{KEY}/v1"
    assert seen["ANTHROPIC_BASE_URL"] == f"http://127.0.0.1:8000/t/{KEY}"
    assert (seen["url"], seen["model"]) == ("url=http://127.0.0.1:8000/v1", "policy")
    assert seen["secrets"] == ["MY_API_KEY"] and seen["PYTHONPATH"] is None and seen["stdin"] == ""
    assert seen["cwd"] == os.getcwd() and seen["TMPDIR"] == private and stat.S_IMODE(seen["mode"]) == 0o700
    assert seen["task"]["ground_truth"] == "42" and seen["task"]["extra_info"] == {"answer": "42"}
    assert seen["task"]["model"] == own.as_dict()
    assert not os.path.exists(private), "it is removed"


FAILURES = {
    "exit": "crash: exit code 3: no such tool",
    "signal": "crash: exit code 139: it wrote nothing",
    "link": "crash: its result file: a symbolic link",
    "pipe": "crash: its result file: not a regular file",
    "folder": "crash: its result file: Is a directory",
    "large": "crash: its result file: larger than 1 MiB",
    '{"reward": NaN}': "crash: its result file: an agent's outcome, reward: Input should be",
    '{"reward": 1': "crash: its result file: Expecting",
    "[" * 100_000: "crash: its result file: lists and objects are nested more than 100 deep",
    "3": "crash: its result file: an agent's outcome is an object with some of",
    "\0": "crash: its result file: Expecting value",
    " ": "crash: its result file: Expecting value",
}


def test_a_bad_end_or_result_is_a_sentence_and_no_result_leaves_the_reward_to_others(folder):
    async def use(pool):
        reasons = await asyncio.gather(*(failure(pool, word) for word in FAILURES))
        for word in ("nothing", ""):
            assert await pool.run(task(word), endpoint(), 60.0) == Outcome()
        assert [
            seen for seen, reason in zip(reasons, FAILURES.values(), strict=True) if not seen.startswith(reason)
        ] == []

    with_command(folder, use)
    assert not list((folder / "temporary").iterdir())


def test_the_output_of_a_command_with_a_bad_result_is_kept(folder):
    script = "import sys\nprint('words')\nopen(sys.argv[1], 'w').write('[]')"
    words = [sys.executable, "-c", script, "{result_file}"]
    assert "its result file" in with_command(folder, failure, command=words)
    assert (folder / "agents.log").read_text() == "== test 0\nwords\n\n"


def test_a_flood_of_short_outputs_takes_no_core():
    chunks = [b"x"] * 20 + [b""]

    async def read(_):
        return chunks.pop(0)

    flood = SimpleNamespace(returncode=None, stdout=SimpleNamespace(read=read))
    started = time.monotonic()
    assert asyncio.run(command_process._head_and_tail(flood)) == b"x" * 20
    assert time.monotonic() - started >= 20 * command_process._PAUSE_S, "it is left to the pipe to gather them"


def test_a_large_output_keeps_its_beginning_and_end(folder, monkeypatch):
    monkeypatch.setattr(command_process, "_PAUSE_S", 0.0)
    code = "for _ in range(2048): print('x' * 65535)\nprint('the last words')"
    ended = asyncio.run(command_process.run_to_end([sys.executable, "-c", code], os.environ))
    head, left_out, tail = ended.output.partition(f"\n... {(1 << 27) + 15 - 65536} bytes ...\n")
    assert (len(head), len(tail), head[:2], tail[-15:]) == (32768, 32768, "xx", "the last words\n") and left_out
    script = "import sys\nprint('words')\nopen(sys.argv[1], 'w').write('{}')"
    with_command(
        folder, lambda pool: pool.run(task(), endpoint(), 60.0), command=[sys.executable, "-c", script, "{result_file}"]
    )
    assert (folder / "agents.log").read_text() == "== test 0\nwords\n\n"


def test_a_daemon_ends_with_its_command(folder):
    with_command(folder, lambda pool: pool.run(task("daemon"), endpoint(), 60.0))
    _, *pids = (folder / "notes").read_text().split()
    assert len(pids) == 2 and not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_command_ends_though_another_process_holds_its_output(folder, monkeypatch):
    monkeypatch.setattr(command_process, "_LOOK_S", 0.05)
    code = (
        "import os, sys, time\nprint('words', flush=True)\n"
        "with open(sys.argv[1], 'w') as file: print(os.getpid(), file=file)"
        "\nwhile os.path.exists(sys.argv[1]): time.sleep(0.01)"
    )

    async def use():
        command = [sys.executable, "-c", code, str(folder / "notes")]
        running = asyncio.create_task(command_process.run_to_end(command, os.environ))
        (pid,) = await notes(folder, 1)
        with open(f"/proc/{pid}/fd/1", "wb"):
            (folder / "notes").unlink()
            return await asyncio.wait_for(running, 30.0)

    assert asyncio.run(use()) == command_process.Ended(0, "words\n")


def test_a_cancelled_command_runs_its_finally_and_a_stubborn_one_is_killed(folder, monkeypatch):
    async def use(pool):
        running = asyncio.create_task(pool.run(task("wait"), endpoint(), math.inf))
        private, pid = await notes(folder, 2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (folder / "notes").read_text().split() == [private, pid, "finally"]
        assert not os.path.exists(private) and not os.path.exists(f"/proc/{pid}")
        (folder / "notes").unlink()
        assert await failure(pool, "wait", timeout_s=0.05) == "timeout"
        (folder / "notes").unlink(missing_ok=True)

    async def use_stubborn(pool):
        running = asyncio.create_task(pool.run(task("stubborn"), endpoint(), math.inf))
        private, pid = await notes(folder, 2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not os.path.exists(private) and not os.path.exists(f"/proc/{pid}"), "before the caller goes on"
        assert "finally" not in (folder / "notes").read_text()

    with_command(folder, use)
    monkeypatch.setattr("megatron_dapo.agents.agent_pool._GRACE_S", 1.0)
    with_command(folder, use_stubborn)


def test_commands_end_when_the_run_is_killed(folder):
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.agent_pools import *\nkeys = {'command': sys.argv[2:]}\n"
        "in_pool(Path(sys.argv[1]), lambda pool: pool.run(task('stubborn'), endpoint(), 60.0), **keys)"
    )
    run = subprocess.Popen([sys.executable, "-c", code, str(folder), *command(folder)])
    _, pid = asyncio.run(asyncio.wait_for(notes(folder, 2), 60.0))
    process = psutil.Process(int(pid))
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert process.wait(60.0) is None


@pytest.mark.parametrize(("place", "reason"), [(0, "crash: exit code 137"), (1, "crash: ")], ids=["guard", "worker"])
def test_a_command_ends_with_each_process_above_it_and_the_next_one_is_served(folder, place, reason):
    async def use(pool):
        running = asyncio.create_task(failure(pool, "stubborn"))
        _, pid = await notes(folder, 2)
        process = psutil.Process(int(pid))
        process.parents()[place].kill()
        assert (await running).startswith(reason)
        process.wait(60.0)
        assert await pool.run(task("nothing"), endpoint(), 60.0) == Outcome()

    with_command(folder, use)


def test_many_commands_run_at_once(folder):
    async def use(pool):
        outcomes = await asyncio.gather(*(pool.run(task('{"reward": 1}'), endpoint(), 60.0) for _ in range(16)))
        assert outcomes == [Outcome(1.0)] * 16

    with_command(folder, use)


@pytest.mark.parametrize(
    ("words", "more", "sentence"),
    [
        (["no_such_program"], {}, "no_such_program is no program that can be run from here"),
        (["/etc/passwd"], {}, "/etc/passwd is no program"),
        ([sys.executable, "--key={key}"], {}, "has {key}, but all users of this machine can read arguments"),
    ],
)
def test_an_unusable_command_is_one_sentence_at_the_start(folder, words, more, sentence):
    with pytest.raises(UserError) as error:
        in_pool(folder, None, command=words, num_workers=1, **more)
    assert len(error.value.sentences) == 1 and sentence in error.value.sentences[0]
    assert error.value.sentences[0].startswith("actor_rollout_ref.rollout.agent.command")


def test_a_program_may_be_named_from_the_folder_of_the_run(folder, monkeypatch):
    monkeypatch.chdir(folder)
    Path("agent.sh").write_text("#!/bin/sh\necho '{\"reward\": 2}' > $1")
    Path("agent.sh").chmod(0o755)
    keys = {"command": ["./agent.sh", "{result_file}"]}
    assert with_command(folder, lambda pool: pool.run(task(), endpoint(), 60.0), **keys).reward == 2.0
