"""An agent for tests of the load: it says a word after each answer, without a client library."""

import asyncio

import aiohttp

from megatron_dapo.agents.interface import AgentTask, Outcome

_session: aiohttp.ClientSession | None = None


async def play(task: AgentTask, model, turns: int, pause_s: float) -> Outcome:
    """Ask for so many answers in one conversation, with pauses for its tools."""
    global _session
    if _session is None:
        no_limit = aiohttp.ClientTimeout(total=None)
        _session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=no_limit)
    messages = list(task.messages)
    for turn in range(turns):
        body = {"model": model.name, "messages": messages}
        async with _session.post(f"{model.base_url}/chat/completions", json=body) as response:
            answer = await response.json()
            if response.status != 200:
                return Outcome(reward=0.0, error=str(answer))
        words = answer["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": words}, {"role": "user", "content": f"p{turn} p{task.number}"}]
        await asyncio.sleep(pause_s)
    return Outcome(reward=float(task.number % 2), metrics={"turns_asked": turns})
