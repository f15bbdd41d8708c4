"""An agent of OpenAI's Agents SDK with a calculator as its tool.

It runs with the interpreter of requirements/agents/openai_agents.txt (`make setup-agents`): without
arguments for many trajectories at once (examples/agents/program.py), or as a rollout's command,

    openai_agents_calculator.py TASK_FILE RESULT_FILE
"""

import ast
import asyncio
import json
import operator
import sys

from agents import (
    Agent,
    AsyncOpenAI,
    MaxTurnsExceeded,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
MAX_TURNS = 3


def value(node: ast.AST) -> int:
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.BinOp(left, operation, right) if type(operation) in OPERATORS:
            return OPERATORS[type(operation)](value(left), value(right))
    raise ValueError("only integers, + - and * are understood")


@function_tool(name_override="A")  # a short name, for a model of characters
def calculator(expression: str) -> str:
    """Evaluate an expression of integers, + - and *."""
    try:
        return str(value(ast.parse(expression[:100].strip(), mode="eval").body))
    except (SyntaxError, ValueError) as error:
        return f"error: {error}"


async def play(client: AsyncOpenAI, task: dict, model: dict) -> dict:
    """Play one trajectory with the model at an address, by a key and a name; return its outcome."""
    own = client.with_options(base_url=model["base_url"], api_key=model["key"])
    agent = Agent("calculator", model=OpenAIChatCompletionsModel(model["name"], own), tools=[calculator])
    try:
        answer = str((await Runner.run(agent, task["messages"], max_turns=MAX_TURNS)).final_output)
    except MaxTurnsExceeded:
        answer = ""
    correct = answer.strip() == task["ground_truth"]
    return {"reward": float(correct), "correct": correct}


async def play_many() -> None:
    """Play the trajectories of stdin's lines, until it ends."""
    running: dict[int, asyncio.Task] = {}
    client = AsyncOpenAI(api_key="each trajectory has its own")

    async def answer(id: int, **fields) -> None:
        try:
            outcome = await play(client, **fields)
        except Exception as error:  # of the endpoint, at a limit
            outcome = {"reward": 0.0, "error": f"{type(error).__name__}: {error}"[:300]}
        finally:
            del running[id]
        print(json.dumps({"id": id} | outcome), flush=True)

    lines = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async for line in lines:
        fields = json.loads(line)
        if "cancel" not in fields:
            running[fields["id"]] = asyncio.create_task(answer(**fields))
        elif fields["cancel"] in running:
            running[fields["cancel"]].cancel()


def main(task_file: str, result_file: str) -> None:
    with open(task_file) as file:
        task = json.load(file)
    outcome = asyncio.run(play(AsyncOpenAI(), task, task["model"]))
    with open(result_file, "w") as file:
        json.dump(outcome, file)


if __name__ == "__main__":
    set_tracing_disabled(True)
    if sys.argv[1:]:
        main(*sys.argv[1:])
    else:
        asyncio.run(play_many())
