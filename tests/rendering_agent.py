"""An agent that asks openai's client of the lock for three turns, and notes each conversation."""

import json
import os
import uuid
from pathlib import Path
from typing import Any

import openai

from megatron_dapo.agents.interface import AgentTask, Outcome

NUM_TURNS = 3


async def play(task: AgentTask, model, folder: str) -> Outcome:
    messages: list[Any] = list(task.messages)
    asked: list[list] = []
    async with openai.AsyncOpenAI(base_url=model.base_url, api_key=model.key) as client:
        for turn in range(NUM_TURNS):
            reply = await client.chat.completions.create(model=model.name, messages=messages, max_tokens=8)
            asked.append(list(messages))
            said = reply.choices[0].message.model_dump(include={"role", "content"})
            messages += [said, {"role": "user", "content": f"{turn}+{turn}="}]
    record = {"prompt": task.prompt, "is_validation": task.is_validation, "asked": asked}
    path = Path(folder, f"{uuid.uuid4()}.json")
    path.with_suffix(".tmp").write_text(json.dumps(record))
    os.replace(path.with_suffix(".tmp"), path)
    return Outcome(reward=float(len(said["content"] or "") % 2))
