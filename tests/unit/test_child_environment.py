"""A user's environment keeps no process of ours from starting,
nor several from working together."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch

from megatron_dapo.common.child_environment import cache_folder, places_to_write, set_rank_defaults
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.platform.sglang_cpu import cpu_server
from megatron_dapo.rewards.reward_pool import RewardPool
from megatron_dapo.servers.server_command import sglang_command
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit

NO_HOME = "/dev/null/home"
SOCKET_NAME = "tmp01234567"  # as tempfile makes them


def python(code: str, environment: dict[str, str], *arguments: str) -> str:
    """Its output."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.check_output(command, env=environment, cwd=REPOSITORY, text=True, timeout=60)


def server_environment(host: str = "127.0.0.1") -> dict[str, str]:
    config = load_config(None, ["actor_rollout_ref.model.path=some/model"])
    return sglang_command(config, host, 31000, []).environment


def test_a_cpu_server_can_fork_though_the_user_gave_libraries_threads():
    """OpenBLAS starts them at the import of numpy, and SGLang imports it
    before it makes its processes."""
    environment = cpu_server.server_environment({**os.environ, "OPENBLAS_NUM_THREADS": "4"})
    assert python("import numpy, os; print(len(os.listdir('/proc/self/task')))", environment).split() == ["1"]


def test_a_reward_process_has_one_thread_and_reads_utf_8_despite_the_users_settings(tmp_path, monkeypatch):
    """A thread of OpenBLAS takes tens of megabytes of the address space allowed to a worker."""
    code = """
        import numpy, os, sys
        def score(data_source, response, ground_truth, extra_info):
            return {"score": float(len(os.listdir("/proc/self/task"))), "correct": sys.flags.utf8_mode == 1}
    """
    (tmp_path / "threads_of.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, value in {"OPENBLAS_NUM_THREADS": "4", "PYTHONUTF8": "0", "LC_ALL": "C"}.items():
        monkeypatch.setenv(name, value)

    async def score():
        pool = RewardPool("threads_of:score", {}, num_workers=1, timeout_s=30.0, memory_limit_mb=2048)
        await pool.start()
        try:
            return await pool.score("mine", "5", "5", {})
        finally:
            await pool.close()

    result = asyncio.run(score())
    assert result.correct and result.score == 1


def test_a_server_reads_utf_8_in_any_locale(monkeypatch):
    monkeypatch.setenv("PYTHONUTF8", "0")
    monkeypatch.setenv("LC_ALL", "C")
    shown = python("import locale; print(locale.getencoding(), open('/dev/null').encoding)", server_environment())
    assert shown.lower().split()[-1] == "utf-8"


@pytest.mark.parametrize("home", [NO_HOME, None])
def test_a_server_of_a_user_without_a_home_keeps_its_caches_elsewhere(monkeypatch, tmp_path, home):
    """As in a container run with the number of an unknown user."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("SGLANG_JIT_CACHE_DIR", "/mine")
    if home is None:
        for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    else:
        monkeypatch.setenv("HOME", home)
    made = server_environment()
    folder = Path(made["SGLANG_CACHE_DIR"])
    folder.mkdir()
    assert folder.is_relative_to(tmp_path) and folder.parent.stat().st_mode & 0o777 == 0o700
    assert Path(made["TRITON_CACHE_DIR"]).is_relative_to(tmp_path)
    assert made["SGLANG_JIT_CACHE_DIR"] == "/mine"
    assert not (REPOSITORY / "~").exists()


def test_a_home_that_can_be_written_is_used(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert places_to_write({}) == {} and not any(tmp_path.iterdir())


def test_without_a_writable_folder_the_message_has_the_cure(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be made.*set TMPDIR"):
        cache_folder({"TMPDIR": str(tmp_path / "file")})


def test_a_server_has_a_folder_for_temporary_files_that_sockets_can_lie_in(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        for num_more, is_left in ((0, True), (1, False)):
            longest = Path(short, "x" * (107 - len(f"{short}//{SOCKET_NAME}") + num_more))
            longest.mkdir()
            monkeypatch.setattr(tempfile, "tempdir", str(longest))
            monkeypatch.setenv("TMPDIR", str(longest))
            made = server_environment()["TMPDIR"]
            assert (made == str(longest)) == is_left
            with socket.socket(socket.AF_UNIX) as server, tempfile.TemporaryDirectory(dir=short):
                server.bind(str(Path(longest if is_left else short, SOCKET_NAME)))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core is all there is")
def test_processes_share_out_the_cores_though_the_user_binds_threads(tmp_path):
    """If one of the three settings were left, each would bind itself to the first core at the
    import of torch. So would all its children. In torch the OpenMP library does so, as soon as it
    is loaded."""
    settings = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores", "GOMP_CPU_AFFINITY": "0-7"}
    (openmp,) = Path(torch.__file__).parent.glob("lib/libgomp*")
    affinity = f"import ctypes, os; ctypes.CDLL({str(openmp)!r}); print(len(os.sched_getaffinity(0)), flush=True)"
    (tmp_path / "rank.py").write_text(affinity)
    unbound = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    for name in settings:
        environment = unbound | {name: settings[name]}
        shown = subprocess.check_output([sys.executable, tmp_path / "rank.py"], env=environment, text=True)
        assert shown == "1\n", f"with {name} alone"
    code = """
        import sys
        if sys.argv[2] == "torchrun":
            from launch import torchrun
            sys.exit(torchrun.main(sys.argv[3:]))
        from launch import local
        from megatron_dapo.config.loader import load_config
        given = "actor_rollout_ref.rollout.server_urls=[http://127.0.0.1:9]"
        local.checked_config = lambda *_: load_config(None, [f"trainer.run_dir={sys.argv[1]}/run", given])
        local.process_plan, local.first_look, run_local = lambda _: "", lambda _: None, local.run_local
        local.run_local = lambda config: run_local(config, [sys.executable, f"{sys.argv[1]}/rank.py"])
        local.main(sys.argv[3:])
    """
    started = {"local": [], "torchrun": ["--standalone", "--nproc-per-node=1", f"{tmp_path}/rank.py"]}
    for launcher, arguments in started.items():
        shown = python(code, os.environ | settings, str(tmp_path), launcher, *arguments).split()
        assert shown == [str(len(os.sched_getaffinity(0)))], launcher


COMPILERS = "TORCHINDUCTOR_COMPILE_THREADS"
RANK_DEFAULTS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    COMPILERS: "1",
}


@pytest.mark.parametrize(
    ("user_set", "expected"),
    [
        ({}, RANK_DEFAULTS),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8", "PYTORCH_ALLOC_CONF": "backend:native", COMPILERS: "4"}, {}),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1", COMPILERS: "1"}),
    ],
)
def test_a_rank_gets_defaults_for_its_gpu_and_keeps_the_users_settings(user_set, expected, monkeypatch):
    # no package with a cuDNN, which a CUDA build of torch brings
    monkeypatch.setattr(sys, "path", [])
    environment = dict(user_set)
    set_rank_defaults(environment)
    assert environment == user_set | expected


def test_a_rank_that_hands_its_memory_to_servers_has_no_expandable_segments(monkeypatch):
    """They cannot be exported by CUDA IPC (torch_memory_saver #36, slime #2188)."""
    monkeypatch.setattr(sys, "path", [])
    environment: dict[str, str] = {}
    set_rank_defaults(environment, exports_memory=True)
    assert not any("ALLOC_CONF" in name for name in environment)
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_a_rank_has_its_defaults_before_it_imports_torch(tmp_path):
    """Under every launcher: its command for a rank sets them."""
    code = """
import os, sys, types
sys.modules["torch"] = None  # its import fails
from megatron_dapo import __main__
from megatron_dapo.config.schema.config import Config
__main__._checked_config = lambda *arguments: Config()
try:
    __main__.main(["train"])
except ImportError:
    print(*map(os.environ.get, sys.argv[1:]))
"""
    names = (*RANK_DEFAULTS, "PYTORCH_CUDA_ALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", code, *RANK_DEFAULTS]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, text=True, capture_output=True)
    assert done.stdout == "1 expandable_segments:True 1\n", done.stderr
