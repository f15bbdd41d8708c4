"""A real server with a stopped detokenizer: all its processes live, it claims to be ready,
and answers nothing."""

import asyncio
import signal
import time

import psutil
import pytest

from megatron_dapo.config.loader import load_config
from megatron_dapo.servers.client import SamplingParams, SGLangClient
from megatron_dapo.servers.server_error import ServerError
from megatron_dapo.servers.server_watch import report_unresponsive
from megatron_dapo.servers.supervisor import ServerSupervisor
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.storage.server_key import read_server_key
from tests.forked_servers import forked_servers
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.e2e


def test_it_is_started_again_and_the_request_that_it_had_is_free_to_be_repeated(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_HEALTH_CHECK_TIMEOUT", "3")
    model = make_tiny(tmp_path / "model", "qwen2")
    config = load_config(None, [f"actor_rollout_ref.model.path={model}", f"trainer.run_dir={tmp_path / 'run'}"])
    servers = ServerSupervisor(config, tmp_path)
    with forked_servers():
        servers.start()
        try:
            servers.wait_healthy()
            asyncio.run(stop_and_repeat(servers, RunFolder.of(config.trainer)))
        finally:
            servers.stop()


async def stop_and_repeat(servers: ServerSupervisor, run: RunFolder) -> None:
    (url,), (first,) = servers.urls, servers.pids()
    async with SGLangClient(url, api_key=read_server_key(servers.key_file)) as client:
        params = SamplingParams(max_new_tokens=16)
        assert (await client.generate([4, 5, 6], params, timeout_s=60)).tokens.size
        detokenizer = next(p for p in psutil.Process(first).children() if "detokenizer" in p.name())
        detokenizer.send_signal(signal.SIGSTOP)
        request = asyncio.create_task(client.generate([4, 5, 6], params, timeout_s=500))
        await client.check_health(10)
        report_unresponsive(run, {url: "a request timed out"})
        deadline = time.monotonic() + 400
        while not servers.check() or servers.pids() == [first]:
            assert time.monotonic() < deadline and not (request.done() and servers.pids() == [first])
            await asyncio.sleep(0.2)
        with pytest.raises(ServerError):
            await request
        assert not detokenizer.is_running() or detokenizer.status() == psutil.STATUS_ZOMBIE
        assert (await client.generate([4, 5, 6], params, timeout_s=60)).tokens.size
