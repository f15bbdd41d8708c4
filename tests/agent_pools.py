"""What tests of agents need: a task, an endpoint, a pool, and a stand-in for a gateway."""

import asyncio
import os
from contextlib import asynccontextmanager

from aiohttp import web

from megatron_dapo.agents.agent_pool import AgentFailure, AgentPool
from megatron_dapo.agents.endpoint import Endpoint
from megatron_dapo.agents.interface import AgentTask
from megatron_dapo.config.schema.agent import AgentConfig

KEY, REWARD_KEY = "k" * 43, "r" * 43


def task(prompt="hello", **more):
    return AgentTask(prompt, [{"role": "user", "content": prompt}], "test", "42", {"answer": "42"}, **more)


def endpoint(root="http://127.0.0.1:9", socket="", key=KEY):
    return Endpoint(
        f"{root}/t/{key}/v1", f"{root}/t/{key}", key, "policy", f"{root}/t/{key}/reward", REWARD_KEY, socket
    )


@asynccontextmanager
async def running_pool(folder, **keys):
    pool = AgentPool(AgentConfig(enable=True, **keys), folder)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def in_pool(folder, use, **keys):
    """The result of `await use(pool)`."""

    async def main():
        async with running_pool(folder, **keys) as pool:
            return await asyncio.wait_for(use(pool), 60.0)

    return asyncio.run(main())


async def failure(pool, prompt="hello", timeout_s=60.0, to=None):
    """The reason for which the agent failed."""
    try:
        outcome = await pool.run(task(prompt), to or endpoint(), timeout_s)
    except AgentFailure as failed:
        return failed.reason
    raise AssertionError(f"the agent did not fail: {outcome}")


@asynccontextmanager
async def gateway(folder):
    """Yield the path of a Unix socket that answers with the length of a request's body, for KEY alone,
    and the list of the paths it was asked for."""
    paths = []

    async def answer(request):
        paths.append(request.path)
        body = await request.read()
        return web.json_response({"read": len(body)}, status=200 if f"/t/{KEY}/" in request.path else 401)

    application = web.Application(client_max_size=1 << 30)
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    place = folder / "private"
    place.mkdir(mode=0o700)
    path = str(place / "socket")
    await web.UnixSite(runner, path).start()
    os.chmod(path, 0o666)  # as the gateway does: the folder keeps others out
    try:
        yield path, paths
    finally:
        await runner.cleanup()
