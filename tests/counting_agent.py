"""An agent that any model can be: it asks twice in one conversation, and for every other trajectory
once in another; clients are openai's of the lock."""

import openai

from megatron_dapo.agents.interface import AgentTask, Outcome

TURN = 6  # tokens of an answer at most


async def play(task: AgentTask, model) -> Outcome:
    async with openai.AsyncOpenAI(base_url=model.base_url, api_key=model.key) as client:

        async def ask(messages) -> list:
            reply = await client.chat.completions.create(model=model.name, messages=messages, max_tokens=TURN)
            return [*messages, reply.choices[0].message]

        said = await ask(task.messages)
        await ask([*said, {"role": "user", "content": "+1="}])
        if task.number % 2:
            await ask([{"role": "user", "content": task.prompt.replace("=", "*")}])
    return Outcome(metrics={"conversations": 1 + task.number % 2})
