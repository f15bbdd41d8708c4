"""The key that servers demand: the maker and readers of its file,
and a server's words without it."""

import asyncio
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from launch.preflight import http
from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.servers.client import SGLangClient
from megatron_dapo.servers.keyed_sglang import KeyGuard
from megatron_dapo.servers.server_error import KeyRefused
from megatron_dapo.servers.server_list import ServerList
from megatron_dapo.servers.server_pool import ServerPool
from megatron_dapo.servers.supervisor import ServerSupervisor
from megatron_dapo.storage.server_key import (
    ServerKey,
    given_server_key,
    make_server_key,
    read_server_key,
    server_key_file,
)
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit

FILE = "actor_rollout_ref.rollout.server_api_key_file"


def config_of(folder, *overrides: str) -> Config:
    return load_config(None, [f"trainer.run_dir={folder}/run", *overrides])


def test_a_run_keeps_one_random_key_readable_only_for_its_owner(tmp_path):
    config = config_of(tmp_path)
    path = make_server_key(config)
    key = read_server_key(path)
    assert path == tmp_path / "run" / ".server_key" and path.stat().st_mode & 0o777 == 0o600 and len(key) >= 43
    assert make_server_key(config) == path and read_server_key(path) == key, "a run that goes on has the same"
    assert read_server_key(make_server_key(config_of(tmp_path / "other"))) != key
    assert [entry.name for entry in path.parent.iterdir()] == [".server_key"]


def test_of_many_that_make_the_key_at_once_all_read_the_same(tmp_path):
    config = config_of(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        keys = set(threads.map(lambda _: read_server_key(make_server_key(config)), range(32)))
    assert len(keys) == 1


def test_a_key_is_made_on_storage_without_links(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert read_server_key(make_server_key(config_of(tmp_path)))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o777])
def test_a_key_that_others_may_read_or_write_is_refused_in_one_sentence(tmp_path, mode):
    path = tmp_path / "key"
    path.write_text("secret\n")
    path.chmod(mode)
    with pytest.raises(UserError) as caught:
        load_and_validate(str(REPOSITORY / "configs" / "demo.yaml"), [f"{FILE}={path}"])
    [sentence] = [text for text in caught.value.sentences if FILE in text]
    assert f"{path}" in sentence and f"mode {mode:o}" in sentence and "chmod 600" in sentence
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "two words", "two\nlines", "Schl\u00fcssel"])
def test_a_file_without_a_key_is_refused(tmp_path, content):
    path = tmp_path / "key"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(UserError, match=FILE):
        read_server_key(path)


def test_servers_that_are_given_get_no_key_but_the_given_one(tmp_path):
    """That of the run is for the servers that it starts itself."""
    make_server_key(config_of(tmp_path))
    urls = "actor_rollout_ref.rollout.server_urls=[http://127.0.0.1:9]"
    assert given_server_key(config_of(tmp_path, urls)) is None
    (tmp_path / "theirs").write_text("their-key\n")
    (tmp_path / "theirs").chmod(0o600)
    config = config_of(tmp_path, urls, f"{FILE}={tmp_path}/theirs")
    assert given_server_key(config) == "their-key" and server_key_file(config) == tmp_path / "theirs"


# -------------------------------------------------------------------------------- the server's side


def guarded() -> TestClient:
    async def answer(_) -> PlainTextResponse:
        return PlainTextResponse("hello")

    async def talk(socket) -> None:
        await socket.accept()
        await socket.send_text("hello")
        await socket.close()

    routes = [
        *(Route(path, answer, methods=["GET", "POST"]) for path in ("/health", "/generate", "/pause_generation")),
        Mount("/metrics", Route("/", answer)),
        WebSocketRoute("/socket", talk),
    ]
    application = Starlette(routes=routes)
    application.add_middleware(KeyGuard, key="right")
    return TestClient(application)


@pytest.mark.parametrize("brought", [None, "", "right", "Bearer", "Bearer wrong", "Bearer righ"])
def test_every_route_refuses_who_does_not_bring_the_key(brought):
    """SGLang's own key leaves /health*, /ready*, /metrics* and OPTIONS open."""
    client, headers = guarded(), {} if brought is None else {"Authorization": brought}
    for method in ("GET", "POST", "OPTIONS", "DELETE"):
        for path in (
            "/health",
            "/health_generate",
            "/ready",
            "/metrics/",
            "/generate",
            "/pause_generation",
            "/nowhere",
        ):
            assert client.request(method, path, headers=headers).status_code == 401, (method, path)
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/socket", headers=headers):
        pass


def test_who_brings_the_key_is_let_in():
    client, headers = guarded(), {"Authorization": "Bearer right"}
    assert client.get("/health", headers=headers).text == client.get("/metrics/", headers=headers).text == "hello"
    with client.websocket_connect("/socket", headers=headers) as socket:
        assert socket.receive_text() == "hello"


def test_a_log_of_all_arguments_does_not_show_the_key():
    """Nor in the processes that get the arguments pickled, as a server's scheduler on a GPU."""
    for key in (ServerKey("secret"), pickle.loads(pickle.dumps(ServerKey("secret")))):
        assert "secret" not in f"{ {'api_key': key} }" and key == "secret" and f"Bearer {key}" == "Bearer secret"


# --------------------------------------------------------------------------------- those who ask it


class Server:
    """Demands a key, and counts who asks; or sends everybody elsewhere."""

    def __init__(self, key: str, elsewhere: str | None = None, open_route: str = "/ready") -> None:
        """open_route: asks for no key, as SGLang's own way to demand one leaves it."""
        self.key, self.elsewhere, self.open_route, self.seen = key, elsewhere, open_route, []

    async def __aenter__(self) -> str:
        from aiohttp import web

        async def answer(request: web.Request) -> web.Response:
            self.seen.append(request.headers.get("Authorization"))
            if self.elsewhere:
                return web.Response(status=307, headers={"Location": self.elsewhere + request.path})
            if self.seen[-1] != f"Bearer {self.key}" and request.path != self.open_route:
                return web.Response(status=401, text="Unauthorized")
            return web.json_response({"weight_version": "3"})

        application = web.Application()
        application.router.add_route("*", "/{route:.*}", answer)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


@pytest.mark.parametrize(
    ("key", "words"), [(None, "demands a key, and was sent none"), ("wrong", "refuses the key that it was sent")]
)
def test_a_run_with_a_wrong_key_ends_at_once_in_one_sentence_that_names_server_and_cure(key, words):
    async def start() -> None:
        server = Server("right")
        async with server as url:
            pool = ServerPool(
                ServerList([url]),
                max_concurrency=1,
                down_timeout_s=60.0,
                probe_interval_s=0.05,
                connect=lambda url: SGLangClient(url, key),
            )
            with pytest.raises(UserError) as caught:
                await asyncio.wait_for(pool.start(60.0), 30)
            await pool.close()
            assert len(server.seen) <= 4, "it is not asked again and again"
            [sentence] = caught.value.sentences
            assert f"server {url} {words}" in sentence and FILE in sentence and "wrong" not in sentence
            fault = await asyncio.to_thread(http.fault, f"{url}/model_info", None, key)
            assert FILE in fault and await asyncio.to_thread(http.fault, f"{url}/model_info", None, "right") is None

    asyncio.run(start())


def test_the_key_does_not_follow_a_redirection():
    async def ask() -> None:
        other = Server("right")
        async with other as elsewhere, Server("right", elsewhere) as url:
            async with SGLangClient(url, "right") as client:
                with pytest.raises(Exception, match="HTTP 307"):
                    await client.weight_version()
        assert not other.seen

    asyncio.run(ask())


def test_waiting_for_a_server_that_refuses_the_key_ends_at_once():
    async def ask() -> None:
        server = Server("right", open_route="")
        async with server as url, SGLangClient(url, "wrong") as client:
            with pytest.raises(KeyRefused, match=FILE):
                await client.wait_healthy(60.0)
        assert len(server.seen) == 1

    asyncio.run(ask())


def test_what_names_our_servers_to_a_trainer_is_the_file_not_the_key(tmp_path):
    config = config_of(tmp_path)
    servers = ServerSupervisor(config, tmp_path)
    try:
        named = load_config(None, servers.overrides())
        assert named.actor_rollout_ref.rollout.server_urls == servers.urls
        assert given_server_key(named) == read_server_key(server_key_file(config))
        assert given_server_key(named) not in " ".join(servers.overrides())
    finally:
        servers.stop()


def test_a_missing_key_file_is_a_mistake_of_that_key_when_a_config_is_checked(tmp_path):
    with pytest.raises(UserError) as error:
        load_and_validate(None, [f"{FILE}={tmp_path / 'none'}"])
    assert sum(str(tmp_path / "none") in text and FILE in text for text in error.value.sentences) == 1
