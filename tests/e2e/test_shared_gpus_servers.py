"""Weight sync to real SGLang servers on the trainer's GPUs: put to sleep, woken, pushed to by
handles."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from megatron_dapo.config.loader import load_config
from megatron_dapo.servers.client import Generation, SamplingParams, SGLangClient
from megatron_dapo.servers.supervisor import ServerSupervisor
from megatron_dapo.storage.server_key import read_server_key
from tests.distributed.weight_sync_world import Ranks
from tests.e2e.weight_sync_trainer import changed, shared_rank_main
from tests.forked_local import forks
from tests.helpers import free_port
from tests.proofs import few
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.e2e

EVERYTHING = 10_000
LAYOUTS = few([{"tp": 2}, {"pp": 2, "vpp": 2}, {"pp": 2}, {"cp": 2}, {}], 2)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several buckets of 1 MB per stage, an odd vocabulary, padded by servers, and tensors that
    servers fuse."""
    return make_tiny(tmp_path_factory.mktemp("model"), "mistral", vocab=65, layers=8, hidden=128)


class Watched:
    """Running servers on shared GPUs, looked after by a thread, as by a launcher."""

    def __init__(self, supervisor: ServerSupervisor, overrides: list[str]) -> None:
        self.supervisor = supervisor
        self.overrides = [*overrides, *supervisor.overrides()]
        self.key = read_server_key(supervisor.key_file)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_after)
        self._lock = threading.Lock()
        self._thread.start()

    @property
    def urls(self) -> list[str]:
        return self.supervisor.urls

    def client(self, url: str) -> SGLangClient:
        return SGLangClient(url, self.key)

    def kill(self, number: int) -> None:
        """Kill a server with all its processes."""
        with self._lock:
            server = psutil.Process(self.supervisor.pids()[number])
        for process in [*server.children(recursive=True), server]:
            process.kill()

    def wait_healthy(self) -> None:
        while not self._check():
            self._over.wait(0.3)

    def _check(self) -> bool:
        with self._lock:
            return self.supervisor.check()

    def _look_after(self) -> None:
        while not self._over.wait(0.3):
            self._check()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self.supervisor.stop()


@contextmanager
def started(model_path: Path, folder: Path, num_servers: int, tp: int) -> Iterator[Watched]:
    rollout = "actor_rollout_ref.rollout.server"
    overrides = [
        f"actor_rollout_ref.model.path={model_path}",
        "actor_rollout_ref.hybrid_engine=true",
        "actor_rollout_ref.actor.megatron.dtype=float32",
        f"trainer.n_procs_per_node={num_servers * tp}",
        f"trainer.run_dir={folder}/run",
        f"{rollout}.num_servers={num_servers}",
        f"{rollout}.tensor_model_parallel_size={tp}",
        f"{rollout}.max_total_tokens=4096",
        "weight_sync.bucket_size_mb=1",
        "weight_sync.timeout_s=60.0",
        "weight_sync.verify=true",
        f"weight_sync.verify_num_tensors={EVERYTHING}",
    ]
    supervisor = ServerSupervisor(load_config(None, overrides), folder)
    with forks():
        supervisor.start()
        supervisor.wait_healthy()
        watched = Watched(supervisor, overrides)
        try:
            yield watched
        finally:
            watched.close()


TWO, ONE = pytest.param((2, 1), id="two of TP 1"), pytest.param((1, 2), id="one of TP 2")
with_two = pytest.mark.parametrize("servers", [TWO], indirect=True)
with_few = pytest.mark.parametrize("servers", few([TWO, ONE], 1), indirect=True)
with_both = pytest.mark.parametrize("servers", [TWO, ONE], indirect=True)


@pytest.fixture(scope="module")
def servers(request, model_path, tmp_path_factory) -> Iterator[Watched]:
    with started(model_path, tmp_path_factory.mktemp("servers"), *request.param) as watched:
        yield watched


async def read(client: SGLangClient, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    values = {}
    async with client:
        for name, tensor in tensors.items():
            fields = {"name": name, "truncate_size": len(tensor)}
            values[name] = torch.tensor(await client.post("/get_weights_by_name", fields))
    return values


async def generate(client: SGLangClient) -> Generation:
    async with client:
        return await client.generate([5, 6, 7], SamplingParams(max_new_tokens=8), timeout_s=60)


def trainer_of(
    servers: Watched, model_path: Path, sizes: dict[str, int], frozen: dict[str, int | None] | None = None
) -> Ranks:
    """Two ranks. frozen: of FreezingClient."""
    return Ranks(shared_rank_main, 2, free_port(), 2, sizes, str(model_path), servers.overrides, frozen or {})


@with_both
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_handles_bring_every_layouts_weights_bit_for_bit_to_servers_that_slept(model_path, servers, sizes):
    checkpoint = load_file(model_path / "model.safetensors")
    with trainer_of(servers, model_path, sizes) as trainer:
        assert [status for status, _ in trainer.order("open")] == ["ok", "ok"]
        for version in (1, 2):
            answers = trainer.order(version)
            assert [status for status, _ in answers] == ["ok", "ok"], answers
            report = answers[0][1]
            assert report.num_servers == len(servers.urls) and report.num_buckets > 1
            assert report.num_verified > 20, "each checksum of every server equals the trainer's"
            assert report.moved_bytes > 0
            for url in servers.urls:
                if servers.supervisor.urls != servers.urls[:1]:  # a server of TP 2 answers for its first rank
                    for name, tensor in asyncio.run(read(servers.client(url), checkpoint)).items():
                        assert torch.equal(tensor, changed(checkpoint[name], version)), f"{name} on {url}"
                assert set(asyncio.run(generate(servers.client(url))).weight_versions) == {version}


@with_two
def test_a_server_that_freezes_in_a_push_costs_the_others_nothing_but_time(model_path, servers):
    """All ranks go on together, bucket after bucket."""
    frozen, steady = servers.urls
    with trainer_of(servers, model_path, {"tp": 2}, {frozen: servers.supervisor.pids()[0]}) as trainer:
        trainer.order("open")
        answers = trainer.order(1)
        assert [status for status, _ in answers] == ["ok", "ok"], answers
        assert answers[0][1].num_servers == 1
        assert set(asyncio.run(generate(servers.client(steady))).weight_versions) == {1}
        servers.wait_healthy()  # killed and started again
        answers = trainer.order(2)
        assert answers[0][1].num_servers == 2, answers


@with_few
def test_a_server_killed_asleep_is_left_out_and_joins_the_push_after_its_restart(model_path, servers):
    survivors = len(servers.urls) - 1
    with trainer_of(servers, model_path, {"tp": 2}) as trainer:
        trainer.order("open")
        servers.kill(0)
        answers = trainer.order(1)
        assert [status for status, _ in answers] == ["ok", "ok"], answers
        assert answers[0][1].num_servers == survivors
        servers.wait_healthy()
        answers = trainer.order(2)
        assert [status for status, _ in answers] == ["ok", "ok"], answers
        assert answers[0][1].num_servers == len(servers.urls)
        for url in servers.urls:
            assert set(asyncio.run(generate(servers.client(url))).weight_versions) == {2}


@with_few
def test_a_bucket_that_was_not_sent_is_found_before_anybody_samples(model_path, servers):
    """The server confirms the version; the rest of its memory is what it woke with. The run is
    over, so this comes last."""
    with trainer_of(servers, model_path, {"tp": 2}, {servers.urls[0]: None}) as trainer:
        trainer.order("open")
        for status, _ in trainer.order(1):
            assert "version 1 differs from the trainer's weights" in status


@pytest.mark.parametrize("sizes", few([{"tp": 2, "sp": True, "ep": 2}, {"ep": 2}], 1), ids=str)
def test_handles_bring_a_mixtures_experts_from_all_ranks(mixture, sizes):
    path, servers = mixture
    with trainer_of(servers, path, sizes) as trainer:
        trainer.order("open")
        answers = trainer.order(1)
        assert [status for status, _ in answers] == ["ok", "ok"], answers
        assert answers[0][1].num_servers == 1 and answers[0][1].num_verified > 10
        assert set(asyncio.run(generate(servers.client(servers.urls[0]))).weight_versions) == {1}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Iterator[tuple[Path, Watched]]:
    """A mixture of experts, and its server of two ranks: each has 32 of an expert's 64 rows, since on
    CPUs SGLang pads what is no multiple of 32."""
    path = make_tiny(tmp_path_factory.mktemp("mixture"), "qwen3_moe", vocab=65, layers=2, hidden=128)
    with started(path, tmp_path_factory.mktemp("server"), 1, 2) as watched:
        yield path, watched
