"""mini-swe-agent repairs a small repository; its module is the answer that a reward function tests.

    agent.command=[".../.cache/agents/mini_swe_agent/bin/python", ".../mini_swe_agent_repair.py", "{task_file}",
        "{result_file}"]  agent.sandbox=true  reward.function=code_tests

Its interpreter is that of requirements/agents/mini_swe_agent.txt (`make setup-agents`), its prompts
are those of examples/agents/repairs.py.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path

os.environ |= {
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_GLOBAL_CONFIG_DIR": tempfile.gettempdir(),  # a sandbox has no home
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # else it waits for minutes at a limit; openai's client tries again
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no look for one in the network
}

import litellm  # noqa: E402
import yaml  # noqa: E402
from minisweagent.agents.default import DefaultAgent  # noqa: E402
from minisweagent.config import builtin_config_dir  # noqa: E402
from minisweagent.environments.local import LocalEnvironment  # noqa: E402
from minisweagent.models.litellm_model import LitellmModel  # noqa: E402

litellm.suppress_debug_info = True
STEP_LIMIT = 12
COMMAND_S = 20
MAX_ANSWER_CHARS = 100_000
MODULE = "solution.py"


def unpack(message: str, folder: Path) -> str:
    """Write the message's files, return its issue."""
    issue, *parts = re.split(r"^=== (.+) ===\n", message, flags=re.MULTILINE)
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        (folder / Path(name).name).write_text(text)
    return issue.strip()


def repair(messages: list[dict], endpoint: dict, folder: Path) -> str:
    """Let the agent work in the folder; return how it ended."""
    issue = unpack(messages[-1]["content"], folder)
    settings = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
    templates = {key: settings["agent"][key] for key in ("system_template", "instance_template")}
    if messages[0]["role"] == "system":  # shorter than mini-swe-agent's own
        templates = {"system_template": messages[0]["content"], "instance_template": "{{task}}"}
    address = {"api_base": endpoint["base_url"], "api_key": endpoint["key"]}
    model = LitellmModel(model_name=f"openai/{endpoint['name']}", **settings["model"] | {"model_kwargs": address})
    environment = LocalEnvironment(cwd=str(folder), env=settings["environment"]["env"], timeout=COMMAND_S)
    agent = DefaultAgent(model, environment, step_limit=STEP_LIMIT, **templates)
    try:
        return agent.run(issue).get("exit_status", "")
    except Exception as error:  # the endpoint takes no further request
        return type(error).__name__


def main(task_file: str, result_file: str) -> None:
    task = json.loads(Path(task_file).read_text())
    with tempfile.TemporaryDirectory() as folder:
        status = repair(task["messages"], task["model"], Path(folder))
        module = Path(folder) / MODULE
        text = module.read_text(errors="replace")[:MAX_ANSWER_CHARS] if module.is_file() else ""
    result = {"answer": f"```python\n{text}\n```", "metrics": {"submitted": float(status == "Submitted")}}
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
