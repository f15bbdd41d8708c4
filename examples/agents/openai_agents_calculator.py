"""An agent of OpenAI's Agents SDK with a calculator as its tool.

It runs with the interpreter of requirements/agents/openai_agents.txt, as a rollout's command:
openai_agents_calculator.py TASK_FILE RESULT_FILE. The model's address and key are in OPENAI_BASE_URL
and OPENAI_API_KEY.
"""

import ast
import json
import operator
import sys

from agents import Agent, AsyncOpenAI, MaxTurnsExceeded, ModelSettings, OpenAIChatCompletionsModel, Runner
from agents import function_tool, set_tracing_disabled

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
MAX_TURNS = 4


def value(node: ast.AST) -> int:
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.BinOp(left, operation, right) if type(operation) in OPERATORS:
            return OPERATORS[type(operation)](value(left), value(right))
    raise ValueError("only integers, + - and * are understood")


@function_tool
def calculator(expression: str) -> str:
    """Evaluate an expression of integers, + - and *."""
    try:
        return str(value(ast.parse(expression[:100].strip(), mode="eval").body))
    except (SyntaxError, ValueError) as error:
        return f"error: {error}"


def main(task_file: str, result_file: str) -> None:
    with open(task_file) as file:
        task = json.load(file)
    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel("policy", AsyncOpenAI())
    settings = ModelSettings(max_tokens=task["extra_info"].get("max_tokens"))
    agent = Agent("calculator", model=model, tools=[calculator], model_settings=settings)
    answer, turns = "", MAX_TURNS
    try:
        result = Runner.run_sync(agent, task["messages"], max_turns=MAX_TURNS)
        answer, turns = str(result.final_output), len(result.raw_responses)
    except MaxTurnsExceeded:
        pass
    correct = answer.strip() == task["ground_truth"]
    with open(result_file, "w") as file:
        json.dump({"reward": float(correct), "correct": correct, "metrics": {"turns": turns}}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
