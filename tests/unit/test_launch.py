"""launch.local with ranks that are small scripts, and servers that need no start."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import launch.local
from launch.command_line import require_local, require_one_node
from launch.local import run_local
from launch.sglang_server import serve
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import write_whole
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.servers.supervisor import ServerFailure
from megatron_dapo.storage.lease import Holder, Lease, LeaseFolder
from megatron_dapo.storage.run_folder import RunFolder
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit

ALREADY_RUNNING = "actor_rollout_ref.rollout.server_urls=[http://127.0.0.1:9]"


@pytest.fixture(autouse=True)
def short_polls(monkeypatch):
    monkeypatch.setattr("launch.local.POLL_INTERVAL_S", 0.05)


def config(tmp_path: Path, *overrides: str) -> Config:
    return load_config(None, [f"trainer.run_dir={tmp_path / 'run'}", ALREADY_RUNNING, *overrides])


def rank_script(code: str) -> list[str]:
    return [sys.executable, "-c", f"import os, sys, time; rank = int(os.environ['RANK']); {code}"]


def is_alive(process: psutil.Process) -> bool:
    """False for a zombie: its end only waits for somebody to take note."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_each_rank_gets_its_place_in_the_world(tmp_path):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    code = f"print(*[os.environ[name] for name in {names}], os.environ['MASTER_PORT'].isdigit(), file=sys.stderr)"
    assert run_local(config(tmp_path, "trainer.n_procs_per_node=2"), rank_script(code)) == 0
    logs = [(tmp_path / "run" / "logs" / f"trainer-rank-{rank}.log").read_text() for rank in range(2)]
    assert logs == ["0 0 2 2 127.0.0.1 1 True\n", "1 1 2 2 127.0.0.1 1 True\n"]


def test_the_console_shows_rank_0_and_the_log_files_the_rest(tmp_path, capfd):
    code = "print(f'hello from {rank}', flush=True)"
    assert run_local(config(tmp_path, "trainer.n_procs_per_node=2"), rank_script(code)) == 0
    shown = capfd.readouterr().out
    assert "hello from 0" in shown and "hello from 1" not in shown
    assert "hello from 1" in (tmp_path / "run" / "logs" / "trainer-rank-1.log").read_text()


def test_the_first_rank_that_fails_ends_the_run_and_is_blamed_with_its_last_words(tmp_path, capfd):
    code = "print('my last words', file=sys.stderr) or sys.exit(7) if rank == 1 else time.sleep(600)"
    assert run_local(config(tmp_path, "trainer.n_procs_per_node=2"), rank_script(code)) == 7
    error = capfd.readouterr().err
    assert "trainer-rank-1 ended with exit code 7" in error and "trainer-rank-1.log" in error
    assert "my last words" in error and "trainer-rank-0 " not in error
    assert "trainer-rank-1 ended with exit code 7" in (tmp_path / "run" / "logs" / "launch.log").read_text()


def test_a_rank_killed_by_a_signal_gives_the_shells_exit_code(tmp_path, capfd):
    code = "os.kill(os.getpid(), 9)"
    assert run_local(config(tmp_path), rank_script(code)) == 137
    assert "trainer-rank-0 was killed by SIGKILL" in capfd.readouterr().err


def test_the_resolved_config_is_kept_beside_the_logs(tmp_path):
    chosen = config(tmp_path, "trainer.seed=5")
    assert run_local(chosen, rank_script("pass")) == 0
    assert load_config(tmp_path / "run" / "logs" / "config.yaml") == chosen


def test_the_starts_of_running_servers_are_left_to_them(tmp_path):
    """Of servers over several nodes, started by hand with the run's folder."""
    order = tmp_path / "run" / "server_starts" / "server-a-0" / "order"
    write_whole(order, "abc")
    assert run_local(config(tmp_path), rank_script("pass")) == 0
    assert order.read_text() == "abc"


WITH_A_CHILD = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("up", flush=True)
time.sleep(600)
"""

SAVING = """
import os, signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
print("up", flush=True)
while not told:
    time.sleep(0.05)
time.sleep(SECONDS * (1 + int(os.environ["RANK"])))
print("saved", flush=True)
sys.exit(85)
"""


SAY_WHY = "from megatron_dapo.common.ends import own_folder; print('asked by', own_folder().stop_reason())"


def run_in(folder: Path, code: str) -> None:
    """run_local with two ranks of `code`, in this process, its output in files."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    overrides = [f"trainer.run_dir={folder}", ALREADY_RUNNING, "trainer.n_procs_per_node=2"]
    sys.exit(run_local(load_config(None, overrides), [sys.executable, "-c", code]))


@contextmanager
def launcher(folder: Path, code: str) -> Iterator[multiprocessing.Process]:
    """A process that runs `run_in`, from the moment both ranks are up. It is forked, since to import
    torch takes longer than these tests."""
    process = multiprocessing.get_context("fork").Process(target=run_in, args=(folder, code))
    process.start()
    logs, deadline = [folder / "out", folder / "logs" / "trainer-rank-1.log"], time.monotonic() + 60
    while not all(log.exists() and "up" in log.read_text() for log in logs):
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.05)
    try:
        yield process
    finally:
        process.kill()


def test_ranks_end_with_a_killed_launcher(tmp_path):
    """Which has no time to end them: no signal handler of its own runs."""
    with launcher(tmp_path, "import time; print('up', flush=True); time.sleep(600)") as run:
        ranks = psutil.Process(run.pid).children()
        assert len(ranks) == 2
        run.kill()
        gone, alive = psutil.wait_procs(ranks, timeout=20)
        for rank in alive:
            rank.kill()
        assert len(gone) == 2, "they went on without their launcher"


HOLDER = """
import sys
from pathlib import Path
from megatron_dapo.checkpointing.run_lock import RunLock
Path(sys.argv[1]).parent.mkdir()
lock = RunLock(Path(sys.argv[1]))
lock.acquire()
print("up", flush=True)
sys.stdin.read()
"""


def test_a_folder_whose_run_goes_on_is_refused_by_pid_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_dapo.checkpointing.run_lock.PATIENCE_HERE_S", 0.0)
    run = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run / ".lock")],
        **{"cwd": REPOSITORY, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True},
    )
    with holder:
        assert holder.stdout.readline() == "up\n"
        with pytest.raises(UserError, match=f"active run .process {holder.pid} on .*`kill {holder.pid}` has it save"):
            run_local(config(tmp_path), rank_script(f"open({str(tmp_path / 'started')!r}, 'w')"))
        assert not list((run / "logs").iterdir()), "the logs are those of the run that goes on"
        holder.kill()
        holder.wait()
    assert run_local(config(tmp_path), rank_script("pass")) == 0, "a killed one is no obstacle"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_leaves_no_process_behind(tmp_path, number):
    with launcher(tmp_path, WITH_A_CHILD) as run:
        process, deadline = psutil.Process(run.pid), time.monotonic() + 20
        while len(family := process.children(recursive=True)) < 4 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.4)  # some looks at the processes, so that the grandchildren are known
        assert len(family) == 4
        os.kill(run.pid, number)
        run.join(20)
        assert run.exitcode == 128 + number
    assert not [process for process in family if is_alive(process)]


def test_a_stop_signal_waits_for_every_rank_to_save_and_passes_the_exit_code_on(tmp_path):
    with launcher(tmp_path, SAVING.replace("SECONDS", "0.3")) as run:
        os.kill(run.pid, signal.SIGUSR1)
        run.join(20)
        assert run.exitcode == 85
    assert "saved" in (tmp_path / "out").read_text()
    assert "saved" in (tmp_path / "logs" / "trainer-rank-1.log").read_text()
    error = (tmp_path / "err").read_text()
    assert "SIGUSR1: the trainer saves" in error and "failed" not in error


def test_ranks_learn_the_users_action(tmp_path):
    code = SAVING.replace("SECONDS", "0.1").replace("sys.exit(85)", f"{SAY_WHY}\nsys.exit(85)")
    with launcher(tmp_path, code) as run:
        os.kill(run.pid, signal.SIGINT)
        run.join(60)
        assert run.exitcode == 85
    assert "asked by Ctrl-C" in (tmp_path / "out").read_text()
    assert "Ctrl-C: the trainer saves" in (tmp_path / "err").read_text()


def test_a_second_stop_signal_does_not_wait(tmp_path):
    with launcher(tmp_path, SAVING.replace("SECONDS", "600")) as run:
        os.kill(run.pid, signal.SIGTERM)
        time.sleep(0.6)  # within half a second it would be the same request
        os.kill(run.pid, signal.SIGTERM)
        run.join(20)
        assert run.exitcode == 143
    assert "saved" not in (tmp_path / "out").read_text()


def test_several_nodes_are_refused_with_the_cure(tmp_path, capsys):
    overrides = ["trainer.nnodes=2", f"trainer.run_dir={tmp_path / 'run'}"]
    assert launch.local.main(["--dry-run", "--config", str(REPOSITORY / "configs" / "demo.yaml"), *overrides]) == 2
    assert "trainer.nnodes" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_server_nodes_are_refused_with_the_cure(tmp_path):
    nodes = load_config(None, ["actor_rollout_ref.rollout.server.nnodes=1", f"trainer.run_dir={tmp_path / 'run'}"])
    with pytest.raises(UserError, match="server.nnodes = 1: .* set it to 0"):
        require_one_node(nodes)


def test_server_nodes_of_a_run_that_starts_no_servers_are_none():
    require_one_node(load_config(None, ["actor_rollout_ref.rollout.server.nnodes=1", "trainer.synthetic_batch=true"]))


def test_log_files_go_to_a_given_log_folder(tmp_path):
    chosen = config(tmp_path, f"trainer.log_dir={tmp_path / 'attempt'}")
    assert run_local(chosen, rank_script("print('here', file=sys.stderr)")) == 0
    assert (tmp_path / "attempt" / "trainer-rank-0.log").read_text() == "here\n"
    assert not (tmp_path / "run" / "logs").exists() and (tmp_path / "run" / "checkpoints").is_dir()


def test_a_dry_run_shows_the_plan_then_the_missing_files_and_starts_nothing(tmp_path):
    recipe = str(REPOSITORY / "configs" / "dapo_7b.yaml")
    server, megatron = "actor_rollout_ref.rollout.server", "actor_rollout_ref.actor.megatron"
    here = ["trainer.n_procs_per_node=4", f"{megatron}.context_parallel_size=2", f"{server}.nnodes=0"]
    here += ["data.train_batch_size=32", "data.gen_batch_size=96"]  # the plan simulates some steps
    command = [sys.executable, "-m", "launch.local", "--dry-run", "--config", recipe, *here]
    command.append(f"trainer.run_dir={tmp_path / 'run'}")
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    output, error = run.stdout, run.stderr
    assert run.returncode == 2 and "Process plan" in output and not (tmp_path / "run").exists()
    assert "models/Qwen2.5-7B, which is not a folder here" in error and "dapo-math-17k.parquet" in error


HANGS_UP_ON_ITS_LAUNCHER = "import os, signal, time; os.kill(os.getppid(), signal.SIGHUP); time.sleep(1)"


def test_a_run_under_nohup_goes_on_when_its_terminal_is_closed(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_local(config(tmp_path), rank_script(HANGS_UP_ON_ITS_LAUNCHER)) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_torchrun_under_nohup_goes_on_when_its_terminal_is_closed(tmp_path):
    (tmp_path / "rank.py").write_text(HANGS_UP_ON_ITS_LAUNCHER)
    arguments = ("-m", "launch.torchrun", "--standalone", "--nproc-per-node=1", str(tmp_path / "rank.py"))
    run = subprocess.run(["nohup", sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, timeout=60)
    assert run.returncode == 0, run.stderr.decode()


def test_a_run_folder_that_cannot_be_written_is_a_mistake_of_the_user():
    nowhere = load_config(None, ["trainer.run_dir=/dev/null/run", ALREADY_RUNNING])
    with pytest.raises(UserError, match="/dev/null/run cannot be made.*trainer.run_dir"):
        run_local(nowhere, rank_script(""))
    with pytest.raises(UserError, match="/dev/null/run/logs cannot be made.*--log-dir"):
        serve(nowhere)


class LostServers:
    """Of which none can be restarted any more."""

    def __init__(self, were_healthy: bool) -> None:
        self.were_healthy = were_healthy

    def overrides(self) -> list[str]:
        return []

    def start(self) -> None:
        pass

    def check(self) -> bool:
        raise ServerFailure("none is left")

    def stop(self) -> None:
        pass


@pytest.mark.parametrize(("were_healthy", "code"), [(True, 7), (False, 1)])
def test_a_trainer_that_has_begun_may_save_when_the_last_server_is_lost(
    tmp_path, capfd, monkeypatch, were_healthy, code
):
    monkeypatch.setattr(
        "megatron_dapo.servers.run_servers.ServerSupervisor", lambda *_, **__: LostServers(were_healthy)
    )
    started = load_config(None, [f"trainer.run_dir={tmp_path / 'run'}"])
    ranks = rank_script(f"time.sleep({0.3 if were_healthy else 600}); open('saved', 'w'); sys.exit(7)")
    monkeypatch.chdir(tmp_path)
    assert run_local(started, ranks) == code
    assert (tmp_path / "saved").exists() == were_healthy
    error = capfd.readouterr().err
    assert error.count("The servers failed: none is left") == 1 and ("saves its last step" in error) == were_healthy


ON = "actor_rollout_ref.hybrid_engine=true"


class SlowServers(LostServers):
    """Healthy at the third look; `look` is called at each."""

    first_gpu: int

    def __init__(self, look, **options) -> None:
        super().__init__(were_healthy=False)
        self.first_gpu = options["first_gpu"]
        self._look = look
        self.num_looks = 0

    def check(self) -> bool:
        self.num_looks += 1
        self._look(self.num_looks)
        return self.num_looks >= 3


def run_with(monkeypatch, tmp_path: Path, look, code: str, *overrides: str) -> tuple[int, SlowServers]:
    made: list[SlowServers] = []

    def make(*_, **options) -> SlowServers:
        made.append(SlowServers(look, **options))
        return made[0]

    monkeypatch.setattr("megatron_dapo.servers.run_servers.ServerSupervisor", make)
    started = load_config(None, [f"trainer.run_dir={tmp_path / 'run'}", *overrides])
    return run_local(started, rank_script(code)), made[0]


RANK_IS_UP = "open(f'{os.environ[\"TMPDIR\"]}/up-{rank}', 'w').close()"


@pytest.fixture
def ups(tmp_path, monkeypatch) -> Path:
    """The folder in which each rank leaves a file up-N."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_ranks_on_the_servers_gpus_are_started_once_all_servers_are_healthy(ups, monkeypatch):
    """SGLang sizes its cache by the memory free at its start."""

    def look(number: int) -> None:
        assert number > 3 or not list(ups.glob("up-*"))

    code, servers = run_with(monkeypatch, ups, look, RANK_IS_UP, ON, "trainer.n_procs_per_node=2")
    assert code == 0 and servers.num_looks >= 3 and servers.first_gpu == 0
    assert len(list(ups.glob("up-*"))) == 2


def test_ranks_with_gpus_of_their_own_do_not_wait_and_have_the_first_gpus(ups, monkeypatch):
    waits = "[time.sleep(0.01) for _ in iter(lambda: os.path.exists('go'), True)]"

    def look(number: int) -> None:
        if number == 2:
            (ups / "go").touch()

    monkeypatch.chdir(ups)
    code, servers = run_with(monkeypatch, ups, look, f"{waits}; {RANK_IS_UP}", "trainer.n_procs_per_node=2")
    assert code == 0 and servers.first_gpu == 2 and len(list(ups.glob("up-*"))) == 2


def test_a_stop_signal_before_the_servers_are_healthy_starts_no_rank(ups, monkeypatch, capfd):
    def look(number: int) -> None:
        if number == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    code, servers = run_with(monkeypatch, ups, look, RANK_IS_UP, ON)
    assert code == 128 + signal.SIGTERM and servers.num_looks == 2 and not list(ups.glob("up-*"))
    assert "before the trainer was started" in capfd.readouterr().err


def test_servers_that_fail_before_they_are_healthy_start_no_rank(ups, monkeypatch, capfd):
    def look(number: int) -> None:
        raise ServerFailure("out of memory")

    code, _ = run_with(monkeypatch, ups, look, RANK_IS_UP, ON)
    assert code == 1 and not list(ups.glob("up-*")) and "out of memory" in capfd.readouterr().err


def test_the_lease_and_the_accounts_of_an_earlier_start_are_forgotten_before_servers_start(ups, monkeypatch):
    run = RunFolder(ups / "run")
    LeaseFolder(run.lease).write(Holder.TRAINER, ["http://a:1"])
    run.ledger.mkdir()
    (run.ledger / "old").touch()

    def look(number: int) -> None:
        assert LeaseFolder(run.lease).read() == Lease() and not list(run.ledger.iterdir())

    assert run_with(monkeypatch, ups, look, "pass", ON)[0] == 0


def test_ranks_on_imagined_gpus_know_theirs_and_the_ledger(ups, monkeypatch):
    names = ("MEGATRON_DAPO_LEDGER", "MEGATRON_DAPO_LEDGER_GPUS")
    code = f"print(*[os.environ.get(name) for name in {names}], file=sys.stderr)"
    for overrides, expected in (((ON,), f"{ups}/run/ledger %d"), ((), "None None")):
        run_with(monkeypatch, ups, lambda number: None, code, "trainer.n_procs_per_node=2", *overrides)
        for rank in range(2):
            last = (ups / "run" / "logs" / f"trainer-rank-{rank}.log").read_text().splitlines()[-1]
            assert last == (expected % rank if overrides else expected)


def test_servers_given_to_a_run_that_puts_its_own_to_sleep_are_refused(tmp_path):
    for key, words in (
        (ALREADY_RUNNING, "server_urls is http://127.0.0.1:9"),
        ("actor_rollout_ref.rollout.server_urls_file=servers.txt", "server_urls_file is servers.txt"),
    ):
        with pytest.raises(UserError) as error:
            require_local(load_config(None, [key, ON]))
        (sentence,) = error.value.sentences
        assert words in sentence and "hybrid_engine true" in sentence and "remove server_urls" in sentence
        require_local(load_config(None, [key]))
    require_local(load_config(None, [ON]))
