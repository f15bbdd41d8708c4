"""Ends awaited work: at a deadline, or by an event."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from megatron_dapo.common.rollout_errors import Interrupted, RolloutError


async def until_set(event: asyncio.Event, work: Coroutine, message: str) -> None:
    """Await the work; once the event is set, cancel it and raise Interrupted(message)."""
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
    """Await the work and return its result.

    At the deadline cancel it and raise RolloutError(describe()). describe sees the state before
    the cancelling.
    """
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
