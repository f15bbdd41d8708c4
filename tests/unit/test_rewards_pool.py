"""The reward pool: one bad response costs one sample, is counted, and the next one is scored."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from megatron_dapo.common.errors import UserError
from megatron_dapo.rewards.reward_pool import RewardPool
from megatron_dapo.rewards.reward_result import RewardResult

pytestmark = pytest.mark.unit

HOSTILE = """
import json, os, re, subprocess, sys, time

def score(data_source, response, ground_truth, extra_info, *, bonus=0.0):
    return ACTIONS.get(response, lambda info: response == ground_truth)(extra_info) + bonus

def spin(info):
    while True:
        pass

def spin_in_c(info):
    re.match(r"(a+)+$", "a" * 60 + "b")

def hog(info):
    return len(bytearray(8 << 30))

def raise_badly(info):
    raise ValueError("no such answer")

def print_and_read(info):
    print('{"score": 5.0, "correct": true}', flush=True)
    return float(sys.stdin.read() == "")

def child_that_stays(info):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(info["pid_file"], "w") as file:
        file.write(str(child.pid))
    time.sleep(600)

def leave_a_session(info):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with open(info["pid_file"], "w") as file:
        file.write(str(child.pid))
    return 1.0

def leave_a_session_and_hang(info):
    leave_a_session(info)
    time.sleep(600)

def leave_a_session_and_exit(info):
    leave_a_session(info)
    os._exit(3)

def leave_a_daemon(info):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(info["pid_file"] + ".part", "w") as file:
                file.write(str(os.getpid()))
            os.rename(info["pid_file"] + ".part", info["pid_file"])
            time.sleep(600)
        os._exit(0)
    os.wait()
    while not os.path.exists(info["pid_file"]):
        time.sleep(0.01)
    return 1.0

def replace_json(info):
    json.dumps = json.loads = lambda *_, **__: "{}"
    return 1.0

def replace_worker(info):
    sys.modules["__main__"]._answer.__code__ = (lambda function, kwargs, seed, message: {}).__code__
    return 1.0

def clear_modules(info):
    sys.modules.clear()
    return 1.0

ACTIONS = {
    "session": leave_a_session, "session, hang": leave_a_session_and_hang, "session, exit": leave_a_session_and_exit,
    "daemon": leave_a_daemon, "replace json": replace_json, "replace worker": replace_worker, "clear": clear_modules,
    "spin": spin, "spin in C": spin_in_c, "sleep": lambda info: time.sleep(600), "hog": hog,
    "exit": lambda info: os._exit(3), "sys.exit": lambda info: sys.exit(0), "raise": raise_badly,
    "print": print_and_read, "nan": lambda info: float("nan"), "child": child_that_stays,
    "environment": lambda info: open(info["file"], "w").write("\\n".join(os.environ)),
    "pid": lambda info: os.getpid(), "some memory": lambda info: float(len(bytearray(64 << 20)) > 0),
}

def score_with_dict(data_source, response, ground_truth, extra_info):
    return {"score": 0.25, "correct": extra_info["level"] > 3}

def plus_minus(data_source, response, ground_truth, extra_info):
    raise RuntimeError(data_source)

plus_minus.wrong_score = -1.0
not_a_function = 3
"""


@pytest.fixture(scope="module", autouse=True)
def hostile_module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("custom")
    (folder / "hostile_rewards.py").write_text(HOSTILE)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


def run_pool(
    use, function="hostile_rewards:score", kwargs=None, num_workers=1, timeout_s=1.0, memory_limit_mb=1024, pass_env=()
):
    """Runs `await use(pool)` on a started pool, and closes it."""

    async def main():
        pool = RewardPool(function, kwargs or {}, num_workers, timeout_s, memory_limit_mb, pass_env)
        await pool.start()
        try:
            return await use(pool)
        finally:
            await pool.close()

    return asyncio.run(main())


def request(response, ground_truth="yes", **extra_info):
    return "test", response, ground_truth, extra_info


BAD_RESPONSES = {
    "spin": "timeout",
    "spin in C": "timeout",
    "sleep": "timeout",
    "exit": "crash",
    "hog": "exception: MemoryError",
    "raise": "exception: ValueError: no such answer",
    "sys.exit": "exception: SystemExit: 0",
    "nan": "exception: ValueError: the reward function returned nan, not a finite score or a dict with one",
}


def test_each_bad_response_costs_one_sample_and_is_counted():
    hanging = [response for response, error in BAD_RESPONSES.items() if error == "timeout"]

    async def use(pool):
        async def and_the_next(response):
            return await pool.score(*request(response)), await pool.score(*request("yes"))

        results = dict(zip(hanging, await asyncio.gather(*map(and_the_next, hanging)), strict=True))
        for response in BAD_RESPONSES.keys() - results.keys():
            results[response] = await and_the_next(response)
        return results, await pool.score(*request("no")), pool.stats()

    results, wrong, stats = run_pool(use, num_workers=len(hanging))
    for response, error in BAD_RESPONSES.items():
        assert results[response] == (RewardResult(0.0, False, error), RewardResult(1.0, True)), response
    assert wrong == RewardResult(0.0, False)
    assert stats == {"num_scored": 17, "num_timeouts": 3, "num_crashes": 1, "num_exceptions": 4}


def test_the_caller_waits_no_longer_than_the_limit_and_the_event_loop_not_at_all():
    async def use(pool):
        beats = 0
        hang = asyncio.create_task(pool.score(*request("spin in C")))
        while not hang.done():
            await asyncio.sleep(0.02)
            beats += 1
        return hang.result(), beats

    result, beats = run_pool(use, timeout_s=0.6)
    assert result == RewardResult(0.0, False, "timeout") and beats > 2


def test_one_hanging_response_does_not_stop_the_other_workers():
    async def use(pool):
        hang = asyncio.create_task(pool.score(*request("sleep")))
        await asyncio.sleep(0)
        results = await asyncio.gather(*(pool.score(*request("yes")) for _ in range(50)))
        assert not hang.done()
        return [*results, await hang]

    results = run_pool(use, num_workers=2, timeout_s=1.5)
    assert [result.correct for result in results] == [True] * 50 + [False]


def test_a_cancelled_request_does_not_answer_the_next_one():
    async def use(pool):
        task = asyncio.create_task(pool.score(*request("sleep")))
        await asyncio.sleep(0.1)
        task.cancel()
        return await pool.score(*request("yes"))

    assert run_pool(use, timeout_s=30) == RewardResult(1.0, True)


def test_a_worker_is_replaced_after_its_share_of_requests(monkeypatch):
    monkeypatch.setattr("megatron_dapo.rewards.reward_pool._REQUESTS_PER_WORKER", 3)

    async def use(pool):
        return [(await pool.score(*request("pid"))).score for _ in range(4)]

    pids = run_pool(use)
    assert pids[0] == pids[1] == pids[2] != pids[3]


def test_printing_and_reading_in_a_reward_function_is_harmless():
    assert run_pool(lambda pool: pool.score(*request("print"))) == RewardResult(1.0, True)


SECRETS = {
    **dict.fromkeys(("MY_SECRET_THING", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY"), "s3"),
    **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AZURE_CLIENT_ID", "SSH_AUTH_SOCK"), "s3"),
    **dict.fromkeys(("PGPASSWORD", "MYSQL_PWD", "DB_PASSWD", "GITHUB_PAT", "NPM_AUTH", "SLURM_JWT"), "s3"),
    "GOOGLE_APPLICATION_CREDENTIALS": "key.json",
    "DATABASE_URL": "postgres://me:s3@host/db",
    "https_proxy": "http://me:s3@proxy:3128",
}
HARMLESS = {"TOKENIZERS_PARALLELISM": "false", "HF_HOME": "/cache", "MY_URL": "http://host:80/a@b", "MY_PATH": "/a:b@c"}


def test_workers_see_only_secrets_passed_on_by_name(tmp_path, monkeypatch):
    for name, value in (SECRETS | HARMLESS).items():
        monkeypatch.setenv(name, value)

    def seen(**settings):
        names = tmp_path / "names"
        assert run_pool(lambda pool: pool.score(*request("environment", file=str(names))), **settings).correct
        return {*names.read_text().split()} & {*SECRETS, *HARMLESS}

    assert seen() == set(HARMLESS)
    assert seen(pass_env=["OPENAI_API_KEY", "AWS_PROFILE"]) == {*HARMLESS, "OPENAI_API_KEY", "AWS_PROFILE"}


def test_an_unset_variable_to_pass_on_is_refused_at_the_start(monkeypatch):
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    with pytest.raises(UserError, match=r"reward\.pass_env names JUDGE_API_KEY"):
        run_pool(lambda pool: pool.score(*request("")), pass_env=["JUDGE_API_KEY"])


def test_workers_start_without_the_heavy_libraries():
    heavy = "('torch', 'transformers', 'sympy', 'pydantic')"
    script = (
        f"import sys, megatron_dapo.rewards.reward_worker; print([name for name in {heavy} if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_keyword_arguments_and_dict_verdicts_reach_the_result():
    assert run_pool(lambda pool: pool.score(*request("no")), kwargs={"bonus": 0.5}) == RewardResult(0.5, True)
    with_dict = run_pool(lambda pool: pool.score(*request("", level=2)), "hostile_rewards:score_with_dict")
    assert with_dict == RewardResult(0.25, False)


def test_a_failure_scores_like_a_wrong_answer_of_that_function():
    custom = run_pool(lambda pool: pool.score(*request("")), "hostile_rewards:plus_minus")
    assert (custom.score, custom.error) == (-1.0, "exception: RuntimeError: test")


def test_a_killed_worker_is_a_crash_of_its_sample_only():
    async def use(pool):
        pid = int((await pool.score(*request("pid"))).score)
        task = asyncio.create_task(pool.score(*request("sleep")))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        return await task, await pool.score(*request("yes"))

    assert run_pool(use, timeout_s=30) == (RewardResult(0.0, False, "crash"), RewardResult(1.0, True))


def test_what_a_reward_function_started_dies_with_its_worker(tmp_path):
    pid_file = tmp_path / "pid"
    result = run_pool(lambda pool: pool.score(*request("child", pid_file=str(pid_file))), timeout_s=1.0)
    assert result.error == "timeout"
    assert ended_within(int(pid_file.read_text()), seconds=5)


@pytest.mark.parametrize("action", ["session", "session, hang", "session, exit", "daemon"])
def test_what_left_the_workers_session_ends_with_it_too(action, tmp_path):
    pid_file = tmp_path / "pid"
    timeout_s = 3.0 if "hang" in action else 20.0
    run_pool(lambda pool: pool.score(*request(action, pid_file=str(pid_file))), timeout_s=timeout_s)
    assert ended_within(int(pid_file.read_text()), seconds=10)


def test_a_process_of_its_own_session_ends_with_the_pools_process(tmp_path):
    pid_file = tmp_path / "pid"
    script = textwrap.dedent(
        f"""
        import asyncio, os
        from megatron_dapo.rewards.reward_pool import RewardPool

        async def main():
            pool = RewardPool("hostile_rewards:score", {{}}, 1, 60.0, 1024)
            await pool.start()
            await pool.score("", "daemon", "", {{"pid_file": {str(pid_file)!r}}})
            os._exit(0)

        asyncio.run(main())
        """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    subprocess.run([sys.executable, "-c", script], env=environment, timeout=60, check=True)
    assert ended_within(int(pid_file.read_text()), seconds=10)


@pytest.mark.parametrize(
    ("action", "next_error"),
    [("replace json", None), ("replace worker", "crash: the worker's answer"), ("clear", None)],
)
def test_a_function_that_replaces_parts_of_the_worker_costs_samples_and_no_more(action, next_error):
    async def use(pool):
        return [await pool.score(*request(text)) for text in (action, "yes", "yes")]

    first, second, third = run_pool(use, timeout_s=20.0)
    assert first == RewardResult(1.0, True)
    assert second == RewardResult(1.0, True) if next_error is None else second.error.startswith(next_error)
    assert third == RewardResult(1.0, True)


def test_what_a_function_imports_in_its_calls_does_not_take_the_time_of_the_first_response(tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(2)\nanswer = 'yes'\n")
    (tmp_path / "never_used.py").write_text("import os\nos._exit(9)\n")
    (tmp_path / "lazy_rewards.py").write_text(
        textwrap.dedent(
            """
            def score(data_source, response, ground_truth, extra_info):
                return right(response)

            def right(response):
                try:
                    import no_such_module
                    from . import outside_of_a_package
                except ImportError:
                    from slow_to_import import answer
                return float(response == answer)

            def unused():
                import never_used
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    result = run_pool(lambda pool: pool.score(*request("yes")), "lazy_rewards:score", timeout_s=1.5)
    assert result == RewardResult(1.0, True)


def test_the_verifiers_of_the_prompts_sources_are_loaded_before_the_first_response():
    async def main(data_sources):
        pool = RewardPool("by_data_source", {}, 1, 0.5, 2048, data_sources=data_sources)
        await pool.start()
        try:
            return await pool.score("openai/gsm8k", "so \\boxed{5}", "5")
        finally:
            await pool.close()

    assert asyncio.run(main(["openai/gsm8k", "math_dapo"])) == RewardResult(1.0, True)


@pytest.mark.parametrize("function", ["by_data_source", "math_verify"])
def test_a_parser_beside_another_antlr_runtime_is_refused_at_the_start(tmp_path, monkeypatch, function):
    (tmp_path / "antlr4_python3_runtime-4.12.0.dist-info").mkdir()
    (tmp_path / "antlr4_python3_runtime-4.12.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: antlr4-python3-runtime\nVersion: 4.12.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = RewardPool(function, {}, 1, 10.0, 2048, data_sources=["numina_olympiads"])
    with pytest.raises(UserError, match=r"does not work here .*antlr4-python3-runtime 4\.12\.0 .*install"):
        asyncio.run(pool.start())


def test_what_a_function_left_behind_and_ended_leaves_no_zombie(tmp_path):
    async def use(pool):
        await pool.score(*request("daemon", pid_file=str(tmp_path / "pid")))
        pid = int((tmp_path / "pid").read_text())
        os.kill(pid, signal.SIGKILL)
        for _ in range(1000):
            if not os.path.exists(f"/proc/{pid}"):
                return await pool.score(*request("yes"))
            await asyncio.sleep(0.02)

    assert run_pool(use, timeout_s=20.0) == RewardResult(1.0, True)


def test_a_worker_starts_under_any_limit_of_the_stack():
    """`ulimit -s` is each thread's stack, and may exceed all the memory allowed to a worker."""
    usual = resource.getrlimit(resource.RLIMIT_STACK)
    try:
        resource.setrlimit(resource.RLIMIT_STACK, (4 << 30, usual[1]))
        result = run_pool(lambda pool: pool.score(*request("some memory")))
    except ValueError:
        pytest.skip("no such limit may be set here")
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, usual)
    assert result.score == 1.0, result


@pytest.mark.parametrize("action", ["idle", "sleep"])
def test_workers_end_with_their_parent(action, tmp_path):
    script = textwrap.dedent(
        f"""
        import asyncio, os, sys
        from megatron_dapo.rewards.reward_pool import RewardPool

        async def main():
            pool = RewardPool("hostile_rewards:score", {{}}, 1, 600.0, 1024)
            await pool.start()
            print(int((await pool.score("", "pid", "")).score), flush=True)
            if {action!r} == "sleep":
                task = asyncio.create_task(pool.score("", "sleep", ""))
                await asyncio.sleep(0.2)
            os._exit(0)

        asyncio.run(main())
        """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True, timeout=30
    )
    assert ended_within(int(done.stdout), seconds=5)


def ended_within(pid, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_a_reward_module_that_exits_at_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "exiting_rewards.py").write_text("import sys\nsys.exit('not like this')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError) as caught:
        run_pool(lambda pool: pool.score(*request("")), "exiting_rewards:score")
    assert all(word in str(caught.value) for word in ("exiting_rewards", "sys.exit('not like this')", "__main__"))


@pytest.mark.parametrize(
    ("function", "kwargs", "words"),
    [
        ("math_dpao", {}, ["reward.function", "'math_dpao'", "'math_dapo'"]),
        ("no_such_package.rewards:f", {}, ["reward.function", "no_such_package"]),
        ("hostile_rewards:missing", {}, ["reward.function", "missing"]),
        ("hostile_rewards:not_a_function", {}, ["no function", "int"]),
        ("math_dapo", {"boxd": True}, ["reward.kwargs", "boxd"]),
        ("by_data_source", {"marker": ":"}, ["reward.kwargs", "marker"]),
    ],
)
def test_a_reward_that_cannot_work_is_refused_at_the_start(function, kwargs, words):
    with pytest.raises(UserError) as caught:
        run_pool(lambda pool: pool.score(*request("")), function, kwargs)
    assert all(word in str(caught.value) for word in words)


def test_closing_answers_the_requests_in_flight_and_refuses_waiting_ones():
    async def main():
        pool = RewardPool("hostile_rewards:score", {}, 1, 600.0, 1024)
        await pool.start()
        waiting = [asyncio.create_task(pool.score(*request("sleep"))) for _ in range(3)]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(5):
            await pool.close()
            await pool.close()
            return await asyncio.gather(*waiting, return_exceptions=True)

    first, *others = asyncio.run(main())
    assert first.error == "crash"
    assert [type(other) for other in others] == [RuntimeError, RuntimeError]


def test_scoring_outside_start_and_close_is_refused():
    pool = RewardPool("math_dapo", {}, 1, 1.0, 1024)
    with pytest.raises(RuntimeError, match="not started, or closed"):
        asyncio.run(pool.score(*request("")))
