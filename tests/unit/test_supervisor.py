"""The supervisor of the servers, with servers that start at once in place of SGLang."""

import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import requests
import torch

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.servers.server_command import FLOAT32_STATES, ServerCommand, sglang_command
from megatron_dapo.servers.server_files import ServerFiles
from megatron_dapo.servers.supervisor import ReservedPort, ServerFailure, ServerSupervisor
from tests import fake_server

pytestmark = pytest.mark.unit

PROGRAM = f"-m megatron_dapo.servers.keyed_sglang {Path('runs/run/.server_key').absolute()}"
SERVER = "actor_rollout_ref.rollout.server"


@pytest.fixture(autouse=True)
def short_polls(monkeypatch):
    monkeypatch.setattr("megatron_dapo.servers.supervisor.POLL_INTERVAL_S", 0.05)


def supervisor(tmp_path: Path, behaviour: str, *keys: str, overrides: Sequence[str] = ()) -> ServerSupervisor:
    """keys: of the servers."""

    def command(config: Config, host: str, port: int, gpus: list[str]) -> ServerCommand:
        return ServerCommand((sys.executable, fake_server.__file__, host, str(port), behaviour), dict(os.environ))

    settings = [f"trainer.run_dir={tmp_path}/run", *(f"{SERVER}.{text}" for text in keys), *overrides]
    config = load_config(None, settings)
    return ServerSupervisor(config, tmp_path, command_of=command)


def eventually(condition, timeout_s: float = 10.0) -> bool:
    """Return whether the condition holds at some time:
    perhaps not any more when it is asked again."""
    deadline = time.monotonic() + timeout_s
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(holds)


def can_connect(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_every_server_answers_at_its_url_and_none_is_left_after_stop(tmp_path):
    servers = supervisor(tmp_path, "serves", "num_servers=2")
    assert len(set(servers.urls)) == 2
    servers.start()
    servers.wait_healthy()
    processes = [psutil.Process(pid) for pid in servers.pids()]
    assert all(map(can_connect, servers.urls))
    servers.stop()
    assert not any(process.is_running() for process in processes)
    assert not any(map(can_connect, servers.urls))
    servers.stop()  # harmless


def test_servers_that_were_not_started_or_were_stopped_are_not_called_healthy(tmp_path):
    servers = supervisor(tmp_path, "serves")
    with pytest.raises(AssertionError, match="start"):
        servers.check()
    assert not servers.were_healthy
    servers.start()
    servers.stop()
    with pytest.raises(AssertionError, match="stop"):
        servers.check()
    assert not servers.were_healthy


def test_a_dead_server_comes_back_at_the_same_url(tmp_path, caplog):
    servers = supervisor(tmp_path, "serves", "max_restarts=1")
    servers.start()
    try:
        servers.wait_healthy()
        (url,), (first,) = servers.urls, servers.pids()
        os.kill(first, signal.SIGKILL)
        assert eventually(lambda: not servers.check())
        assert re.search(rf"server-0 at {url} was killed by SIGKILL; restart 1 of 1", caplog.text)
        servers.wait_healthy()
        assert servers.urls == [url] and can_connect(url) and servers.pids() != [first]
    finally:
        servers.stop()


def test_a_server_that_keeps_dying_is_started_less_and_less_often_and_given_up_with_its_last_words(tmp_path, caplog):
    servers = supervisor(tmp_path, "dies", "max_restarts=2")
    servers.start()
    with pytest.raises(ServerFailure) as failure:
        servers.wait_healthy()
    servers.stop()
    message = str(failure.value)
    for part in ("server-0", servers.urls[0], "after 2 restarts", "exit code 1", "server-0.log", "out of luck"):
        assert part in message
    assert (tmp_path / "server-0.log").read_text().count("out of luck") == 3
    assert "restart 1 of 2\n" in caplog.text and "restart 2 of 2 in 1 s\n" in caplog.text


def test_a_server_that_is_not_healthy_in_time_is_named_with_its_log(tmp_path):
    servers = supervisor(tmp_path, "hangs", "startup_timeout_s=3.0")
    servers.start()
    with pytest.raises(ServerFailure, match=r"server-0 at http.* was not healthy within 3 s(.|\n)*fake server: hangs"):
        servers.wait_healthy()
    servers.stop()


def test_stop_ends_children_that_moved_to_a_session_of_their_own(tmp_path):
    servers = supervisor(tmp_path, "has a child")
    servers.start()
    servers.wait_healthy()
    child = psutil.Process(int(re.search(r"child (\d+)", (tmp_path / "server-0.log").read_text()).group(1)))
    servers.check()
    servers.stop()
    assert eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def own_servers(folder: Path, pids: Connection) -> None:
    """Start servers in a process of its own, and send their process ids."""
    servers = supervisor(folder, "leaves files", "num_servers=2")
    servers.start()
    servers.wait_healthy()
    pids.send(servers.pids())
    time.sleep(600)


def left_by(folder: Path, number: int) -> list[Path]:
    """Temporary folder and shared memory of a fake server, by its own account."""
    return [Path(word) for word in re.findall(r"files (\S+) (\S+)", (folder / f"server-{number}.log").read_text())[-1]]


def test_nothing_that_a_server_keeps_elsewhere_is_left_after_a_restart_or_a_stop(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    servers = supervisor(tmp_path, "leaves files", "num_servers=2")
    servers.start()
    try:
        servers.wait_healthy()
        first, other = left_by(tmp_path, 0), left_by(tmp_path, 1)
        assert all(path.exists() for path in [*first, *other]) and first[0] != other[0]
        assert first[0].parent == tmp_path and len(list(first[0].glob("tmp????????"))) == 1
        os.kill(servers.pids()[0], signal.SIGKILL)
        assert eventually(lambda: not servers.check())
        servers.wait_healthy()
        again = left_by(tmp_path, 0)
        assert not any(path.exists() for path in first) and all(path.exists() for path in [*again, *other])
    finally:
        servers.stop()
    assert not any(path.exists() for path in [*again, *other])


def test_servers_end_with_a_killed_supervisor_and_what_they_left_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    context = multiprocessing.get_context("fork")  # before there are threads
    pids, sending = context.Pipe(duplex=False)
    owner = context.Process(target=own_servers, args=(tmp_path / "killed", sending), daemon=True)
    owner.start()
    sending.close()
    servers = [psutil.Process(pid) for pid in pids.recv()]
    living = supervisor(tmp_path / "living", "leaves files")
    living.start()
    living.wait_healthy()
    owner.kill()
    alive = psutil.wait_procs(servers, timeout=20)[1]
    for process in alive:
        process.kill()
    owner.join()
    assert not alive, "they went on without their supervisor"
    left = [path for number in range(2) for path in left_by(tmp_path / "killed", number)]
    assert all(path.exists() for path in left)
    following = supervisor(tmp_path / "next", "serves")
    following.start()
    try:
        assert not any(path.exists() for path in left)
        assert all(path.exists() for path in left_by(tmp_path / "living", 0))
    finally:
        following.stop()
        living.stop()


def test_a_temporary_folder_with_a_long_name_leaves_room_for_a_servers_sockets(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    files = ServerFiles({})
    try:
        assert len(f"{files.variables['TMPDIR']}/tmp01234567") <= 107
    finally:
        files.remove()
    assert not Path(files.variables["TMPDIR"]).exists()


def test_a_reserved_port_is_given_to_nobody_else_but_a_server_can_use_it():
    port = ReservedPort("127.0.0.1")
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("127.0.0.1", port.number))
    # sets SO_REUSEADDR, as servers do
    with socket.create_server(("127.0.0.1", port.number)) as server:
        assert server.getsockname()[1] == port.number
    port.release()


def test_a_port_in_use_is_a_mistake_of_the_user():
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(UserError, match="cannot be used"):
        ReservedPort("127.0.0.1", server.getsockname()[1])


def test_servers_that_nobody_could_reach_by_this_machines_name_are_not_started(tmp_path, monkeypatch):
    """They would not be called healthy before the whole time for their start is over."""
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-name.invalid")
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    with pytest.raises(UserError, match=r"server.host = 0\.0\.0\.0.*no-such-name.invalid.*give an address"):
        supervisor(tmp_path, "serves", "host=0.0.0.0")
    # the name that a job's plan gave to the others
    monkeypatch.setenv("SLURMD_NODENAME", "localhost")
    servers = supervisor(tmp_path, "serves", "host=0.0.0.0")
    assert servers.urls[0].startswith("http://localhost:")
    servers.stop()


def test_the_command_of_a_cpu_server_serves_fp32_on_its_port_with_the_cpu_adaptation():
    config = load_config(None, ["actor_rollout_ref.model.path=some/model", f"{SERVER}.extra_args=[--log-level, debug]"])
    made = sglang_command(config, "127.0.0.1", 31000, [])
    words = " ".join(made.command[1:])
    assert words.startswith(f"{PROGRAM} --model-path some/model --host 127.0.0.1 --port 31000 --tp-size 1")
    assert "--dtype float32" in words and "--device cpu" in words and words.endswith("--log-level debug")
    assert "--load-format" not in words
    assert made.environment["PYTHONPATH"].split(":")[0].endswith("platform/sglang_cpu/site")
    assert made.environment["OMP_NUM_THREADS"] == "1"


def test_the_command_of_a_gpu_server_is_sglangs_own_with_its_gpus_and_the_trainers_nccl(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5")
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    sizes = [f"{SERVER}.tensor_model_parallel_size=2", f"{SERVER}.mem_fraction_static=0.7"]
    config = load_config(None, ["actor_rollout_ref.model.path=some/model", *sizes])
    made = sglang_command(config, "0.0.0.0", 31000, ["4", "5"])
    words = "--model-path some/model --host 0.0.0.0 --port 31000 --tp-size 2 --dtype bfloat16"
    options = "--log-level-http warning --enable-fp32-lm-head --mem-fraction-static 0.7"
    assert " ".join(made.command[1:]) == f"{PROGRAM} {words} {options}"
    wanted = {"CUDA_VISIBLE_DEVICES": "4,5", "NCCL_IB_HCA": "mlx5", "NCCL_CUMEM_ENABLE": "0"}
    assert wanted.items() <= made.environment.items()
    assert "sglang_cpu" not in made.environment.get("PYTHONPATH", "")
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    made = sglang_command(config, "0.0.0.0", 31000, ["4", "5"])
    assert made.environment["NCCL_CUMEM_ENABLE"] == "1", "what the user sets, the trainer has too"


def test_a_server_finds_the_programs_of_our_python_though_its_environment_is_not_activated(monkeypatch):
    """A GPU server compiles with `ninja`, which lies beside our Python."""
    monkeypatch.setenv("PATH", "/usr/bin")
    config = load_config(None, ["actor_rollout_ref.model.path=some/model"])
    made = sglang_command(config, "127.0.0.1", 31000, [])
    assert made.environment["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"


@pytest.mark.parametrize("no_proxy", ["", "intern.example", "*"])
def test_a_server_asks_itself_through_no_proxy(monkeypatch, no_proxy):
    """SGLang's warm-up is done with `requests`, which obeys the environment."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    if no_proxy:
        monkeypatch.setenv("NO_PROXY", no_proxy)
    config = load_config(None, ["actor_rollout_ref.model.path=some/model"])
    environment = sglang_command(config, "10.1.0.3", 31000, []).environment
    monkeypatch.setattr(os, "environ", environment)
    for host in ("127.0.0.1", "10.1.0.3", *filter(None, [no_proxy.replace("*", "any.example")])):
        assert not requests.utils.get_environ_proxies(f"http://{host}:31000/model_info"), host
    assert no_proxy == "*" or requests.utils.get_environ_proxies("http://elsewhere.example/")


def test_servers_of_a_checkpoint_of_ours_start_without_weights(tmp_path):
    (tmp_path / "megatron").mkdir()
    config = load_config(None, [f"actor_rollout_ref.model.path={tmp_path}"])
    words = " ".join(sglang_command(config, "127.0.0.1", 31000, []).command)
    assert f"--model-path {tmp_path}/hf --host" in words and "--load-format dummy" in words


def test_servers_keep_a_shared_expert_under_its_own_name(tmp_path):
    """SGLang on a GPU would make it one more of the others,
    under which name no push could be verified."""
    config = load_config(None, [f"actor_rollout_ref.model.path={tmp_path}"])
    contents = ({"n_shared_experts": 1}, {"shared_expert_intermediate_size": 512}, {"num_experts": 8})
    for content, is_told in zip(contents, (True, True, False), strict=True):
        (tmp_path / "config.json").write_text(json.dumps(content))
        command = sglang_command(config, "127.0.0.1", 31000, []).command
        assert ("--disable-shared-experts-fusion" in command) is is_told


@pytest.mark.parametrize(("dtype", "expected"), [("float32", "float32"), ("bfloat16", None)])
def test_a_servers_states_are_float32_where_the_run_is(tmp_path, monkeypatch, dtype, expected):
    for name in FLOAT32_STATES:
        monkeypatch.delenv(name, raising=False)
    config = load_config(
        None, [f"actor_rollout_ref.model.path={tmp_path}", f"actor_rollout_ref.actor.megatron.dtype={dtype}"]
    )
    environment = sglang_command(config, "127.0.0.1", 31000, []).environment
    assert {environment.get(name) for name in FLOAT32_STATES} == {expected}
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", "bfloat16")
    assert sglang_command(config, "127.0.0.1", 31000, []).environment["SGLANG_MAMBA_SSM_DTYPE"] == "bfloat16"


@pytest.mark.parametrize(("has_gpu", "is_told"), [(True, True), (False, False)])
def test_gpu_servers_of_stacked_experts_hold_them_as_a_push_compares_them(tmp_path, monkeypatch, has_gpu, is_told):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    config = load_config(None, [f"actor_rollout_ref.model.path={tmp_path}"])
    for architecture, is_stacked in (("GptOssForCausalLM", True), ("Qwen3MoeForCausalLM", False)):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "num_local_experts": 8}))
        words = " ".join(sglang_command(config, "127.0.0.1", 31000, []).command)
        assert ("--moe-runner-backend triton" in words) is (is_told and is_stacked)


def test_once_all_were_healthy_a_server_is_given_up_alone_and_only_the_last_one_is_a_failure(tmp_path, caplog):
    servers = supervisor(tmp_path, "serves", "num_servers=2", "max_restarts=0")
    servers.start()
    try:
        servers.wait_healthy()
        first, second = servers.pids()
        os.kill(first, signal.SIGKILL)
        assert eventually(lambda: servers.check() and servers.pids() == [second])
        assert "server-0 is given up, 1 of 2 servers are left" in caplog.text and servers.urls[0] in caplog.text
        os.kill(second, signal.SIGKILL)
        with pytest.raises(ServerFailure, match=f"none is left; the last one: {servers.urls[1]}"):
            eventually(lambda: servers.check() and False)
    finally:
        servers.stop()
