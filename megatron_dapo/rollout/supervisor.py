"""Starts a config's SGLang servers on this machine, keeps them alive, and stops them."""

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.common.addresses import node_name
from megatron_dapo.common.child_environment import COMMON, places_to_write
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.exit_codes import exit_phrase
from megatron_dapo.common.server_health import HTTP_OK, HealthCheck, health_status
from megatron_dapo.config.derived import servers_per_node
from megatron_dapo.config.schema import Config
from megatron_dapo.rollout.child_process import ChildProcess
from megatron_dapo.rollout.server_files import ServerFiles
from megatron_dapo.rollout.server_watch import PUSH_MARGIN_S, ServerWatch
from megatron_dapo.storage.model_folder import ModelFolder
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.storage.server_key import key_header, make_server_key, read_server_key, server_key_file

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
PROBE_TIMEOUT_S = 2.0
STOP_GRACE_S = 15.0
MAX_BACKOFF_S = 60.0  # between two starts of a server that dies before it is healthy


class ServerFailure(RuntimeError):
    """A server did not start, or died too often. The message names it, its log file and the log's last lines."""


@dataclass(frozen=True)
class ServerCommand:
    """How one server is started; the same for its restarts."""

    command: tuple[str, ...]
    environment: dict[str, str]


ServerCommandMaker = Callable[[Config, str, int, list[str]], ServerCommand]


class ServerSupervisor:
    """The servers of `actor_rollout_ref.rollout.server`. URLs are known from construction on and survive restarts,
    and so does the key that they demand of everyone, which lies in `key_file`.

    first_gpu: GPUs of this machine before it belong to others (the trainer). first_port: the servers listen on it and
    the ports after it; none = free ports. name: of the servers and their log files, before their number. One thread
    owns a supervisor: it calls `start`, then `check` every second or so, and `stop` in the end.
    """

    def __init__(
        self,
        config: Config,
        log_dir: Path,
        *,
        first_gpu: int = 0,
        first_port: int | None = None,
        name: str = "server",
        command_of: ServerCommandMaker | None = None,
    ) -> None:
        server = config.actor_rollout_ref.rollout.server
        self._settings = server
        self.key_file = make_server_key(config)
        key = read_server_key(self.key_file)
        self._run = RunFolder.of(config.trainer)
        self._silent_limit_s = config.weight_sync.timeout_s + PUSH_MARGIN_S
        num_servers = servers_per_node(config)
        numbers = [first_port + i if first_port else 0 for i in range(num_servers)]
        self._ports = [ReservedPort(server.host, number) for number in numbers]
        self.urls = [f"http://{_reachable(server.host)}:{port.number}" for port in self._ports]
        gpus = _assign_gpus(num_servers, server.tensor_model_parallel_size, first_gpu)
        make = command_of or sglang_command
        self.were_healthy = False  # all of them, at some time
        self._servers = [
            _Server(
                f"{name}-{i}",
                url,
                key,
                make(config, server.host, port.number, gpus[i]),
                Path(log_dir) / f"{name}-{i}.log",
            )
            for i, (url, port) in enumerate(zip(self.urls, self._ports, strict=True))
        ]

    def overrides(self) -> list[str]:
        """What names these servers in a trainer's config."""
        keys = {"server_urls": self.urls, "server_api_key_file": str(self.key_file)}
        return [f"actor_rollout_ref.rollout.{key}={json.dumps(value)}" for key, value in keys.items()]

    def start(self) -> None:
        """Start all of them; does not wait."""
        for server in self._servers:
            server.start(self._settings.startup_timeout_s)

    def wait_healthy(self) -> None:
        """Until every server takes requests. Raises ServerFailure at the deadline or where one is beyond restarting."""
        while not self.check():
            time.sleep(POLL_INTERVAL_S)

    def check(self) -> bool:
        """Look at every server once, restart those that are dead or do not work any more. True if all are healthy, but
        for those that were given up.

        A server that died more than `max_restarts` times, or is not healthy at its deadline, is given up. Raises
        ServerFailure when none is left, or where that happens before all were healthy once: then it is a mistake.
        """
        running = [server for server in self._servers if server.process is not None]
        assert running, "start() comes before check(), and stop() after it"
        healthy = all([self._check_one(server) for server in running])
        self.were_healthy |= healthy
        return healthy

    def pids(self) -> list[int]:
        return [server.process.pid for server in self._servers if server.process is not None]

    def stop(self) -> None:
        """End all of them, at the same time; returns when none of their processes is left. Can be called twice."""
        running = [server for server in self._servers if server.process is not None]
        for server in running:
            server.process.terminate()
            server.files.note(server.process.pids())
        deadline = time.monotonic() + STOP_GRACE_S
        for server in running:
            server.stop(max(0.0, deadline - time.monotonic()))
            server.forget()
        for port in self._ports:
            port.release()

    def _check_one(self, server: "_Server") -> bool:
        if server.starts_again_at is not None:
            if time.monotonic() >= server.starts_again_at:
                server.start(self._settings.startup_timeout_s)
            return False
        code = server.process.poll()
        if code is not None:
            self._restart(server, exit_phrase(code))
            return False
        if server.is_healthy:
            if failure := server.watch.failure():
                self._restart(server, f"{failure}, and is killed")
            return failure is None
        is_up = server.probe()
        server.files.note(server.process.pids())
        if is_up:
            server.watch = ServerWatch(server.status_of, self._silent_limit_s, self._run.unresponsive(server.url))
            log.info("%s is healthy at %s after %.0f s", server.name, server.url, server.age_s())
            return True
        if time.monotonic() > server.deadline:
            self._give_up(
                server,
                f"{server.name} at {server.url} was not healthy within {self._settings.startup_timeout_s:g} s "
                f"(actor_rollout_ref.rollout.server.startup_timeout_s); its log is {server.log_file}\n"
                f"{server.process.log_tail()}",
            )
        return False

    def _restart(self, server: "_Server", why: str) -> None:
        server.stop(0.0)  # the rest of its family
        end = f"{server.name} {why}; its log is {server.log_file}\n{server.process.log_tail()}"
        if server.num_restarts >= self._settings.max_restarts:
            times = f"after {server.num_restarts} restarts (actor_rollout_ref.rollout.server.max_restarts)"
            self._give_up(server, f"{server.url}: {times}: {end}")
            return
        server.num_restarts += 1
        server.num_failed_starts = 0 if server.is_healthy else server.num_failed_starts + 1
        delay_s = min(2.0 ** max(0, server.num_failed_starts - 1) - 1.0, MAX_BACKOFF_S)  # 0, 1, 3, 7, ...
        log.error(
            "%s at %s %s; restart %d of %d%s",
            *(server.name, server.url, why, server.num_restarts, self._settings.max_restarts),
            f" in {delay_s:.0f} s" if delay_s else "",
        )
        if delay_s:
            server.starts_again_at = time.monotonic() + delay_s
        else:
            server.start(self._settings.startup_timeout_s)

    def _give_up(self, server: "_Server", why: str) -> None:
        if not self.were_healthy:
            raise ServerFailure(why)
        server.stop(0.0)
        server.forget()
        num_left = sum(server.process is not None for server in self._servers)
        if not num_left:
            raise ServerFailure(f"none is left; the last one: {why}")
        log.error("%s is given up, %d of %d servers are left. %s", server.name, num_left, len(self._servers), why)


def sglang_command(config: Config, host: str, port: int, gpus: list[str]) -> ServerCommand:
    """How an SGLang server of a config is started. gpus: what CUDA_VISIBLE_DEVICES gets; empty on a CPU."""
    from megatron_dapo.platform import nccl
    from megatron_dapo.platform.device import is_gpu, model_dtype  # imports torch, which the controller does without

    rollout, model = config.actor_rollout_ref.rollout, ModelFolder.of(config.actor_rollout_ref.model.path)
    settings = rollout.server
    dtype = str(model_dtype(config.actor_rollout_ref.actor.megatron.dtype)).removeprefix("torch.")
    arguments = [
        *("--model-path", str(model.hf)),
        *("--host", host),
        *("--port", str(port)),
        *("--tp-size", str(settings.tensor_model_parallel_size)),
        *("--dtype", dtype),
        *("--log-level-http", "warning"),  # else one line per request
    ]
    if model.megatron:  # only the trainer reads such weights; its first push comes before the first sample
        arguments += ("--load-format", "dummy")
    if is_gpu():
        environment = nccl.ENVIRONMENT | dict(os.environ) | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        # else logits are rounded to bfloat16 before the softmax: 7e-3 off on average, 5e-2 at most, per log-prob
        arguments.append("--enable-fp32-lm-head")
        arguments += _given(
            ("--max-total-tokens", settings.max_total_tokens),
            ("--max-running-requests", settings.max_running_requests),
            ("--mem-fraction-static", settings.mem_fraction_static),
        )
    else:
        from megatron_dapo.platform import sglang_cpu  # never imported where there is a GPU

        environment = sglang_cpu.server_environment(tensor_model_parallel_size=settings.tensor_model_parallel_size)
        arguments += sglang_cpu.server_arguments(settings.max_total_tokens, settings.max_running_requests)
    program = ("-m", "megatron_dapo.rollout.keyed_sglang", str(server_key_file(config)))
    command = (sys.executable, *program, *arguments, *settings.extra_args)
    environment |= COMMON | places_to_write(environment) | _own_tools(environment) | _no_proxy(environment, host)
    return ServerCommand(command, environment)


def _own_tools(environment: Mapping[str, str]) -> dict[str, str]:
    """Our Python's programs come first, as where its environment is activated: a GPU server compiles kernels when it
    starts, and runs `ninja` for that."""
    return {"PATH": os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])}


def _no_proxy(environment: Mapping[str, str], host: str) -> dict[str, str]:
    """A server asks itself for its first answer, and ends if none comes: not through the cluster's proxy, please."""
    given = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    if given.strip() == "*":  # alone it means all hosts
        return {}
    return {"no_proxy": ",".join([*filter(None, [given]), *dict.fromkeys(["127.0.0.1", "localhost", "::1", host])])}


class _Server:
    """One server's process and its fortunes."""

    def __init__(self, name: str, url: str, key: str, command: ServerCommand, log_file: Path) -> None:
        self.name, self.url, self.command, self.log_file = name, url, command, log_file
        self._headers = key_header(key)
        self.process: ChildProcess | None = None
        self.files: ServerFiles | None = None
        self.watch: ServerWatch | None = None  # from when it is healthy
        self.num_restarts = 0
        self.num_failed_starts = 0  # in a row
        self.starts_again_at: float | None = None
        self.is_healthy = False
        self.deadline = 0.0
        self._started = 0.0

    def start(self, startup_timeout_s: float) -> None:
        if self.files is not None:  # of its last life
            self.files.remove()
        self.files = ServerFiles(self.command.environment)
        environment = self.command.environment | self.files.variables
        self._started = time.monotonic()
        self.deadline = self._started + startup_timeout_s
        self.is_healthy = False
        self.starts_again_at = None
        self.process = ChildProcess(self.name, self.command.command, self.log_file, environment)
        log.info("%s starts at %s (pid %d, log %s)", self.name, self.url, self.process.pid, self.log_file)

    def stop(self, grace_s: float) -> None:
        if self.watch is not None:
            self.watch.stop()
        self.process.stop(grace_s)

    def forget(self) -> None:
        """After the end of all its processes: what is left of them goes."""
        self.process = None
        self.files.remove()

    def age_s(self) -> float:
        return time.monotonic() - self._started

    def probe(self) -> bool:
        """Ask for health, and remember it: from then on its process and its watch tell."""
        self.is_healthy = self.status_of(HealthCheck.TAKES_REQUESTS) == HTTP_OK
        return self.is_healthy

    def status_of(self, check: HealthCheck, timeout_s: float = PROBE_TIMEOUT_S) -> int | None:
        """Return the status of its answer; none without one."""
        return health_status(self.url, check, self._headers, timeout_s)


class ReservedPort:
    """A port that the kernel gives to nobody else while we hold it; number 0 asks for a free one.

    The socket is bound but does not listen, with SO_REUSEADDR, so that a server that sets it too can bind and listen.
    """

    def __init__(self, host: str, number: int = 0) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, number))
        except OSError as error:
            self._socket.close()
            raise UserError(
                f"Port {number} of {host} (actor_rollout_ref.rollout.server.host) cannot be used ({error.strerror}); "
                "give another host or port."
            ) from error
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        self._socket.close()


def _reachable(host: str) -> str:
    """What others call a server that binds to `host`. Raises UserError where that is nothing that leads here."""
    if host in ("0.0.0.0", "::"):
        given, host = host, node_name()  # as a job's plan has it
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            raise UserError(
                f"actor_rollout_ref.rollout.server.host = {given}: the servers would be called by this machine's name, "
                f"{host}, which does not resolve here ({error.strerror}); give an address of this machine instead."
            ) from error
    return f"[{host}]" if ":" in host else host


def _given(*options: tuple[str, object]) -> list[str]:
    """Command-line words of the options that have a value."""
    return [word for name, value in options if value is not None for word in (name, str(value))]


def _assign_gpus(num_servers: int, gpus_per_server: int, first_gpu: int) -> list[list[str]]:
    """Per server the GPUs it may see, in the numbering of this process's CUDA_VISIBLE_DEVICES; nothing on a CPU.
    Raises UserError where there are too few, or none that torch can use."""
    from megatron_dapo.platform.device import is_gpu, require_usable_gpus

    require_usable_gpus()
    if not is_gpu():
        return [[] for _ in range(num_servers)]
    visible = visible_gpus()
    needed = first_gpu + num_servers * gpus_per_server
    if needed > len(visible):
        raise UserError(
            f"{num_servers} servers x {gpus_per_server} GPUs (actor_rollout_ref.rollout.server) after the {first_gpu} "
            f"GPUs of the trainer need {needed} GPUs, this machine offers {len(visible)}; use fewer servers or ranks."
        )
    starts = range(first_gpu, needed, gpus_per_server)
    return [visible[start : start + gpus_per_server] for start in starts]


def visible_gpus() -> list[str]:
    """This machine's GPUs as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
