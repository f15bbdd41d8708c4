"""The reward `code_tests`: inputs and comparisons of programs, and that no program does harm."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings

from examples.code_tests.problems import scores
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.data.samples import Prompt
from megatron_dapo.rewards.code import sandbox
from megatron_dapo.rewards.code.cases import program, read_cases, same_output
from megatron_dapo.rewards.code.reward import code_tests
from megatron_dapo.rewards.reward_pool import RewardPool
from megatron_dapo.rewards.reward_registry import check_ground_truths
from megatron_dapo.rollout.build_rollout import make_reward_pool
from tests.silence import SILENCE

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def way():
    try:
        return sandbox.find_way()
    except UserError as error:
        pytest.skip(str(error))


def verdict(code, truth, **kwargs):
    return code_tests("taco", f"```python\n{code}\n```", json.dumps(truth), {}, **kwargs)["score"]


def test_the_last_block_of_python_is_the_program():
    assert program("<think>```python\n0\n```</think>a\n```python\n1\n```\n```py\n2\n```\nprints\n```\n3\n```") == "2\n"
    assert program("```\n1\n```") == "1\n"
    assert program("```python\n1") == "1"
    assert program("print(1)") == "print(1)"


@settings(max_examples=20)
@given(response=SILENCE)
def test_silence_is_never_right(way, response):
    truth = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})
    assert not code_tests("taco", response, truth, {})["correct"]


def test_outputs_are_compared_word_by_word_and_decimals_are_rounded():
    assert same_output("1 2\n3\n", "1  2 \n3")
    assert same_output("0.333333", "0.3333333333")
    assert not same_output("0.333333", "0.3334")
    assert not same_output("1 2", "2 1")
    assert not same_output("1\n2", "1 2")
    assert not same_output("1000000", "1000001")
    assert not same_output("yes", "no")


@pytest.mark.parametrize(
    "truth", ["3", "{}", '{"inputs": ["1"], "outputs": []}', '{"assert_case": "import os; os.system(1)"}', "no JSON"]
)
def test_a_ground_truth_without_tests_is_refused(truth):
    with pytest.raises(ValueError):
        read_cases(truth)


def test_a_run_names_the_first_prompts_whose_ground_truths_hold_no_tests():
    good = json.dumps({"assert_case": ["assert f(1) == 1"]})
    truths = [
        good,
        "3",
        "{",
        '{"assert_case": ["import math"]}',
        '{"assert_case": 5}',
        '{"fn_name": "f", "inputs": [1]}',
    ]
    prompts = [Prompt(i, "", (1,), f"problem {i}", "taco", truth) for i, truth in enumerate(truths)]
    check_ground_truths("by_data_source", [*prompts[:1], Prompt(9, "", (1,), "sum", "math", "3")])
    check_ground_truths("math_verify", prompts)
    with pytest.raises(UserError) as error:
        check_ground_truths("by_data_source", prompts)
    *named, rest = error.value.sentences
    assert [sentence[: len("the prompt 'problem 1'")] for sentence in named] == [
        f"the prompt 'problem {i}'" for i in (1, 2, 3)
    ]
    assert all("holds no tests that code_tests can run" in sentence for sentence in named)
    assert "the ground truth '3' " in named[0] and "asserts nothing" in named[2]
    assert rest == "2 more prompts have ground truths without tests."
    config = load_config(None, ["reward.function=code_tests"])
    with pytest.raises(UserError, match="holds no tests"):
        make_reward_pool(config, prompts)


@pytest.mark.parametrize(
    "text",
    ["assert True", "assert f(1).startswith('a')", "assert [x for x in f(1)] == [1]", "assert (1).__class__ == f(1)"],
)
def test_an_assert_that_could_do_more_than_compare_is_refused(text):
    with pytest.raises(ValueError):
        read_cases(json.dumps({"assert_case": [text]}))


def test_the_program_is_given_no_expected_output():
    truths = (
        {"inputs": ["1"], "outputs": ["secret"]},
        {"fn_name": "f", "inputs": ["1"], "outputs": ['"secret"']},
        {"assert_case": ["assert f(1) == 'secret'", "assert abs(f(2) - len('secret')) < 1"]},
    )
    for truth in truths:
        assert "secret" not in str([case.request for case in read_cases(json.dumps(truth))])


def test_programs_are_judged_by_their_output(way):
    sums = {"inputs": ["1 2\n", "3 4\n", ["5 6"]], "outputs": ["3\n", "7", ["11"]]}
    right = "a, b = map(int, sys.stdin.read().split())\nif __name__ == '__main__':\n    print(a + b)"
    assert verdict(right, sums) == 1
    assert verdict("print(3)", sums) == 0
    assert verdict("print(3)", sums, partial_credit=True) == pytest.approx(1 / 3)
    assert verdict(right + "\n1 / 0", sums) == 0
    assert verdict("print(", sums) == 0
    assert verdict("while input() != '3 4': pass", {"inputs": ["3 4", "1"], "outputs": ["", "1"]}) == 0


def test_a_program_that_takes_too_long_fails_in_time(way):
    """Otherwise this would reach the test's own limit."""
    assert verdict("while True: pass", {"inputs": ["", ""], "outputs": ["", ""]}, time_limit_s=0.2) == 0


def test_what_functions_return_is_compared(way):
    pairs = {"fn_name": "pairs", "inputs": ["[1, 2]\n3", "[]\n0"], "outputs": ["[[1, 3], [2, 3]]", "[[]]"]}
    body = "(self, xs: List[int], y):\n        print('noise')\n        return [(x, y) for x in xs]"
    assert verdict(f"class Solution:\n    def pairs{body}", pairs) == 1
    assert verdict("def pairs(xs, y):\n    return xs", pairs) == 0


def test_asserts_are_decided_outside(way):
    asserts = ["import math\nassert f(2) == (4, 2)", "assert math.isclose(sum(f(1)), 2.0)", "assert not f(3) == [9, 3]"]
    assert verdict("def f(x): return (x * x, x)", {"assert_case": asserts}) == 1
    assert verdict("def f(x): return [x * x, x]", {"assert_case": asserts}) == 0
    liar = "class Liar:\n    __eq__ = lambda *_: True\n    __hash__ = None\ndef f(x): return Liar()"
    assert verdict(liar, {"assert_case": asserts[:1]}) == 0


# each prints "harm" on success
MALICIOUS = {
    "fork bomb": "import os\nwhile True: os.fork()",
    "daemons": "import os\nfor _ in range(50):\n  if os.fork() == 0:\n    os.setsid()\n    while 1: 1\nprint('harm')",
    "threads": "from threading import *\nfor _ in range(50): Timer(9, id).start()\nprint('harm', flush=1)\nos._exit(0)",
    "1 GB of output": "for _ in range(1024): sys.stdout.write('x' * (1 << 20))\nprint('harm')",
    "memory": "x = bytearray(1 << 30)\nprint('harm')",
    "unmapped memory": "import os\nfile = os.memfd_create('x')\nprint('harm')",
    "a full disk": "for i in range(10): open(f'/tmp/{i}', 'wb').write(bytes(20 << 20))\nprint('harm')",
    "the home": "import os\nprint('harm' if os.listdir(HOME) or os.listdir('/root') else 'none')",
    "the repository": "open(TEST).read()\nprint('harm')",
    "passwords": "open('/etc/passwd').read()\nprint('harm')",
    "the system": "open('/usr/bin/planted', 'w')\nprint('harm')",
    "the root folder": "open('/planted', 'w')\nprint('harm')",
    "a socket": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)\nprint('harm')",
    "an unbound socket": "import socket\nsocket.socket(socket.AF_VSOCK)\nprint('harm')",
    "the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(5)\nprint('harm')",
    "everybody": "import os, signal\nos.kill(JUDGE, 0)\nprint('harm')",
    "the environment": "import os\nprint('harm' if 'PLANTED' in os.environ else '')",
    "another's environment": "open('/proc/1/environ').read()\nprint('harm')",
    "the parent's memory": "open('/proc/1/mem', 'r+b')\nprint('harm')",
    "a symlink": "import os\nos.symlink(TEST, '/tmp/x')\nopen('/tmp/x').read()\nprint('harm')",
    "a debugger": "import ctypes\nprint('harm' if ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0 else '')",
    "root": "import os\nos.setuid(0)\nprint('harm')",
    "another namespace": "import ctypes\nprint('harm' if ctypes.CDLL(None).unshare(0x10000000) == 0 else '')",
    "higher limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nprint('harm')",
    "forged answers": "import os\nfor file in range(3, 32):\n  try: os.write(file, b'd\\0\\0\\0\\4harm')\n  except: 0",
}


@pytest.mark.parametrize("name", MALICIOUS)
def test_a_malicious_program_does_no_harm(name, way, monkeypatch):
    monkeypatch.setenv("PLANTED", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {"HOME": str(Path.home()), "TEST": __file__, "PORT": server.getsockname()[1], "JUDGE": os.getpid()}
        code = (
            "import os, sys, time\n" + "".join(f"{key} = {value!r}\n" for key, value in names.items()) + MALICIOUS[name]
        )
        assert verdict(code, {"inputs": [""], "outputs": ["harm"]}, time_limit_s=0.5) == 0
    deadline = time.monotonic() + 60
    while left := [child for child in psutil.Process().children(recursive=True) if child.name() == "bwrap"]:
        assert time.monotonic() < deadline, left
    assert verdict("print('well')", {"inputs": [""], "outputs": ["well"]}) == 1


def test_the_harm_would_show_without_a_sandbox():
    """The programs are no bluff: outside the sandbox, one of them succeeds."""
    code = f"TEST = {__file__!r}\n" + MALICIOUS["a symlink"].replace("/tmp/x", f"/tmp/x{os.getpid()}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    os.unlink(f"/tmp/x{os.getpid()}")
    assert done.stdout == "harm\n"


def test_a_user_namespace_works_if_the_interpreter_is_readable(monkeypatch):
    if sandbox.way_fault(sandbox.USER_NAMESPACE) is None:
        return
    if not Path("/usr/bin/python3.11").exists():
        pytest.skip("this system's own interpreter is no Python 3.11")
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3.11")
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    fault = sandbox.way_fault(sandbox.USER_NAMESPACE) or ""
    if "namespace" in fault or "bwrap: No such file" in fault:  # the machine has none to offer
        pytest.skip(fault)
    assert not fault


def test_without_bubblewrap_the_workers_refuse_unless_allowed(monkeypatch, tmp_path):
    async def score(allowed):
        pool = RewardPool("code_tests", {}, 1, 5.0, 2048, allow_unsandboxed=allowed)
        await pool.start()
        try:
            truth = json.dumps({"inputs": ["2"], "outputs": ["4"]})
            return await pool.score("taco", "```python\nprint(int(input()) * 2)\n```", truth)
        finally:
            await pool.close()

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="bwrap is not installed"):
        asyncio.run(score(allowed=False))
    assert asyncio.run(score(allowed=True)).score == 1.0


def test_the_example_tells_a_right_program_from_others(way):
    assert scores() == {"right": 1.0, "wrong": 0.0, "forks for ever": 0.0}
