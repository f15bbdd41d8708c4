"""SGLang plug-in: a server that is told to end does so at once; SGLang looks every five seconds whether it was told."""

import asyncio

TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager.sigterm_watchdog"
POLL_INTERVAL_S = 0.1


async def end_when_told(original, manager):
    """The original waits for the same flag, in longer steps, before it waits for the requests that still run."""
    while not manager.gracefully_exit:
        await asyncio.sleep(POLL_INTERVAL_S)
    await original(manager)


def register():
    """SGLang calls this once, before it makes its processes: as forks they inherit what is changed."""
    from replacing import run_inside

    run_inside(TARGET, end_when_told)
