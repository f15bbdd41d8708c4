"""Commands in a sandbox: they reach their own model and nothing else, and do no harm."""

import asyncio
import json
import math
import os
import socket
import subprocess
import sys
import time
import venv
from pathlib import Path

import psutil
import pytest

from megatron_dapo.agents import command_process
from megatron_dapo.agents.command_agent import CommandAgent
from megatron_dapo.agents.command_process import run_in_sandbox
from megatron_dapo.agents.interface import Outcome
from megatron_dapo.common.errors import UserError
from tests.agent_pools import KEY, REWARD_KEY, endpoint, failure, gateway, running_pool, task

pytestmark = pytest.mark.unit

PYTHON = os.path.realpath(sys.executable)


@pytest.fixture(scope="module", autouse=True)
def way():
    try:
        command_process.check_sandbox()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture
def others():
    """The processes that other tests left in this one."""
    return {*psutil.Process().children(recursive=True)}


def in_sandbox(argv, **more):
    return asyncio.run(asyncio.wait_for(run_in_sandbox(argv, **more), 60.0))


def test_a_command_has_its_files_and_its_exit_code():
    script = "cat data/text; awk 'BEGIN { print 1 + 1 }'; echo $WORD; cat /dev/stdin; pwd; exit 3"
    ended = in_sandbox(["sh", "run.sh"], files={"run.sh": script, "data/text": "été\n"}, environment={"WORD": "word"})
    assert (ended.exit_code, ended.output) == (3, "été\n2\nword\n/tmp\n")
    assert in_sandbox(["./run"], files={"run": "#!/bin/sh\nkill -9 $$"}).exit_code == 137
    missing = in_sandbox(["no_such_program"])
    assert missing.exit_code == 127 and "no_such_program" in missing.output
    assert in_sandbox(["cat", __file__]).exit_code == 1, "words open no files of this machine"
    assert (
        in_sandbox(["cat", __file__], paths=[__file__]).output
        == Path(__file__).read_text()[:1] + (in_sandbox(["cat", __file__], paths=[__file__]).output[1:])
    )


def test_of_a_large_output_the_beginning_and_the_end_are_kept(monkeypatch):
    monkeypatch.setattr(command_process, "_PAUSE_S", 0.0)
    ended = in_sandbox(["sh", "-c", "echo begin; head -c 300M /dev/zero; echo end"])
    assert len(ended.output) < 70_000 and ended.output.startswith("begin") and ended.output.endswith("end\n")


# each prints "harm" on success
MALICIOUS = {
    "forks": "for n in range(99):\n  if os.fork() == 0: time.sleep(60)\nprint('harm')",
    "a fork bomb": "try:\n  while True: os.fork()\nexcept OSError: os.getpid() == FIRST or time.sleep(60)",
    "threads": "import threading\nfor _ in range(99):\n"
    "  threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\nprint('harm')",
    "a full disk": "for i in range(9): open(f'/tmp/{i}', 'wb').write(bytes(8 << 20))\nprint('harm')",
    "memory": "x = bytearray(5 << 30)\nprint('harm')",
    "unmapped memory": "os.memfd_create('x')\nprint('harm')",
    "many sockets": "x = [socket.socket() for _ in range(300)]\nprint('harm')",
    "this machine's network": "socket.create_connection(('127.0.0.1', PORT), 1)\nprint('harm')",
    "the internet": "socket.create_connection(('192.0.2.1', 80), 1)\nprint('harm')",
    "the host of this machine": "socket.socket(socket.AF_VSOCK)\nprint('harm')",
    "the kernel's own sockets": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)\nprint('harm')",
    "raw packets": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)\nprint('harm')",
    "abstract sockets": "socket.socket(socket.AF_UNIX).connect(ABSTRACT)\nprint('harm')",
    "root": "os.setuid(0)\nprint('harm')",
    "another user": "os.setresuid(0, 0, 0)\nprint('harm')",
    "a program of root": "print('harm' if subprocess.run(['/usr/bin/su', '-c', 'true']).returncode == 0 else '')",
    "a new namespace": "print('harm' if ctypes.CDLL(None).unshare(0x10000000) == 0 else '')",
    "a mount": "print('harm' if ctypes.CDLL(None).mount(b'/usr', b'/tmp', b'', 4096, None) == 0 else '')",
    "a debugger": "print('harm' if ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0 else '')",
    "a signal": "os.kill(JUDGE, 0)\nprint('harm')",
    "signals to all": "os.kill(-1, 9)",
    "others' processes": "print('harm' if any(pid.isdigit() and int(pid) > 99 for pid in os.listdir('/proc')) else '')",
    "the parent's environment": "print('harm' if 'PLANTED' in open('/proc/1/environ').read() else '')",
    "the parent's memory": "open('/proc/1/mem', 'r+b').read(1)\nprint('harm')",
    "the kernel's settings": "open('/proc/sys/kernel/core_pattern', 'w')\nprint('harm')",
    "a system request": "open('/proc/sysrq-trigger', 'w')\nprint('harm')",
    "its environment": "print('harm' if 'PLANTED' in os.environ else '')",
    "the home": "os.listdir(HOME)\nprint('harm')",
    "the repository": "open(TEST).read()\nprint('harm')",
    "passwords": "open('/etc/passwd').read()\nprint('harm')",
    "a symbolic link": "os.symlink(TEST, '/tmp/x')\nopen('/tmp/x').read()\nprint('harm')",
    "the system": "open('/usr/bin/planted', 'w')\nprint('harm')",
    "the root folder": "open('/planted', 'w')\nprint('harm')",
    "higher limits": "resource.setrlimit(resource.RLIMIT_NPROC, (-1, -1))\nprint('harm')",
    "a daemon": "if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(600)",
}


# these have a sandbox each, as they may end it
ALONE = ("forks", "a fork bomb", "threads", "a full disk", "signals to all", "a daemon")
ALL_OTHERS = """
import json, subprocess, sys
programs = json.load(open("programs"))
run = [(name, subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)) for name, code in programs]
print(json.dumps({name: done.stdout + done.stderr for name, done in run}))
"""


def program(name, **names):
    start = "import ctypes, os, resource, socket, subprocess, time\nFIRST = os.getpid()\n"
    return start + "".join(f"{key} = {value!r}\n" for key, value in names.items()) + MALICIOUS[name]


def test_a_malicious_program_does_no_harm(monkeypatch, others):
    monkeypatch.setenv("PLANTED", "1")
    monkeypatch.setattr(command_process, "_TMP_BYTES", 64 << 20)
    monkeypatch.setitem(command_process._LIMITS, "RLIMIT_NPROC", 64)
    abstract = f"\0{os.getpid()}"

    async def all_of_them():
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
            unix.bind(abstract)
            unix.listen()
            names = {"HOME": str(Path.home()), "TEST": __file__, "PORT": server.getsockname()[1]}
            names |= {"JUDGE": os.getpid(), "ABSTRACT": abstract}
            programs = {name: program(name, **names) for name in MALICIOUS}
            quiet = {"programs": json.dumps([item for item in programs.items() if item[0] not in ALONE])}
            *alone, rest = await asyncio.gather(
                *(run_in_sandbox([PYTHON, "-c", programs[name]]) for name in ALONE),
                run_in_sandbox([PYTHON, "-c", ALL_OTHERS], files=quiet),
            )
        return {name: ended.output for name, ended in zip(ALONE, alone, strict=True)} | json.loads(rest.output)

    outputs = asyncio.run(asyncio.wait_for(all_of_them(), 60.0))
    assert outputs.keys() == MALICIOUS.keys()
    assert [name for name, output in outputs.items() if "harm" in output] == []
    missing = f"No such file or directory: '{sys.base_prefix}/"  # a sandbox without our interpreter proves nothing
    bluffs = ("SyntaxError", "NameError", "AttributeError", "ImportError", missing)
    assert [name for name, output in outputs.items() if any(error in output for error in bluffs)] == []
    assert {*psutil.Process().children(recursive=True)} <= others, "nothing outlives"
    assert in_sandbox(["echo", "well"]).output == "well\n"


@pytest.mark.parametrize("name", ["a symbolic link", "passwords", "a signal", "many sockets"])
def test_the_harm_would_show_without_a_sandbox(name, tmp_path):
    code = program(name, TEST=__file__, JUDGE=os.getpid()).replace("/tmp/x", str(tmp_path / "x"))
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "harm\n"


def test_an_endless_program_ends_in_time(others):
    async def endless():
        started = time.monotonic()
        code = "import signal\nsignal.signal(15, signal.SIG_IGN)\nwhile True: pass"
        with pytest.raises(TimeoutError):
            await run_in_sandbox([PYTHON, "-c", code], timeout_s=0.5)
        return time.monotonic() - started

    assert asyncio.run(asyncio.wait_for(endless(), 60.0)) < 20.0
    assert {*psutil.Process().children(recursive=True)} <= others


AGENT = """
import json, os, socket, sys, time, urllib.error, urllib.request
from concurrent.futures import ThreadPoolExecutor

def post(url, num_bytes):
    try:
        with urllib.request.urlopen(url + "/chat/completions", bytes(num_bytes), timeout=30) as response:
            return json.load(response)["read"]
    except urllib.error.HTTPError as error:
        return error.code

with open(sys.argv[1]) as file:
    task = json.load(file)
if task["prompt"] == "fail":
    sys.exit("no luck")
if task["prompt"] == "link":
    os.symlink("/etc/ld.so.cache", sys.argv[2])
    sys.exit()
if task["prompt"] != "hello":
    with open(sys.argv[2], "w") as file:
        file.write(task["prompt"])
    sys.exit()
url = os.environ["OPENAI_BASE_URL"]
seen = {"small": post(url, 10), "large": post(url, 5 << 20), "another": post(url.replace("kkk", "jjj"), 10)}
with ThreadPoolExecutor(16) as threads:
    seen["many"] = sum(threads.map(lambda size: post(url, size), range(100)))
try:
    flood = [socket.create_connection(("127.0.0.1", 18080)) for _ in range(1000)]
except OSError:
    seen["flood"] = "refused"
flood = None
while "after" not in seen:
    try:
        seen["after"] = post(url, 10)
    except OSError:  # not all of the flood is closed yet
        time.sleep(0.05)
seen["task"] = task
seen["words"] = sys.argv[1:]
seen["environment"] = dict(os.environ)
seen["prefix"] = sys.prefix
with open(sys.argv[2], "w") as file:
    json.dump({"answer": "x" * 900_000}, file)
print(json.dumps(seen))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_API_KEY", "mine")
    venv.create(tmp_path / "own", with_pip=False, symlinks=True)
    (tmp_path / "agent.py").write_text(AGENT)
    return tmp_path


def test_a_sandboxed_agent_reaches_its_model_alone_and_has_no_secret_of_the_reward(folder):
    words = ["own/bin/python", "agent.py", "{task_file}", "{result_file}", "{base_url}", "{model}"]

    async def use():
        async with (
            gateway(folder) as (path, asked),
            running_pool(folder, command=words, sandbox=True, num_workers=1, pass_env=["MY_API_KEY"]) as pool,
        ):
            own = endpoint("http://10.0.0.1:8000", path)
            assert await pool.run(task(number=2), own, math.inf) == Outcome(answer="x" * 900_000)
            failures = {
                "fail": "crash: exit code 1: no luck",
                '{"reward": 1}': "crash: a reward from within the sandbox",
                '{"answer": "' + "x" * (1 << 20) + '"}': "crash: its result file: Unterminated string",
            }
            reasons = await asyncio.gather(*(failure(pool, word, to=own) for word in failures))
            assert all(map(str.startswith, reasons, failures.values())), reasons
            assert await pool.run(task("link"), own, math.inf) == Outcome()
            return asked

    asked = asyncio.run(asyncio.wait_for(use(), 60.0))
    assert {*asked} == {f"/t/{KEY}/v1/chat/completions", f"/t/{KEY.replace('kkk', 'jjj')}/v1/chat/completions"}
    text = (folder / "agents.log").read_text()
    seen = json.loads(text.splitlines()[1])
    answers = {name: seen[name] for name in ("small", "large", "another", "many", "flood", "after")}
    assert answers == {"small": 10, "large": 5 << 20, "another": 401, "many": 4950, "flood": "refused", "after": 10}
    assert seen["prefix"] == str(folder / "own"), "its own interpreter"
    assert seen["words"] == ["/tmp/task.json", "/tmp/result.json", "http://127.0.0.1:18080/v1", "policy"]
    assert {*seen["task"]} == {"prompt", "messages", "data_source", "number", "is_validation", "model"}
    assert (seen["task"]["number"], seen["environment"]["MY_API_KEY"]) == (2, "mine")
    assert REWARD_KEY not in text and '"42"' not in text
    assert not (folder / "result.json").exists()


def test_a_link_to_a_program_shows_its_environment_and_not_the_links_neighbours(folder):
    python, script = folder / "own/bin/python", folder / "own/bin/harness"
    script.write_text(f"#!{python}\nimport os, sys\nprint(sys.prefix, os.path.exists({str(folder / 'share')!r}))")
    script.chmod(0o755)
    for name in ("bin", "share"):
        (folder / name).mkdir()
    (folder / "bin/harness").symlink_to(script)
    (folder / "bin/python").symlink_to(PYTHON)
    for words, output in (
        (["bin/harness"], f"{folder / 'own'} False\n"),
        (["bin/python", "-c", "import json, sys; print(sys.prefix)"], f"{sys.base_prefix}\n"),
    ):
        agent = CommandAgent(words, True, [], 0.0)
        asyncio.run(agent.start())
        assert in_sandbox(agent._words, paths=agent._paths).output == output


def test_a_program_that_a_sandbox_cannot_read_is_a_sentence_at_the_start(folder, monkeypatch):
    monkeypatch.setattr("megatron_dapo.agents.command_agent._installation", lambda _: [])
    monkeypatch.setattr("os.path.isfile", lambda _: False)
    with pytest.raises(UserError, match=r"agent.command: own/bin/python cannot be run in the sandbox"):
        asyncio.run(CommandAgent(["own/bin/python"], True, [], 0.0).start())


def test_a_sandbox_that_did_not_start_in_time_is_tried_again(monkeypatch):
    monkeypatch.setattr("megatron_dapo.rewards.code.sandbox._PROBE_S", 0.0)
    with pytest.raises(UserError, match="TimeoutError"):
        command_process.check_sandbox.__wrapped__()
    monkeypatch.undo()
    command_process.check_sandbox.__wrapped__()


def test_without_bubblewrap_the_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(command_process, "way_fault", lambda _: "bwrap: No such file or directory")
    with pytest.raises(UserError) as error:
        command_process.check_sandbox.__wrapped__()
    (sentence,) = error.value.sentences
    assert "make setup-sandbox" in sentence and "rollout.agent.sandbox=false" in sentence
