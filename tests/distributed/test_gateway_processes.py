"""Gateways as processes: their start, their end, and that of their parent."""

import asyncio
import resource
import signal
import socket
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from megatron_dapo.agents.gateways import GatewayLost, Gateways, GatewaySettings
from megatron_dapo.common.errors import UserError
from tests.agent_gateway import LIMITS, NAME, TEMPLATE, ScriptedModel, bench, make_folder, plain_http
from tests.helpers import free_port

pytestmark = pytest.mark.distributed
ASK = {"model": NAME, "messages": [{"role": "user", "content": "ask"}]}


def processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "gateway_process" in " ".join(child.cmdline())]


async def ask(session: Any) -> int:
    async with plain_http() as http:
        return (await http.post(f"{session.endpoint.base_url}/chat/completions", json=ASK)).status_code


def test_a_killed_gateway_costs_its_sessions_and_comes_back_at_its_port(tmp_path: Path) -> None:
    with bench(tmp_path / "m", port=free_port()) as gateway:

        async def lose() -> str:
            model = ScriptedModel(gateway.folder, gate=asyncio.Event())
            with pytest.raises(GatewayLost):
                async with gateway.gateways.session(LIMITS, model.answer, model.parse) as session:
                    asking = asyncio.ensure_future(ask(session))
                    while not model.turns:
                        await asyncio.sleep(0)
                    (process,) = processes()
                    assert session.endpoint.key not in " ".join(process.cmdline())
                    process.kill()
                    await session.lost.wait()
                    await model.cancelled.wait()
                    with pytest.raises(httpx.TransportError):
                        await asking
                    with pytest.raises(GatewayLost):
                        await session.close_requests()
            return session.endpoint.base_url.partition("/t/")[0]

        lost_url = gateway.runner.run(lose())

        async def agent(session, model):
            assert session.endpoint.base_url.startswith(f"{lost_url}/t/")
            assert await ask(session) == 200

        gateway.play(agent)
    assert processes() == []


def test_closed_gateways_start_no_process(tmp_path: Path) -> None:
    async def agent(session, model):
        raise AssertionError("a session of closed gateways")

    with bench(tmp_path / "m") as gateway:
        gateway.runner.run(gateway.gateways.close())
        with pytest.raises(GatewayLost, match="are closed"):
            gateway.play(agent)
    assert processes() == []


def test_a_gateway_that_hangs_is_killed(tmp_path: Path) -> None:
    with bench(tmp_path / "m", answer_timeout_s=0.5) as gateway:

        async def hang() -> None:
            model = ScriptedModel(gateway.folder)
            with pytest.raises(GatewayLost, match="did not answer 'end' in time"):
                async with gateway.gateways.session(LIMITS, model.answer, model.parse):
                    processes()[0].send_signal(signal.SIGSTOP)

        gateway.runner.run(hang())

        async def agent(session, model):
            assert await ask(session) == 200

        gateway.play(agent)


def test_keys_are_spread_over_gateways_and_reached_by_sockets_of_this_user(tmp_path: Path) -> None:
    with bench(tmp_path / "m", num_gateways=2) as gateway:

        async def opened() -> Path:
            model = ScriptedModel(gateway.folder)
            urls, sockets = set(), set()
            while len(urls) < 2:
                async with gateway.gateways.session(LIMITS, model.answer, model.parse) as session:
                    path = Path(session.endpoint.socket)
                    urls.add(session.endpoint.base_url.partition("/t/")[0])
                    sockets.add(path)
                    async with plain_http(transport=httpx.AsyncHTTPTransport(uds=str(path))) as http:
                        url = f"http://any/t/{session.endpoint.key}/v1/chat/completions"
                        assert (await http.post(url, json=ASK)).status_code == 200
                assert session.notes.delivered
            assert len(sockets) == 2
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            return path.parent

        folder = gateway.runner.run(opened())
    assert not folder.exists()


@pytest.mark.parametrize(
    ("settings", "template", "words"),
    [
        ({"port": None}, TEMPLATE, "port"),
        ({"host": "host.invalid"}, TEMPLATE, "host"),
        ({}, "{% for message in messages[-1:] %}{{ message.content }}{% endfor %}", "template"),
        ({"tool_parser": "no.such:parser"}, TEMPLATE, "tool_parser"),
        ({"model": "nowhere"}, TEMPLATE, "actor_rollout_ref.model.path"),
    ],
)
def test_a_mistake_is_one_sentence_at_the_start(tmp_path: Path, settings: dict, template: str, words: str) -> None:
    folder = make_folder(tmp_path / "m", template)

    async def start() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            every_setting = {"model": str(folder), "model_name": NAME} | settings
            if "port" in every_setting:
                every_setting["port"] = taken.getsockname()[1]
            gateways = Gateways(GatewaySettings(**every_setting), 1)
            with pytest.raises(UserError, match=words) as mistake:
                await gateways.start()
            assert len(mistake.value.sentences) == 1
            await gateways.close()

    asyncio.run(start())
    assert processes() == []


PARENT = """
import asyncio, sys
from megatron_dapo.agents.gateways import Gateways, GatewaySettings
from megatron_dapo.agents.turns import Limits

async def main():
    gateways = Gateways(GatewaySettings(model=sys.argv[1], model_name="policy"), 1)
    await gateways.start()
    limits = Limits(100, 100, 1, 1, None, 1)
    async with gateways.session(limits, None, None) as session:
        print(session.endpoint.socket, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_gateway_ends_with_its_parent_also_while_it_is_stopped(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(make_folder(tmp_path / "m"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline().endswith("gateway0\n")
        (child,) = psutil.Process(parent.pid).children()
        child.suspend()
        parent.kill()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_connections_beyond_the_limit_of_open_files_are_closed_at_once(tmp_path: Path) -> None:
    async def flood(path: str) -> None:
        async def is_held() -> bool:
            reader, writer = await asyncio.open_unix_connection(path)
            held.append(writer)
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            try:
                return (await reader.readline()).startswith(b"HTTP/1.1 401")
            except ConnectionError:
                return False

        held: list[asyncio.StreamWriter] = []
        answers = [await is_held() for _ in range(80)]
        assert answers == [True] * 64 + [False] * 16
        for writer in held:
            writer.close()
        while not await is_held():  # until the gateway has seen their ends
            pass
        held[-1].close()

    command = [sys.executable, "-c", PARENT, str(make_folder(tmp_path / "m"))]
    few = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (128, 128))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=few) as parent:
        assert parent.stdout is not None
        try:
            asyncio.run(asyncio.wait_for(flood(parent.stdout.readline().strip()), 20))
        finally:
            parent.kill()
