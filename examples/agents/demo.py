"""DAPO with an agent of OpenAI's Agents SDK on one CPU machine: a model learns to call a calculator.

python -m examples.agents.demo [key=value ...]        after `make setup-agents`
"""

import sys

from examples.agents.character_tools import model_with_tools
from examples.cache import ROOT
from examples.calculator.problems import write_files
from examples.demo_run import Demo
from megatron_dapo.common.errors import UserError

PYTHON = ROOT / ".cache" / "agents" / "openai_agents" / "bin" / "python"


def machine() -> list[str]:
    """Return the overrides with the paths of this machine. Raises UserError without the agent's packages."""
    if not PYTHON.is_file():
        raise UserError("The agent's packages are not installed: run `make setup-agents` once.")
    kwargs = "actor_rollout_ref.rollout.agent.kwargs"
    program = ROOT / "examples" / "agents" / "openai_agents_calculator.py"
    return [f"{kwargs}.python={PYTHON}", f"{kwargs}.program={program}"]


DEMO = Demo(
    title="DAPO through OpenAI's Agents SDK: a 0.6 M parameter Qwen2 over characters learns to call a calculator.",
    config="agent_calculator.yaml",
    files=write_files,
    model=model_with_tools,
    next_steps=(("let your own agent learn", "docs/agents.md"),),
    machine=machine,
)

if __name__ == "__main__":
    sys.exit(DEMO.run(sys.argv[1:]))
