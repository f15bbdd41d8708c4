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
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from megatron_dapo.agents.command_process import PORT, Ended, run_in_sandbox, run_to_end
from megatron_dapo.agents.endpoint import Endpoint
from megatron_dapo.agents.in_sandbox import MAX_RESULT_BYTES
from megatron_dapo.agents.interface import AgentTask, Outcome
from megatron_dapo.agents.outcomes import outcome_of
from megatron_dapo.common.bounded import parse_json, read_bytes
from megatron_dapo.common.errors import UserError
from megatron_dapo.rewards.worker_process import Message

_KEY = "actor_rollout_ref.rollout.agent.command"
_ANSWERS = ("ground_truth", "extra_info")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")  # there in every sandbox
_BESIDE_BIN = ("bin", "lib", "lib64", "libexec", "ssl")
_MAX_LINKS = 40
_TASK, _RESULT = "task.json", "result.json"


class CommandAgent:
    """The runner of `agent.command`: a process per trajectory."""

    def __init__(self, words: list[str], is_sandboxed: bool, pass_env: list[str], grace_s: float) -> None:
        """Take the keys; grace_s as in `run_to_end`. Nothing runs yet."""
        self._words = words
        self._is_sandboxed = is_sandboxed
        self._pass_env = pass_env
        self._grace_s = grace_s
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
        if not self._is_sandboxed:
            return
        if not _is_there(self._words[0]) and not _environment_of(self._words[0]):
            self._words[0] = os.path.realpath(self._words[0])
        self._words = [os.path.abspath(word) if os.path.isfile(word) else word for word in self._words]
        for path in (*_installation(self._words[0]), *filter(os.path.isfile, self._words)):
            if not _is_there(path, *self._paths):
                self._paths.append(path)
        ended = await run_in_sandbox(["test", "-x", self._words[0]], paths=self._paths)
        if ended.exit_code:
            raise UserError(f"{_KEY}: {program} cannot be run in the sandbox ({ended.output.strip()}).")

    async def run(self, task: AgentTask, endpoint: Endpoint) -> Message:
        """Run the command for a trajectory; return its output, with the outcome in its result file or
        an error. Raises OSError if no process can start."""
        return await (self._run_inside if self._is_sandboxed else self._run_outside)(task, endpoint)

    async def _run_outside(self, task: AgentTask, endpoint: Endpoint) -> Message:
        """Run with this user's rights, and files in a folder that is removed."""
        folder = tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True)
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        variables |= _variables(endpoint) | {"TMPDIR": folder.name}
        try:
            Path(folder.name, _TASK).write_text(_task_text(asdict(task), endpoint))
            ended = await run_to_end(self._filled(endpoint, folder.name), variables, self._grace_s)
            return _message(ended, partial(_content, Path(folder.name, _RESULT)), False)
        finally:
            with suppress(OSError, RecursionError):  # of very deep folders
                await asyncio.to_thread(folder.cleanup)

    async def _run_inside(self, task: AgentTask, endpoint: Endpoint) -> Message:
        """Run in a sandbox, where all is the model's: neither the answers nor the reward's key go in."""
        outside, inside = endpoint.base_url.partition("/t/")[0], f"http://127.0.0.1:{PORT}"
        urls = {name: getattr(endpoint, name).replace(outside, inside, 1) for name in ("base_url", "anthropic_url")}
        inner = replace(endpoint, **urls, reward_url="", reward_key="", socket="")
        shown = {name: value for name, value in asdict(task).items() if name not in _ANSWERS}
        ended = await run_in_sandbox(
            self._filled(inner, "/tmp"),
            files={_TASK: _task_text(shown, inner)},
            paths=self._paths,
            environment={name: os.environ[name] for name in self._pass_env} | _variables(inner),
            timeout_s=math.inf,
            socket=endpoint.socket,
        )
        return _message(ended, lambda: ended.result, True)

    def _filled(self, endpoint: Endpoint, folder: str) -> list[str]:
        texts = {
            "{base_url}": endpoint.base_url.replace(f"/t/{endpoint.key}", ""),
            "{model}": endpoint.name,
            "{task_file}": f"{folder}/{_TASK}",
            "{result_file}": f"{folder}/{_RESULT}",
        }
        return [re.sub("|".join(texts), lambda place: texts[place[0]], word) for word in self._words]


def _message(ended: Ended, content: Callable[[], bytes], is_sandboxed: bool) -> Message:
    """Return a command's outcome or error. content: reads its result file."""
    error, outcome = "", Outcome()
    try:
        if ended.exit_code:
            last_words = (ended.output.strip() or "it wrote nothing").splitlines()[-1]
            error = f"exit code {ended.exit_code}: {last_words[:200]}"
        elif text := content():
            outcome = outcome_of(parse_json(text))
    except (OSError, ValueError) as fault:
        error = f"its result file: {getattr(fault, 'strerror', fault)}"
    if is_sandboxed and outcome.reward is not None:
        error = (
            "a reward from within the sandbox, where the model's tools could have written it; give an answer for "
            "reward.function, or set rollout.agent.sandbox=false"
        )
    return {"output": ended.output, **({"error": f"crash: {error}"} if error else {"outcome": vars(outcome)})}


def _content(path: Path) -> bytes:
    """Return a result file, which nobody is left to change; nothing without it. Raises OSError."""
    if path.is_symlink():
        raise OSError(errno.EINVAL, "a symbolic link")
    return read_bytes(path, MAX_RESULT_BYTES) if path.exists() else b""


def _task_text(task: dict, endpoint: Endpoint) -> str:
    return json.dumps({**task, "model": endpoint.as_dict()}, default=str)


def _variables(endpoint: Endpoint) -> dict[str, str]:
    keys = {"OPENAI_API_KEY": endpoint.key, "ANTHROPIC_API_KEY": endpoint.key}
    return keys | {"OPENAI_BASE_URL": endpoint.base_url, "ANTHROPIC_BASE_URL": endpoint.anthropic_url}


def _is_there(path: str, *more: str) -> bool:
    """Return whether a sandbox shows a path, with further folders and files."""
    return any(Path(path).is_relative_to(folder) for folder in (*_SYSTEM, *more))


def _environment_of(program: str) -> Path | None:
    """Return the virtual environment of a program in its `bin`."""
    root = Path(program).parent.parent
    return root if (root / "pyvenv.cfg").is_file() else None


def _installation(path: str) -> Iterator[str]:
    """Yield the folders that belong to a program: beside its `bin`, and those of the interpreter that
    made its virtual environment, along symbolic links."""
    program = Path(path)
    if root := _environment_of(path):
        yield str(root)
        program = root / "bin" / "python"
    for _ in range(_MAX_LINKS):
        if program.parent.name == "bin":
            yield from (str(place) for name in _BESIDE_BIN if (place := program.parent.parent / name).is_dir())
        if not program.is_symlink():
            return
        program = Path(os.path.normpath(program.parent / os.readlink(program)))
