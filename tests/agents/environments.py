"""Programs of other people, each with the interpreter of its environment in .cache/agents."""

import json
import os
import subprocess
from pathlib import Path

from tests.helpers import REPOSITORY

PROGRAMS = REPOSITORY / "tests" / "agents" / "programs"
EXAMPLES = REPOSITORY / "examples" / "agents"
PROGRAM_S = 120


def python_of(name: str) -> Path:
    """Return the interpreter of an environment; `make setup-agents` makes all of them."""
    python = REPOSITORY / ".cache" / "agents" / name / "bin" / "python"
    assert python.is_file(), f"no {python}: run `make setup-agents`"
    return python


def task_of(content: str, truth: str = "", **extra: object) -> dict:
    """Return a task as a command finds it in its file."""
    messages = [{"role": "user", "content": content}]
    return {"prompt": content, "messages": messages, "data_source": "", "ground_truth": truth, "extra_info": extra}


def run_program(name: str, program: Path, url: str, task: dict, folder: Path, may_fail: bool = False) -> dict:
    """Run a program as a rollout's command would be, with a scripted endpoint; return its result.

    may_fail: a bad end without a result gives {}.
    """
    task_file, result_file = folder / "task.json", folder / "result.json"
    model = {"name": "policy", "base_url": f"{url}/t/KEY/v1", "key": "KEY"}
    task_file.write_text(json.dumps(task | {"model": model}))
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "OPENAI_BASE_URL": f"{url}/t/KEY/v1",
        "OPENAI_API_KEY": "KEY",
        "ANTHROPIC_BASE_URL": f"{url}/t/KEY",
        "ANTHROPIC_API_KEY": "KEY",
        "PYTHONPATH": str(PROGRAMS),  # verifiers' tasksets
    }
    ended = subprocess.run(
        [python_of(name), program, task_file, result_file],
        env=environment,
        cwd=folder,
        timeout=PROGRAM_S,
        capture_output=True,
        text=True,
    )
    if ended.returncode and may_fail:
        return {}
    assert ended.returncode == 0, ended.stderr
    return json.loads(result_file.read_text())
