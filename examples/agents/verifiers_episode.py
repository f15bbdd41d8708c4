"""An episode of an environment of verifiers, as it is: verifiers relays each turn to the model.

    agent.command=[".../.cache/agents/verifiers/bin/python", ".../verifiers_episode.py", "{task_file}", "{result_file}"]
    reward.function=environment

Its interpreter is that of requirements/agents/verifiers.txt (`make setup-agents`), with the
environment's package. The row's extra_info has `env`, as verifiers' own configs have it, and `idx`,
the task in its taskset. These make rows:

    verifiers_episode.py --rows '{"taskset": {"id": "gsm8k-v1"}, "agent": {"runtime": {"type": "subprocess"}}}' 1000
"""

import asyncio
import itertools
import json
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.env import RunSlot
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

# verifiers prepares a harness' program with uv. Without uv it runs with this interpreter, which has the packages of the
# harnesses null and bash.
NO_UV = """#!/bin/sh
case "$*" in
    *--help*) echo "--script" ;;
    "python find"*) echo "$PROGRAM_PYTHON" ;;
esac
"""


def without_uv(folder: str) -> None:
    uv = Path(folder) / "uv"
    uv.write_text(NO_UV)
    uv.chmod(stat.S_IRWXU)
    os.environ |= {"PATH": f"{folder}:{os.environ['PATH']}", "PROGRAM_PYTHON": sys.executable}


async def episode(task: dict) -> dict:
    """Play the row's task once; its reward is the sum over the episode's agents."""
    extra = task["extra_info"]
    env = load_environment(resolve_env_config(extra["env"]))
    chosen = next(itertools.islice(iter(env.taskset), extra["idx"], None))
    client = EvalClientConfig(base_url=task["model"]["base_url"], api_key_var="OPENAI_API_KEY")
    context = ModelContext(
        client=client, model=task["model"]["name"], sampling=SamplingConfig(**extra.get("sampling", {}))
    )
    async with env.serving():
        played = await env.run_slot(RunSlot(chosen), context)
    errors = [error.message for source in (played, *played.traces) for error in source.errors]
    reward = float(sum(trace.reward for trace in played.traces))
    return {"reward": reward, "error": "; ".join(errors)[:500] or None}


def rows(fields: dict, number: int) -> None:
    env = load_environment(resolve_env_config(fields))
    for idx, task in enumerate(itertools.islice(iter(env.taskset), number)):
        extra = {"env": fields, "idx": idx}
        prompt = [{"role": "user", "content": task.data.prompt_text or str(task.data.name)}]
        print(json.dumps({"data_source": env.config.env_id, "prompt": prompt, "extra_info": extra}))


if __name__ == "__main__":
    if sys.argv[1] == "--rows":
        rows(json.loads(sys.argv[2]), int(sys.argv[3]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            if not shutil.which("uv"):
                without_uv(folder)
            result = asyncio.run(episode(json.loads(Path(sys.argv[1]).read_text())))
        Path(sys.argv[2]).write_text(json.dumps(result))
