"""A CodeAgent or a ToolCallingAgent of smolagents with a calculator.

smolagents_code.py TASK_FILE RESULT_FILE; the row's extra_info.mode chooses.
"""

import json
import sys

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool
from smolagents.utils import AgentError


@tool
def calculator(expression: str) -> str:
    """Evaluate an expression.

    Args:
        expression: of digits and + - *
    """
    return f"result of {expression}"


def main(task_file: str, result_file: str) -> None:
    with open(task_file) as file:
        task = json.load(file)
    turns = task["extra_info"].get("turns", 3)
    kind = ToolCallingAgent if task["extra_info"].get("mode") == "tools" else CodeAgent
    endpoint = task["model"]
    model = OpenAIModel(endpoint["name"], api_base=endpoint["base_url"], api_key=endpoint["key"], max_tokens=16)
    agent = kind([calculator], model, max_steps=turns, verbosity_level=0)
    if prompt := task["extra_info"].get("system"):
        agent.prompt_templates["system_prompt"] = prompt
    try:
        answer = str(agent.run(task["messages"][-1]["content"]))
    except AgentError as error:
        answer = str(error)
    with open(result_file, "w") as file:
        json.dump({"reward": float(answer == task["ground_truth"])}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
