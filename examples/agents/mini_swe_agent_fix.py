"""mini-swe-agent repairs a small repository; the row's hidden test decides.

It runs with the interpreter of requirements/agents/mini_swe_agent.txt, as a rollout's command in a
sandbox: mini_swe_agent_fix.py TASK_FILE RESULT_FILE. The row's extra_info has `files` (texts by
path), ground_truth is the text of a test that passes in a repaired repository.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

import yaml  # noqa: E402
from minisweagent.agents.default import DefaultAgent  # noqa: E402
from minisweagent.config import builtin_config_dir  # noqa: E402
from minisweagent.environments.local import LocalEnvironment  # noqa: E402
from minisweagent.models.litellm_model import LitellmModel  # noqa: E402

STEP_LIMIT = 12
COMMAND_S = 20
TEST_S = 30


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def passes(folder: Path, test: str) -> bool:
    """Return whether the hidden test ends well in the repository."""
    (folder / "hidden_test.py").write_text(test)
    try:
        return subprocess.run([sys.executable, "hidden_test.py"], cwd=folder, timeout=TEST_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def main(task_file: str, result_file: str) -> None:
    task = json.loads(Path(task_file).read_text())
    settings = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
    templates = {key: settings["agent"][key] for key in ("system_template", "instance_template")}
    words = task["extra_info"].get("templates", {})  # shorter ones, for small models
    kwargs = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"], "drop_params": True}
    model = LitellmModel(model_name="openai/policy", **settings["model"] | {"model_kwargs": kwargs})
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), task["extra_info"]["files"])
        environment = LocalEnvironment(cwd=folder, env=settings["environment"]["env"], timeout=COMMAND_S)
        agent = DefaultAgent(model, environment, step_limit=STEP_LIMIT, **templates | words)
        status = "limit"
        try:
            status = agent.run(task["messages"][-1]["content"]).get("exit_status", "")
        except Exception as error:  # the endpoint refuses further turns
            status = type(error).__name__
        correct = passes(Path(folder), task["ground_truth"])
    result = {"reward": float(correct), "correct": correct, "metrics": {"submitted": float(status == "Submitted")}}
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
