"""Agents that are commands: programs with their own interpreter.

A command gets its task as a JSON file, and the model by the variables that clients of OpenAI and
Anthropic read. Keys are there and in the file, never among its arguments: all users of a machine
can read those.
"""

import asyncio
import errno
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from megatron_dapo.agents.command_process import PORT, Ended, run_in_sandbox, run_to_end
from megatron_dapo.agents.endpoint import Endpoint
from megatron_dapo.agents.in_sandbox import MAX_RESULT_BYTES
from megatron_dapo.agents.interface import AgentTask, Outcome
from megatron_dapo.agents.outcomes import outcome_of
from megatron_dapo.common.bounded import parse_json, read_bytes
from megatron_dapo.common.errors import UserError

_KEY = "actor_rollout_ref.rollout.agent.command"
_ANSWERS = ("ground_truth", "extra_info")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")  # there in every sandbox
_BESIDE_BIN = ("bin", "lib", "lib64", "libexec", "share", "ssl")
_MAX_LINKS = 40


class CommandAgent:
    """The runner of `agent.command`: a process per trajectory."""

    def __init__(self, words: list[str], is_sandboxed: bool, pass_env: list[str], grace_s: float) -> None:
        """Take the keys; grace_s as in `run_to_end`. Nothing runs yet."""
        self._words = words
        self._is_sandboxed = is_sandboxed
        self._grace_s = grace_s
        self._environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._passed = {name: os.environ[name] for name in pass_env}
        self._paths: list[str] = []

    async def start(self) -> None:
        """Look for the program, and for a sandbox if it needs one. Raises UserError."""
        if any("{key}" in word for word in self._words):
            raise UserError(
                f"{_KEY} has {{key}}, but all users of this machine can read arguments; let the program take the key "
                f"from OPENAI_API_KEY or ANTHROPIC_API_KEY in its environment, or from {{task_file}}."
            )
        if (program := shutil.which(self._words[0])) is None:
            raise UserError(f"{_KEY}: {self._words[0]} is no program that can be run from here; correct it.")
        self._words = [os.path.abspath(program), *self._words[1:]]
        if self._is_sandboxed:
            self._words = [os.path.abspath(word) if os.path.isfile(word) else word for word in self._words]
            for path in (*_installation(Path(self._words[0])), *map(Path, filter(os.path.isfile, self._words))):
                if not any(path.is_relative_to(folder) for folder in (*_SYSTEM, *self._paths)):
                    self._paths.append(str(path))
            ended = await run_in_sandbox(["test", "-x", self._words[0]], paths=self._paths)
            if ended.exit_code:
                raise UserError(f"{_KEY}: {program} cannot be run in the sandbox ({ended.output.strip()}).")

    async def run(self, task: AgentTask, endpoint: Endpoint) -> tuple[Ended, Outcome]:
        """Run the command for a trajectory; return its end, and the outcome in its result file.

        Raises ValueError for a result file that holds none; OSError if no process can start.
        """
        if self._is_sandboxed:
            ended = await self._run_inside(task, endpoint)
        else:
            folder = tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True)
            try:
                ended = await self._run_in(Path(folder.name), task, endpoint)
            finally:
                with suppress(OSError, RecursionError):  # of very deep folders
                    await asyncio.to_thread(folder.cleanup)
        try:
            outcome = outcome_of(parse_json(ended.result)) if ended.result else Outcome()
        except ValueError as error:
            raise ValueError(f"its result file: {error}") from error
        if self._is_sandboxed and outcome.reward is not None:
            raise ValueError(
                "a reward from within the sandbox, where the model's tools could have written it; give an answer for "
                "reward.function, or set rollout.agent.sandbox=false"
            )
        return ended, outcome

    async def _run_in(self, folder: Path, task: AgentTask, endpoint: Endpoint) -> Ended:
        task_file, result_file = folder / "task.json", folder / "result.json"
        task_file.write_text(_task_text(asdict(task), endpoint))
        variables = self._environment | _variables(endpoint) | {"TMPDIR": str(folder)}
        ended = await run_to_end(self._filled(endpoint, str(task_file), str(result_file)), variables, self._grace_s)
        return replace(ended, result=b"" if ended.exit_code else _content(result_file))

    async def _run_inside(self, task: AgentTask, endpoint: Endpoint) -> Ended:
        """Run in a sandbox, where all is the model's: neither the answers nor the reward's key go in."""
        outside = endpoint.base_url.partition(f"/t/{endpoint.key}")[0]
        urls = {name: getattr(endpoint, name).removeprefix(outside) for name in ("base_url", "anthropic_url")}
        urls = {name: f"http://127.0.0.1:{PORT}{path}" for name, path in urls.items()}
        inner = replace(endpoint, **urls, reward_url="", reward_key="", socket="")
        shown = {name: value for name, value in asdict(task).items() if name not in _ANSWERS}
        return await run_in_sandbox(
            self._filled(inner, "/tmp/task.json", "/tmp/result.json"),
            files={"task.json": _task_text(shown, inner)},
            paths=self._paths,
            environment=self._passed | _variables(inner),
            timeout_s=math.inf,
            socket=endpoint.socket,
        )

    def _filled(self, endpoint: Endpoint, task_file: str, result_file: str) -> list[str]:
        words = self._words
        for name, text in (
            ("{base_url}", endpoint.base_url.replace(f"/t/{endpoint.key}", "")),
            ("{model}", endpoint.name),
            ("{task_file}", task_file),
            ("{result_file}", result_file),
        ):
            words = [word.replace(name, text) for word in words]
        return words


def _content(path: Path) -> bytes:
    """Return the content of a result file, which nobody is left to change; nothing without it."""
    try:
        if path.is_symlink():
            raise OSError(errno.EINVAL, "a symbolic link")
        return read_bytes(path, MAX_RESULT_BYTES) if path.exists() else b""
    except OSError as error:
        raise ValueError(f"its result file: {error.strerror}") from error


def _task_text(task: dict, endpoint: Endpoint) -> str:
    return json.dumps({**task, "model": endpoint.as_dict()}, default=str)


def _variables(endpoint: Endpoint) -> dict[str, str]:
    keys = {"OPENAI_API_KEY": endpoint.key, "ANTHROPIC_API_KEY": endpoint.key}
    return keys | {"OPENAI_BASE_URL": endpoint.base_url, "ANTHROPIC_BASE_URL": endpoint.anthropic_url}


def _installation(program: Path) -> Iterator[Path]:
    """Yield the folders that belong to a program: beside its `bin`, and those of the interpreter that
    made its virtual environment, along symbolic links."""
    root = program.parent.parent
    if (root / "pyvenv.cfg").is_file():
        yield root
        program = root / "bin" / "python"
    for _ in range(_MAX_LINKS):
        if program.parent.name == "bin":
            yield from filter(Path.is_dir, (program.parent.parent / name for name in _BESIDE_BIN))
        if not program.is_symlink():
            return
        program = Path(os.path.normpath(program.parent / os.readlink(program)))
