"""A role's task on a node: its environment, its exit code, and who waits for it."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launch.slurm import node, servers
from launch.slurm.node import ends, interface_of, node_environment
from launch.slurm.plan import SERVERS, TRAINER, JobPlan
from launch.slurm.servers import wait_for_servers
from megatron_dapo.common.ends import EndKind, end_of_code
from megatron_dapo.common.errors import UserError
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit


@pytest.fixture
def plan(tmp_path) -> JobPlan:
    return JobPlan(7, 0, ("t1",), ("s1",), 1, 2, str(tmp_path), str(tmp_path), total_steps=4, server_timeout_s=30.0)


def test_sockets_use_the_interface_on_which_the_other_nodes_are():
    interfaces = {"lo": ["127.0.0.1"], "ib0": ["10.1.0.3", "fe80::1%ib0"], "eth0": ["192.168.0.3"]}
    assert interface_of("10.1.0.3", interfaces) == "ib0" and interface_of("fe80::1", interfaces) == "ib0"
    assert interface_of("10.9.9.9", interfaces) is None
    made = node_environment({}, "ib0", Path("/scratch"))
    assert made["NCCL_SOCKET_IFNAME"] == "=ib0" and made["GLOO_SOCKET_IFNAME"] == "ib0"


@pytest.mark.parametrize("cache", ["TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "SGLANG_JIT_CACHE_DIR"])
def test_compiled_code_lies_on_the_nodes_own_disk(cache):
    """Not in a home shared by all nodes: there it is built under a lock of the file system, by one
    node at a time."""
    assert node_environment({}, None, Path("/scratch"))[cache].startswith("/scratch/")


def test_what_the_user_has_set_stays():
    user_set = {"NCCL_SOCKET_IFNAME": "bond0", "TRITON_CACHE_DIR": "/mine", "WANDB_API_KEY": "secret"}
    made = node_environment(user_set, "eth0", Path("/scratch"))
    assert user_set.items() <= made.items()
    assert "NCCL_SOCKET_IFNAME" not in node_environment({}, None, Path("/scratch"))
    assert node_environment({"OMP_PROC_BIND": "true"}, None, Path("/scratch"))["OMP_PROC_BIND"] == "false", (
        "all ranks of the node would be bound to its first core"
    )


def test_compiled_code_is_read_from_no_folder_that_others_can_write(tmp_path):
    folder = node.cache_folder({"TMPDIR": str(tmp_path)})
    assert folder.stat().st_mode & 0o777 == 0o700 and node.cache_folder({"TMPDIR": str(tmp_path)}) == folder
    folder.chmod(0o777)
    with pytest.raises(UserError, match="set TMPDIR"):
        node.cache_folder({"TMPDIR": str(tmp_path)})
    folder.rmdir()
    (tmp_path / "theirs").mkdir()
    folder.symlink_to(tmp_path / "theirs")
    with pytest.raises(UserError, match="set TMPDIR"):
        node.cache_folder({"TMPDIR": str(tmp_path)})


@pytest.mark.parametrize(
    ("role", "code", "exit_code", "recorded"),
    [(TRAINER, "85", 0, 85), (TRAINER, "7", 7, 7), (SERVERS, "85", 85, 85), (TRAINER, "kill", 137, 137)],
)
def test_only_a_trainer_that_saved_ends_well_for_slurm_and_all_are_recorded(
    plan, monkeypatch, role, code, exit_code, recorded
):
    end = "os.kill(os.getpid(), 9)" if code == "kill" else f"sys.exit({code})"
    monkeypatch.setattr(JobPlan, "command", lambda *_: [sys.executable, "-Sc", f"import os, sys; {end}"])
    name = "t1" if role == TRAINER else "s1"
    monkeypatch.setenv("SLURMD_NODENAME", name)
    monkeypatch.setattr(node.Orders, "SIGNALS", ())  # of this process
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    assert node.run(plan, role) == exit_code
    [(where, end)] = ends(plan, role).items()
    assert (where, end.exit_code) == (name, recorded)


STARTED_WITH_LOW_LIMITS = """
import resource, sys
from launch.slurm.node import start
from launch.slurm.plan import TRAINER, JobPlan
kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_NPROC)
hard = (4096, 1 << 16, resource.getrlimit(resource.RLIMIT_NPROC)[1])
for kind, limit in zip(kinds, hard):
    resource.setrlimit(kind, (64, limit))
program = f"import resource; [print(resource.getrlimit(kind)) for kind in {kinds}]"
JobPlan.command = lambda *_: [sys.executable, "-Sc", program]
plan = JobPlan(7, 0, ("t1",), (), 1, 2, sys.argv[1], sys.argv[1], total_steps=4, server_timeout_s=30.0)
sys.exit(start(plan, TRAINER, "t1").wait())
"""


def test_a_roles_program_may_use_all_that_the_user_may(tmp_path):
    """A login shell's soft limits are too low for thousands of connections, and for RDMA."""
    command = [sys.executable, "-c", STARTED_WITH_LOW_LIMITS, str(tmp_path)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
    line, *limits = done.stdout.splitlines()
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    assert limits == [str((hard, hard)) for hard in (4096, 1 << 16, processes)]
    in_words = "unlimited" if processes == resource.RLIM_INFINITY else processes
    assert line.endswith(f"open files 4096, locked memory 65536, processes {in_words}")


PROGRAM = """
import signal, sys, time
def end(*_):
    print("told to end", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, end)
print("runs", flush=True)
time.sleep(60)
"""
TASK = """
import os, subprocess, sys
from pathlib import Path
from launch.slurm import node
from launch.slurm.node import Orders
node._POLL_INTERVAL_S, node._CANCEL_GRACE_S = 0.05, float(sys.argv[4])
orders = Orders(Path(sys.argv[1]), sys.argv[2], "here")
program = subprocess.Popen([sys.executable, "-Sc", sys.argv[3]], start_new_session=True)
sys.exit(orders.obey(program))
"""


@pytest.fixture
def task(tmp_path):
    """Starts a role's task with a running program; it and its program are a process group, and
    Slurm signals all of it."""
    started = []

    def start(role: str, program: str = PROGRAM, grace_s: float = 60.0) -> subprocess.Popen:
        command = [sys.executable, "-c", TASK, tmp_path, role, program, str(grace_s)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert process.stdout.readline() == "runs\n"
        started.append(process)
        return process

    yield start
    for process in started:
        process.stdout.close()
        process.kill()
        process.wait()


def test_a_failed_trainer_waits_for_the_end_records_of_its_peers(plan, monkeypatch):
    """Otherwise Slurm would end them at once, and a process killed for want
    of memory would not be named."""
    plan = replace(plan, trainer_nodes=("t1", "t2"))
    monkeypatch.setattr(node.Orders, "SIGNALS", ())
    monkeypatch.setattr(node, "_POLL_INTERVAL_S", 0.01)
    orders = node.Orders(Path(plan.logs), TRAINER, "t1")
    plan.ends.write("trainer-t1", end_of_code(1))
    waiting = threading.Thread(target=node.wait_for_peers, args=(plan, TRAINER, orders))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    plan.ends.write("trainer-t2", end_of_code(-9))
    waiting.join(10)
    assert not waiting.is_alive()
    plan.ends.forget("trainer-t2")
    monkeypatch.setattr(node, "_LAST_WORDS_S", 0.0)
    node.wait_for_peers(plan, TRAINER, orders)  # not for ever


@pytest.mark.parametrize("role", [TRAINER, SERVERS])
def test_the_script_s_sigint_ends_the_program_by_sigterm(task, role):
    process = task(role)
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout.read() == "told to end\n" and process.wait() == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_at_a_preemption_the_programs_go_on_and_the_trainer_s_task_asks_the_script(task, tmp_path, number):
    trainer, servers = task(TRAINER), task(SERVERS)
    for process in (servers, trainer):
        os.killpg(process.pid, number)
    asked, name = tmp_path / "asked-here", number.name.removeprefix("SIG")
    deadline = time.monotonic() + 10
    while not asked.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert asked.read_text() == name
    asked.unlink()
    os.killpg(servers.pid, number)
    time.sleep(0.2)  # four looks of the task
    assert not asked.exists(), "the servers' task asks for nothing"
    assert trainer.poll() is None and servers.poll() is None
    (tmp_path / "cancelled").touch()
    for process in (servers, trainer):
        assert process.stdout.read() == "told to end\n" and process.wait() == 7


DEAF = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-Sc", "import time; time.sleep(60)"], start_new_session=True)
print("runs", flush=True)
time.sleep(60)
"""


def test_a_cancelled_jobs_stubborn_program_is_killed_with_its_children(task, tmp_path):
    process = task(TRAINER, DEAF, grace_s=0.2)
    (tmp_path / "cancelled").touch()
    os.killpg(process.pid, signal.SIGTERM)
    assert process.stdout.read() == "", "the end of the pipe that all of them had"
    assert process.wait() == (-signal.SIGKILL) % 256


def test_an_unfit_node_reports_the_reason_and_its_end(plan, monkeypatch, capsys):
    def unfit(_: object) -> Path:
        raise UserError("The folder is not yours; set TMPDIR.")

    monkeypatch.setattr(node, "cache_folder", unfit)
    monkeypatch.setattr(node.Orders, "SIGNALS", ())
    monkeypatch.setenv("SLURMD_NODENAME", "s1")
    assert node.run(plan, SERVERS) == 2
    assert ends(plan, SERVERS)["s1"].kind is EndKind.USER_ERROR
    assert "The folder is not yours; set TMPDIR." in capsys.readouterr().out


def test_the_wait_for_servers_ends_when_all_are_healthy(plan, capsys, monkeypatch):
    asked: list[str] = []
    first, second = plan.server_urls

    def probe(url: str) -> bool:
        asked.append(url)
        return asked.count(url) > (1 if url == first else 0)

    monkeypatch.setattr(servers, "POLL_INTERVAL_S", 0.01)
    assert wait_for_servers(plan, probe) is None
    assert capsys.readouterr().out.count("is healthy") == 2 and asked == [first, second, first]


def test_the_wait_for_servers_ends_when_their_starter_does_or_at_the_deadline(plan):
    late = wait_for_servers(replace(plan, server_timeout_s=0.0), lambda url: url == plan.server_urls[1])
    assert late == f"not healthy within 0 s: {plan.server_urls[0]}"
    plan.ends.write("servers-s1", end_of_code(1))
    assert "the servers of s1 ended" in wait_for_servers(plan, lambda url: False)


def test_a_rank_writes_to_its_own_file_and_rank_0_shows_its_steps(tmp_path):
    (tmp_path / "said.py").write_text("import sys; print('out', *sys.argv[1:]); print('err', file=sys.stderr)")
    shown = []
    for rank in ("0", "1"):
        command = [sys.executable, "-m", "launch.rank", "--log-dir", str(tmp_path), "said", "--flag"]
        environment = os.environ | {"RANK": rank, "PYTHONPATH": str(tmp_path)}
        shown.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert shown == ["out --flag\n", ""]
    assert (tmp_path / "trainer-rank-0.log").read_text() == "err\n"
    assert sorted((tmp_path / "trainer-rank-1.log").read_text().split("\n")) == ["", "err", "out --flag"]
