"""Ends of awaited work: a deadline, and an event that asks it to stop."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from megatron_dapo.common.rollout_errors import Interrupted, RolloutError


async def unless(event: asyncio.Event, work: Coroutine, message: str) -> None:
    """Do the work; raise Interrupted(message) as soon as the event is set, where the work is not done by then."""
    doing = asyncio.create_task(work)
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({doing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise Interrupted(message)
        doing.result()
    finally:
        doing.cancel()
        waiting.cancel()
        await asyncio.wait({doing, waiting})


async def within(timeout_s: float, work: Coroutine, describe: Callable[[], str]) -> Any:
    """Return what work returns; raise RolloutError(describe()) if it takes longer. describe sees the state at the
    deadline."""
    task = asyncio.create_task(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if done:
            return task.result()
        message = describe()
    finally:
        task.cancel()
        await asyncio.wait({task})
    raise RolloutError(message)
