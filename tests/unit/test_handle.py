"""The trainer's handle: same answers across processes, failures reported, no child left behind."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager

import pytest

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.rollout_errors import Interrupted, NeedsSync, RolloutError
from megatron_dapo.config.loader import to_yaml
from megatron_dapo.data.flat_pickle import send
from megatron_dapo.rollout import handle as handle_module
from megatron_dapo.rollout.handle import RolloutHandle
from tests.fake_rollout import make_config, server_in_thread, write_files

pytestmark = pytest.mark.unit


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_files(tmp_path, num_val=2)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@contextmanager
def handle_on(config):
    handle = RolloutHandle.start(config)
    try:
        yield handle
    finally:
        handle.close()


def numbers(batch):
    return [int(group.prompt.text[1:]) for group in batch.groups]


def wait_until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"


def test_batches_evaluation_state_and_errors_cross_the_process_border(folder):
    with server_in_thread() as server:
        config = make_config(
            folder, [server], "data.gen_batch_size=5", "algorithm.dynamic_sampling.max_num_gen_batches=1",
            f"data.val_files=[{folder}/val.jsonl]", "actor_rollout_ref.rollout.dump_samples=3",
        )  # fmt: skip
        with handle_on(config) as handle:
            assert handle.evaluate(0, 1)["val/num_prompts"] == 2
            batch = handle.next_batch(1, 1)
            assert numbers(batch) == [0, 1, 2, 3]
            texts = [[sample.response_text for sample in group.samples] for group in batch.groups]
            assert all(all(of_group) for of_group in texts[:3]) and not any(texts[3]), "those that are shown"
            # they reach the whole terminal or job step
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                os.kill(handle.pid, number)
            state = handle.state_dict()
            assert numbers(handle.next_batch(2, 1)) == [5, 6, 7, 8]
            handle.load_state_dict(state)
            assert numbers(handle.next_batch(2, 1)) == [5, 6, 7, 8]

            with pytest.raises(NeedsSync, match=server.url):
                handle.next_batch(3, 9)
            with pytest.raises(NeedsSync, match=server.url):
                handle.evaluate(3, 9)
            server.script.default = ("right", "right")
            with pytest.raises(UserError, match="all_correct 5"):
                handle.next_batch(4, 1)
            server.script.default = ("right", "wrong")
            assert handle.next_batch(5, 1).groups  # an error ends the call, not the controller
            pid = handle.pid
        assert not is_running(pid)
    assert "ready: 1 servers" in handle.log_file.read_text()


def test_the_controller_starts_without_the_heavy_libraries():
    heavy = "('torch', 'transformers', 'sympy')"
    modules = "megatron_dapo.rollout, megatron_dapo.rollout.controller"
    script = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_mistakes_of_the_user_are_raised_as_such(folder):
    with handle_on(make_config(folder, ["http://127.0.0.1:9"], "data.train_files=[nowhere.jsonl]")) as handle:
        with pytest.raises(UserError, match="nowhere.jsonl"):
            handle.wait_ready()


def test_a_controller_that_dies_is_reported_with_exit_code_and_log_file(folder):
    with server_in_thread() as server, handle_on(make_config(folder, [server])) as handle:
        handle.wait_ready()
        server.hold.clear()
        killer = threading.Timer(0.5, os.kill, (handle.pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(RolloutError, match="died in next_batch with exit code -9; see .*controller.log"):
            handle.next_batch(1, 1)
        with pytest.raises(RolloutError, match="died"):
            handle.next_batch(1, 1)


def test_the_state_after_the_last_step_outlives_the_controller(folder):
    """So that the step can be saved."""
    overrides = ["data.gen_batch_size=6"]
    with server_in_thread() as server:
        config = make_config(folder, [server], *overrides)
        with handle_on(config) as handle:
            with pytest.raises(RolloutError):
                os.kill(handle.pid, signal.SIGKILL)
                handle.state_dict()  # there was no step
        with handle_on(config) as handle:
            handle.next_batch(1, 1)
            state = handle.state_dict()
            server.hold.clear()
            threading.Timer(0.5, os.kill, (handle.pid, signal.SIGKILL)).start()
            with pytest.raises(RolloutError, match="died in next_batch"):
                handle.next_batch(2, 1)
            assert handle.state_dict() == state
        server.hold.set()
        with handle_on(config) as handle:
            handle.load_state_dict(state)
            assert numbers(handle.next_batch(2, 1)) == [6, 7, 8, 9]


def test_the_prompts_of_a_refused_batch_are_drawn_again_by_the_run_that_goes_on(folder):
    with server_in_thread() as server:
        config = make_config(folder, [server], "data.gen_batch_size=6")
        with handle_on(config) as handle:
            handle.next_batch(1, 1)
            state = handle.state_dict()
            refused = numbers(handle.next_batch(2, 1))
            handle.refuse_batch()
            assert handle.state_dict() == state
        with handle_on(config) as handle:
            handle.load_state_dict(state)
            assert numbers(handle.next_batch(2, 1)) == refused == [6, 7, 8, 9]


def test_a_step_that_is_asked_to_stop_keeps_its_finished_groups_and_goes_on_elsewhere(folder):
    with server_in_thread() as server:
        config = make_config(folder, [server], "actor_rollout_ref.rollout.max_concurrency=2")
        with handle_on(config) as handle:
            assert numbers(handle.next_batch(1, 1, lambda: False)) == [0, 1, 2, 3]
            num_before = sum(server.script.num_answers.values())
            # taken from the end: the last four would take minutes
            server.script.delays = [600.0] * 4 + [0.0] * 4
            with pytest.raises(Interrupted, match="step 2"):
                handle.next_batch(2, 1, lambda: sum(server.script.num_answers.values()) == num_before + 4)
            state = handle.state_dict()
            open_uids, finished = ({each["uid"] for each in state["queue"][part]} for part in ("open", "finished"))
            assert len(open_uids) == 4 and finished < open_uids
        server.script.delays = []
        with handle_on(config) as handle:
            handle.load_state_dict(state)
            server.script.num_answers.clear()
            assert numbers(handle.next_batch(2, 1)) == [4, 5, 6, 7]
            assert len(server.script.num_answers) == 4 - len(finished)


def test_a_request_to_stop_that_comes_too_late_for_one_step_does_not_stop_the_next(folder):
    with server_in_thread() as server, handle_on(make_config(folder, [server])) as handle:
        handle.wait_ready()
        handle._connection.send(("stop", ()))
        assert numbers(handle.next_batch(1, 1)) == [0, 1, 2, 3]


def test_close_ends_a_controller_in_the_middle_of_a_step(folder):
    with server_in_thread() as server:
        handle = RolloutHandle.start(make_config(folder, [server]))
        handle.wait_ready()
        server.hold.clear()
        handle._connection.send(("next_batch", (1, 1)))
        wait_until(lambda: server.num_open == 8)
        handle.close()
        handle.close()
        assert not is_running(handle.pid)
        assert handle._process.exitcode == 0


def test_a_controller_that_is_stuck_tells_what_it_waits_for_and_is_named_at_the_deadline(folder, monkeypatch):
    monkeypatch.setattr(handle_module, "_CLOSE_S", 0.2)  # before it is killed
    with server_in_thread() as server, handle_on(make_config(folder, [server])) as handle:
        handle.wait_ready()
        server.hold.clear()
        handle._connection.send(("next_batch", (1, 1)))
        wait_until(lambda: server.num_open == 8)
        handle.dump_stacks()
        wait_until(lambda: "in _read_commands" in (log := handle.log_file.read_text()) and "in generate" in log)
        os.kill(handle.pid, signal.SIGSTOP)
        handle._call_timeout_s = 0.5
        with pytest.raises(RolloutError, match=rf"pid {handle.pid}\) has not answered state_dict for 0.5 s; see .*log"):
            handle.state_dict()


class StandIn:
    """A controller's process, of which only the pipe matters."""

    pid = 1

    def is_alive(self):
        return True


def test_a_late_answer_is_not_taken_for_that_of_the_next_call(folder, monkeypatch):
    """After a deadline the trainer saves its last step, and asks for the state to save."""
    monkeypatch.setattr(handle_module, "_POLL_S", 0.01)
    near, far = multiprocessing.Pipe()
    handle = RolloutHandle(make_config(folder, ["http://a:1"]), StandIn(), near, folder / "controller.log")
    send(far, ("ok", None))
    handle.wait_ready()
    handle._call_timeout_s = 0.02
    with pytest.raises(RolloutError, match="has not answered next_batch for 0.02 s"):
        handle.next_batch(1, 1)
    send(far, ("ok", "a batch"))
    with pytest.raises(RolloutError, match="has not answered next_batch in time and is asked no more; see .*log"):
        handle.state_dict()
    assert far.recv()[0] == "next_batch" and not far.poll(0)


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (("ok", None), []),
        (("ok", "a reward failed"), [(logging.ERROR, "the rollout had failed before it was halted: a reward failed")]),
        (("error", RolloutError("no answer")), [(logging.WARNING, "the rollout was not halted: no answer")]),
    ],
)
def test_a_stop_logs_what_had_failed_before_and_that_a_controller_does_not_answer(folder, caplog, answer, line):
    near, far = multiprocessing.Pipe()
    handle = RolloutHandle(make_config(folder, ["http://a:1"]), StandIn(), near, folder / "controller.log")
    send(far, ("ok", None))
    send(far, answer)
    with caplog.at_level(logging.INFO):
        handle.halt()
    assert far.recv() == ("halt", ())
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == line


@pytest.mark.parametrize("has_agents", [False, True])
def test_a_controller_may_wait_for_the_ends_of_its_agents(folder, has_agents):
    """An agent has 10 s for its `finally`, and a command 20 s more until it is killed."""
    limits = []

    class Ending(StandIn):
        is_alive = staticmethod(lambda: False)
        join = staticmethod(limits.append)

    agent = "actor_rollout_ref.rollout.agent"
    keys = [f"{agent}.enable=true", f"{agent}.function=a:b"] if has_agents else []
    near, _ = multiprocessing.Pipe()
    RolloutHandle(make_config(folder, ["http://a:1"], *keys), Ending(), near, folder / "controller.log").close()
    assert limits == [40.0 if has_agents else 10.0]


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(3)"])
def test_the_controller_ends_with_its_trainer(folder, ending):
    """Killed, or ended without close(): neither leaves a child, nor hangs."""
    trainer = """
        import os, signal, sys
        from megatron_dapo.config.loader import load_config
        from megatron_dapo.rollout.handle import RolloutHandle
        handle = RolloutHandle.start(load_config(sys.argv[1], []))
        handle.wait_ready()
        print(handle.pid, flush=True)
        {ending}
    """
    with server_in_thread() as server:
        (folder / "config.yaml").write_text(to_yaml(make_config(folder, [server])))
        (folder / "trainer.py").write_text(textwrap.dedent(trainer).format(ending=ending))
        command = [
            sys.executable,
            "-c",
            f"exec(open({str(folder / 'trainer.py')!r}).read())",
            str(folder / "config.yaml"),
        ]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=200, env=environment)
        assert ended.returncode in (-9, 3)
        pid = int(ended.stdout)
        wait_until(lambda: not is_running(pid))
