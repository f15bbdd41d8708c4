"""A node's local checks: GPUs, versions, files, disk, limits, ports, the shared folder."""

import importlib.metadata
import platform
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_dapo.agents.command_process import check_sandbox
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.sizes import ceil_div, format_bytes
from megatron_dapo.config.built_ins import BY_DATA_SOURCE
from megatron_dapo.config.derived import uses_critic
from megatron_dapo.config.key_names import AGENT
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.prompt_files import read_rows
from megatron_dapo.estimates.memory import MAIN_PARAMETER, dtype_bytes, moment_bytes, num_all_parameters
from megatron_dapo.huggingface.spec_reader import read_model_spec
from megatron_dapo.rewards.code.sandbox import find_way
from megatron_dapo.rewards.reward_registry import function_name
from megatron_dapo.storage.model_folder import ModelFolder

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "megatron-core", "sglang", "triton", "transformer-engine", "flash-attn", "apex")
LOG_BYTES = 10**9
_PROGRAMS = "code_tests"  # the reward function
_SHARED_S = 30.0  # a network file system may show a new file late


@dataclass(frozen=True)
class Result:
    """The short finding of a check. problem: the fault and the cure, one sentence."""

    found: str
    problem: str | None = None


def versions() -> dict[str, str]:
    """Return the versions of everything that must be equal on all nodes."""
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "megatron_dapo": _revision(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _revision() -> str:
    if not (REPOSITORY / ".git").exists():  # of an installed package git would name a repository around it
        return _version("megatron_dapo")
    # another user may own the checkout, which git would then refuse to read
    command = ["git", "-c", f"safe.directory={REPOSITORY}", "-C", str(REPOSITORY), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):  # no git in this container
        return _version("megatron_dapo")
    return done.stdout.strip() or _version("megatron_dapo")


# --------------------------------------------------------------------------------------------- disk


def checkpoints_bytes(config: Config) -> tuple[int, int]:
    """Return (bytes of one checkpoint, the most on the disk at once), with the one being
    written."""
    spec = read_model_spec(config.actor_rollout_ref.model.path)
    trainer = config.trainer
    width = dtype_bytes(config)
    # weights, Adam's moments and, of a half-precision model, its float32 weights; see
    # docs/checkpoints.md
    per_parameter = (
        width + moment_bytes(config) + (MAIN_PARAMETER if width < 4 else 0) + (width if trainer.save_hf else 0)
    )
    one = num_all_parameters(spec) * per_parameter * (2 if uses_critic(config) else 1)
    saves = ceil_div(trainer.total_training_steps, trainer.save_interval) if trainer.save_interval > 0 else 1
    if trainer.keep_last is None:
        return one, saves
    kept = trainer.keep_last + (trainer.total_training_steps // trainer.keep_every if trainer.keep_every else 0)
    return one, min(saves, kept + 1)


def disk(config: Config, folder: Path) -> Result:
    """Check the room for checkpoints and logs of the run in `folder`, which may not exist yet."""
    one, count = checkpoints_bytes(config)
    there = sum(file.stat().st_size for file in (folder / "checkpoints").rglob("*") if file.is_file())
    needed = max(0, one * count - there) + LOG_BYTES
    free = _free(folder)
    summary = (
        f"{format_bytes(free)} free, {format_bytes(needed)} needed ({count} x {format_bytes(one)} for checkpoints)"
    )
    if free >= needed:
        return Result(summary)
    return Result(
        summary,
        f"{folder} has {format_bytes(free)} free, {count} checkpoints of {format_bytes(one)} and logs need "
        f"{format_bytes(needed)}; make room, keep fewer (trainer.keep_last), or choose another trainer.run_dir.",
    )


def scratch() -> Result:
    """Check the room for compiled kernels and temporary files on this node's own disk."""
    folder = Path(tempfile.gettempdir())
    free = _free(folder)
    summary = f"{format_bytes(free)} free in {folder}"
    if free >= LOG_BYTES:
        return Result(summary)
    return Result(
        summary,
        f"{folder} has {format_bytes(free)} free, {format_bytes(LOG_BYTES)} are needed; clean it, or set TMPDIR.",
    )


def _free(folder: Path) -> int:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def files(config: Config) -> Result:
    """Check that this node sees the model and the prompts."""
    models = (
        ("actor_rollout_ref.model.path", config.actor_rollout_ref.model.path),
        ("reward.model.path", config.reward.model.path),
    )
    for key, model in models:
        if model and (fault := ModelFolder.of(model).fault()):
            return Result("missing", f"{key}: `{model}` {fault}")
    prompts = [*config.data.train_files, *config.data.val_files]
    if missing := [file for file in prompts if not Path(file).is_file()]:
        return Result(
            "missing", f"does not see {', '.join(missing)} (data.train_files, val_files); mount it, or copy it."
        )
    return Result(f"model and {len(prompts)} prompt files seen")


def runs_programs(config: Config) -> bool:
    """Return whether the rewards run programs of the model: for all prompts, or for some data
    sources."""
    if config.reward.function != BY_DATA_SOURCE:
        return config.reward.function == _PROGRAMS
    sources = {config.data.data_source}
    for file in (*config.data.train_files, *config.data.val_files):
        with suppress(UserError):
            # the run reports faults of its files, and a parquet file may have no sources
            sources |= {str(row.get("data_source")) for _, row in read_rows(Path(file), ("data_source",))}
    for source in sources:
        with suppress(UserError):  # unknown ones are not reported here either
            if function_name(BY_DATA_SOURCE, source) == _PROGRAMS:
                return True
    return False


def sandbox(config: Config) -> Result:
    """Check that the programs of a model, or agents, can be locked in."""
    is_of_agents = config.actor_rollout_ref.rollout.agent.sandbox
    try:
        if is_of_agents:
            check_sandbox()
        return Result(find_way().name)
    except UserError as error:
        allowed = config.reward.allow_unsandboxed and not is_of_agents
        return Result("none, as reward.allow_unsandboxed says", None if allowed else error.sentences[0])


def gateways(config: Config) -> Result:
    """Check that the agents' gateways can listen at their host, on their ports."""
    keys = config.actor_rollout_ref.rollout.agent
    if keys.port:
        return ports(keys.host, range(keys.port, keys.port + keys.num_gateways))
    fault = ports(keys.host, [0]).problem
    cure = f"cannot listen on {keys.host}; set {AGENT}.host to an address of this node, or 0.0.0.0."
    return Result("chosen at start", cure if fault else None)


# ------------------------------------------------------------------------------------ shared folder


class SharedFolder:
    """A folder that all nodes must see and write: node 0 writes a token, the others read it and add
    a file each."""

    def __init__(self, folder: Path, token: str) -> None:
        self.folder = folder.absolute()
        self._token = token
        self._is_new = not self.folder.exists()

    def write(self) -> str | None:
        """Do node 0's part, which comes first: write its file. Return the problem, or None."""
        return self._add(0)

    def check(self, index: int, first: str) -> Result:
        """Check that this node sees node 0's file, and that it can add its own.

        The check waits a while (`_SHARED_S` seconds) for node 0's file. `first` is the name of node
        0.
        """
        first_file = self._file(0)
        deadline = time.monotonic() + _SHARED_S
        while not self._is_token(first_file):
            if time.monotonic() > deadline:
                return Result(
                    "not shared",
                    f"does not see {first_file}, which {first} wrote {_SHARED_S:g} s ago; the run folder must be on "
                    "storage mounted at the same path on all nodes (and inside the container).",
                )
            time.sleep(0.1)
        problem = self._add(index)
        return Result(str(self.folder), problem)

    def clean(self) -> None:
        """Do node 0's part, which comes last: remove the files, and the folder if it is new and
        empty."""
        for file in self.folder.glob(f".preflight-{self._token}-*"):
            file.unlink(missing_ok=True)
        if self._is_new and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _file(self, index: int) -> Path:
        return self.folder / f".preflight-{self._token}-{index}"

    def _is_token(self, file: Path) -> bool:
        try:
            return file.read_text() == self._token
        except OSError:
            return False

    def _add(self, index: int) -> str | None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file(index).write_text(self._token)
        except OSError as error:
            return f"cannot write {self.folder} ({error.strerror}); give this user the right, or another folder."
        return None


# ------------------------------------------------------------------------------------ limits, ports


def _open_files_needed(config: Config) -> int:
    """Return the number of connections to servers (two files each in the controller, at its peak),
    and the libraries' own."""
    rollout = config.actor_rollout_ref.rollout
    num_servers = len(rollout.server_urls) or rollout.server.num_servers
    return 512 + 2 * rollout.max_concurrency * num_servers


def limits(config: Config, uses_gpus: bool) -> Result:
    needed = _open_files_needed(config)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    has_rdma = any(Path("/sys/class/infiniband").glob("*"))
    summary = f"{_limit(files)} open files ({needed} needed), {_limit(locked)} bytes of locked memory"
    if files != resource.RLIM_INFINITY and files < needed:
        return Result(summary, f"may open {files} files, the run needs {needed}; raise it with `ulimit -n {needed}`.")
    if uses_gpus and has_rdma and locked != resource.RLIM_INFINITY:
        return Result(
            summary,
            f"may lock {locked} bytes of memory, InfiniBand needs no limit; set `ulimit -l unlimited` (in Slurm: "
            "PropagateResourceLimitsExcept=MEMLOCK and LimitMEMLOCK=infinity of slurmd).",
        )
    return Result(summary)


def _limit(value: int) -> str:
    return "any number of" if value == resource.RLIM_INFINITY else str(value)


def ports(host: str, numbers: Sequence[int]) -> Result:
    """Check whether each port can be listened on at `host`."""
    for number in numbers:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            socket.create_server((host, number), family=family).close()
        except OSError as error:
            return Result(
                f"{number} is taken",
                f"port {number} of {host} cannot be used ({error.strerror}{_holder(number)}); end its user, or "
                "choose other ports.",
            )
    return Result(f"{_spans(numbers)} free" if numbers else "chosen at start")


def _spans(numbers: Sequence[int]) -> str:
    first = min(numbers)
    last = max(numbers)
    is_run = len(numbers) > 2 and sorted(numbers) == list(range(first, last + 1))
    return f"{first}-{last}" if is_run else ", ".join(map(str, numbers))


def _holder(port: int) -> str:
    """Return a port's listener, if the system shows it."""
    try:
        for connection in psutil.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f", held by {psutil.Process(connection.pid).name()}, process {connection.pid}"
    except psutil.Error:
        pass
    return ""


def all_ports(first: int | None, num_servers: int, others: Sequence[int]) -> Iterator[int]:
    """Yield the servers' ports, from the first on, and the others."""
    yield from range(first, first + num_servers) if first else ()
    yield from others
