"""The supervisor of a config's SGLang servers on this machine: starts, restarts and stops them."""

import json
import logging
import math
import socket
import time
from pathlib import Path

from megatron_dapo.common.addresses import node_name
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.exit_codes import exit_phrase
from megatron_dapo.common.log_lines import last_error
from megatron_dapo.config.derived import servers_per_node
from megatron_dapo.config.schema.config import Config
from megatron_dapo.servers.child_process import TAIL_PREFIX, ChildProcess
from megatron_dapo.servers.followed_lease import FollowedLease, lease_of
from megatron_dapo.servers.server_command import ServerCommand, ServerCommandMaker, assign_gpus, sglang_command
from megatron_dapo.servers.server_files import ServerFiles
from megatron_dapo.servers.server_health import HTTP_OK, HealthCheck, StartEvent, StartState, health_status
from megatron_dapo.servers.server_watch import PUSH_MARGIN_S, ServerWatch
from megatron_dapo.servers.several_nodes.server_node import ONE_NODE, ServerNode
from megatron_dapo.servers.several_nodes.start_orders import StartOrders
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.storage.server_key import key_header, make_server_key, read_server_key

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
PROBE_TIMEOUT_S = 2.0
STOP_GRACE_S = 15.0
MAX_BACKOFF_S = 60.0  # between two starts of a server that dies before it is healthy


class ServerFailure(RuntimeError):
    """A server did not start, or died too often.

    The message names it, its log file and the log's last lines.
    """

    def summary(self) -> str:
        """Return the message on one line, with the last error of the log's lines."""
        first, *tail = str(self).splitlines()
        error = last_error([line.removeprefix(TAIL_PREFIX) for line in tail])
        return f"{first} ({error})" if error else first


class ServerStart:
    """One start of a server: its process, its files outside the run folder, and its later watch."""

    def __init__(self, name: str, command: ServerCommand, log_file: Path, startup_timeout_s: float = math.inf) -> None:
        self._started = time.monotonic()
        self.deadline = self._started + startup_timeout_s
        self.files = ServerFiles(command.environment)
        self.process = ChildProcess(name, command.command, log_file, command.environment | self.files.variables)
        self.watch: ServerWatch | None = None  # from the first healthy answer on

    def age_s(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._started

    def stop_process(self, grace_s: float) -> None:
        """End the process and all its children."""
        if self.watch is not None:
            self.watch.stop()
        self.process.stop(grace_s)


class SupervisedServer:
    """One server over all its starts; over several nodes its leader, and orders for the others."""

    def __init__(
        self, name: str, url: str, key: str, command: ServerCommand, log_file: Path, orders: StartOrders
    ) -> None:
        self.state = StartState.STOPPED
        self.name = name
        self.url = url
        self.command = command
        self.log_file = log_file
        self.orders = orders
        self.current: ServerStart | None = None  # the last start; None while it is stopped
        self._last_process: ChildProcess | None = None
        self.num_restarts = 0
        self.num_failed_starts = 0  # in a row
        self.starts_again_at = 0.0  # while it waits
        self._headers = key_header(key)

    def start(self, startup_timeout_s: float) -> None:
        """Start its process, the first time or again."""
        if self.current is not None:
            self.current.files.remove()
        state = self.state.after(StartEvent.STARTED)
        self.current = ServerStart(self.name, self.command, self.log_file, startup_timeout_s)
        self.state = state  # a process that could not be started has changed nothing
        self.orders.start()
        self._last_process = self.current.process
        log.info("%s starts at %s (pid %d, log %s)", self.name, self.url, self.current.process.pid, self.log_file)

    def begin_watch(self, current: ServerStart, watch: ServerWatch) -> None:
        """Note that it takes requests."""
        self.state = self.state.after(StartEvent.HEALTHY)
        current.watch = watch
        log.info("%s is healthy at %s after %.0f s", self.name, self.url, current.age_s())

    def wait(self, delay_s: float) -> None:
        """Note that its process ended, and the delay of the next start."""
        self.state = self.state.after(StartEvent.ENDED)
        self.starts_again_at = time.monotonic() + delay_s

    def forget(self) -> None:
        """Remove its files after the end of all its processes."""
        self.state = self.state.after(StartEvent.STOPPED)
        self.orders.stop()
        if self.current is not None:
            self.current.files.remove()
        self.current = None

    def failure(self, current: ServerStart) -> str | None:
        """Return how one of its processes ended; None while all run."""
        code = current.process.poll()
        if code is not None:
            return exit_phrase(code)
        lost = self.orders.failure()
        return f"lost a process: {lost}" if lost else None

    def is_gone(self) -> bool:
        """Return whether it is not at work, and none of its processes is left."""
        is_ended = self.state in (StartState.STOPPED, StartState.WAITING)
        return is_ended and (self._last_process is None or self._last_process.is_gone())

    def status_of(self, check: HealthCheck, timeout_s: float = PROBE_TIMEOUT_S) -> int | None:
        """Return the status of its answer; None without one."""
        return health_status(self.url, check, self._headers, timeout_s)


class ServerSupervisor:
    """The servers of `actor_rollout_ref.rollout.server`.

    URLs are known from construction on and survive restarts. So does the key in `key_file`,
    demanded by the servers. One thread owns a supervisor: it calls `start`, then `check` every
    second or so, and `stop` in the end.

    With shared GPUs it follows their lease: servers are started only while the lease is theirs.
    """

    def __init__(
        self,
        config: Config,
        log_dir: Path,
        *,
        first_gpu: int = 0,
        first_port: int | None = None,
        name: str = "server",
        node: ServerNode = ONE_NODE,
        command_of: ServerCommandMaker | None = None,
    ) -> None:
        """Prepare the servers: reserve their ports, make their key.

        Args:
            config: of the run.
            log_dir: folder of their log files.
            first_gpu: GPUs of this machine before it belong to others (the trainer).
            first_port: the servers listen on it and the ports after it; by default on free ports.
            name: of the servers and their log files, before their number.
            node: of servers over several nodes, the one that leads them.
            command_of: the maker of a server's command; by default `sglang_command`.
        """
        server = config.actor_rollout_ref.rollout.server
        self._settings = server
        self.key_file = make_server_key(config)
        key = read_server_key(self.key_file)
        self._run = RunFolder.of(config.trainer)
        self._lease_folder = lease_of(config)
        self._lease = FollowedLease(self._lease_folder, f"{name}-{node_name()}")
        self._silent_limit_s = config.weight_sync.timeout_s + PUSH_MARGIN_S
        num_servers = servers_per_node(config)
        numbers = [first_port + i if first_port else 0 for i in range(num_servers)]
        self._ports = [ReservedPort(server.host, number) for number in numbers]
        self.urls = [f"http://{_reachable(server.host)}:{port.number}" for port in self._ports]
        gpus = assign_gpus(num_servers, server.tensor_model_parallel_size // node.num_nodes, first_gpu)
        make = command_of or sglang_command
        self.were_healthy = False  # all of them, at some time
        self._servers = [
            SupervisedServer(
                f"{name}-{i}",
                url,
                key,
                node.command(i, make(config, server.host, port.number, gpus[i])),
                Path(log_dir) / f"{name}-{i}.log",
                StartOrders(self._run.server_starts / f"{name}-{i}", node.num_nodes - 1),
            )
            for i, (url, port) in enumerate(zip(self.urls, self._ports, strict=True))
        ]

    def overrides(self) -> list[str]:
        """Return overrides for a trainer's config with these servers' URLs and key file."""
        keys = {"server_urls": self.urls, "server_api_key_file": str(self.key_file)}
        return [f"actor_rollout_ref.rollout.{key}={json.dumps(value)}" for key, value in keys.items()]

    def start(self) -> None:
        """Start all of them; do not wait."""
        for server in self._servers:
            server.start(self._settings.startup_timeout_s)

    def wait_healthy(self) -> None:
        """Wait until every server takes requests.

        Raises ServerFailure at the deadline, or for a server beyond restarting.
        """
        while not self.check():
            time.sleep(POLL_INTERVAL_S)

    def check(self) -> bool:
        """Look at every server once and restart the dead and the failed ones.

        A server that died more than `max_restarts` times, or is not healthy at its deadline, is
        given up. Return whether all others are healthy. The lease of shared GPUs is obeyed, and
        answered with the servers that have no process left.

        Raises ServerFailure if none is left, or if a server would be given up before all were
        healthy once: then it is a mistake.
        """
        running = self._running()
        assert running, "start() comes before check(), and stop() after it"
        checks = {
            StartState.WAITING: self._start_if_due,
            StartState.STARTING: self._check_start,
            StartState.WORKING: self._check_work,
        }
        urls = self._lease.look()
        condemned = [(server, current) for server, current in running if server.url in urls]
        for _, current in condemned:
            current.process.kill()  # all of them, before the first is waited for
        try:
            for server, current in condemned:
                self._end_condemned(server, current)
            healthy = all([checks[server.state](server, current) for server, current in self._running()])
        finally:
            self._answer_lease()
        self.were_healthy |= healthy
        return healthy

    def pids(self) -> list[int]:
        """Return the processes started for the servers."""
        return [current.process.pid for _, current in self._running()]

    def stop(self) -> None:
        """End all servers at the same time; return when none of their processes is left.

        Can be called twice.
        """
        running = self._running()
        for _, current in running:
            current.process.terminate()
            current.files.note(current.process.pids())
        deadline = time.monotonic() + STOP_GRACE_S
        for server, current in running:
            current.stop_process(max(0.0, deadline - time.monotonic()))
            server.forget()
        self._answer_lease()
        for port in self._ports:
            port.release()

    def _running(self) -> list[tuple[SupervisedServer, ServerStart]]:
        """Return the servers not stopped, with their last starts."""
        return [(server, server.current) for server in self._servers if server.current is not None]

    def _answer_lease(self) -> None:
        gone = [server.url for server in self._servers if server.is_gone()]
        self._lease.answer(gone, for_good=not self._running())

    def _end_condemned(self, server: SupervisedServer, current: ServerStart) -> None:
        if server.state is StartState.STARTING:
            self._put_off(server, current)
        elif server.state is StartState.WORKING:
            self._restart(server, current, "is condemned by the trainer, and is killed")

    def _put_off(self, server: SupervisedServer, current: ServerStart) -> None:
        """End a start that the trainer waits for no longer; it is no failure of the server."""
        log.warning("%s was not healthy when the trainer takes the GPUs; it is started again later", server.name)
        current.stop_process(0.0)
        server.wait(0.0)

    def _start_if_due(self, server: SupervisedServer, current: ServerStart) -> bool:
        if self._lease.is_with_servers and time.monotonic() >= server.starts_again_at:
            server.start(self._settings.startup_timeout_s)
        return False

    def _check_work(self, server: SupervisedServer, current: ServerStart) -> bool:
        assert current.watch is not None
        failure = server.failure(current)
        if failure is None and (silence := current.watch.failure()):
            failure = f"{silence}, and is killed"
        if failure is not None:
            self._restart(server, current, failure)
        return failure is None

    def _check_start(self, server: SupervisedServer, current: ServerStart) -> bool:
        if (failure := server.failure(current)) is not None:
            self._restart(server, current, failure)
            return False
        # it may have been put to sleep since its last look
        check = HealthCheck.TAKES_REQUESTS if self._lease.is_with_servers else HealthCheck.SCHEDULER_ANSWERS
        is_up = server.status_of(check) == HTTP_OK
        if not is_up and self._lease.is_with_trainer:
            self._put_off(server, current)
            return False
        current.files.note(current.process.pids())
        if is_up:
            note = self._run.unresponsive(server.url)
            watch = ServerWatch(server.status_of, self._silent_limit_s, note, self._lease_folder)
            server.begin_watch(current, watch)
            return True
        if time.monotonic() > current.deadline:
            others = f" (of its other nodes: {server.name}-node-*.log)" if server.orders.num_followers else ""
            why = (
                f"{server.name} at {server.url} was not healthy within {self._settings.startup_timeout_s:g} s "
                f"(actor_rollout_ref.rollout.server.startup_timeout_s); its log is {server.log_file}{others}\n"
                f"{current.process.log_tail()}"
            )
            self._give_up(server, current, why)
        return False

    def _restart(self, server: SupervisedServer, current: ServerStart, why: str) -> None:
        current.stop_process(0.0)  # the rest of its family
        end = f"{server.name} {why}; its log is {server.log_file}\n{current.process.log_tail()}"
        if server.num_restarts >= self._settings.max_restarts:
            times = f"after {server.num_restarts} restarts (actor_rollout_ref.rollout.server.max_restarts)"
            self._give_up(server, current, f"{server.url}: {times}: {end}")
            return
        server.num_restarts += 1
        server.num_failed_starts = 0 if server.state is StartState.WORKING else server.num_failed_starts + 1
        # 0, 1, 3, 7, ... seconds
        delay_s = min(2.0 ** max(0, server.num_failed_starts - 1) - 1.0, MAX_BACKOFF_S)
        log.error(
            "%s at %s %s; restart %d of %d%s",
            *(server.name, server.url, why, server.num_restarts, self._settings.max_restarts),
            f" in {delay_s:.0f} s" if delay_s else "",
        )
        server.wait(delay_s)
        self._start_if_due(server, current)

    def _give_up(self, server: SupervisedServer, current: ServerStart, why: str) -> None:
        if not self.were_healthy:
            raise ServerFailure(why)
        current.stop_process(0.0)
        server.forget()
        num_left = len(self._running())
        if not num_left:
            raise ServerFailure(f"none is left; the last one: {why}")
        log.error("%s is given up, %d of %d servers are left. %s", server.name, num_left, len(self._servers), why)


class ReservedPort:
    """A port kept from all others by the kernel while we hold it; number 0 asks for a free one.

    The socket is bound but does not listen. It has SO_REUSEADDR, so that a server with the same
    setting can bind and listen.
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
        """Give the port back."""
        self._socket.close()


def _reachable(host: str) -> str:
    """Return the host's name for clients of a server bound to `host`.

    Raises UserError without one.
    """
    if host in ("0.0.0.0", "::"):
        bound_to = host
        host = node_name()  # as in a job's plan
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            raise UserError(
                f"actor_rollout_ref.rollout.server.host = {bound_to}: the servers would be called by this machine's "
                f"name, {host}, which does not resolve here ({error.strerror}); give an address of this machine "
                f"instead."
            ) from error
    return f"[{host}]" if ":" in host else host
