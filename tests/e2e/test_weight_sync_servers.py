"""Weight sync from a real Megatron model in two pipeline stages to two real SGLang servers."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import cache, partial
from itertools import count, repeat
from pathlib import Path
from threading import Condition
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import requests
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_dapo.agents.interface import Outcome
from megatron_dapo.common.exit_codes import SAVED_EXIT_CODE
from megatron_dapo.common.files import write_whole
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.actor_rollout_ref import RolloutConfig
from megatron_dapo.config.schema.config import Config
from megatron_dapo.config.schema.run import DataConfig
from megatron_dapo.data.samples import Group, Prompt
from megatron_dapo.data.tokenizer import load_tokenizer
from megatron_dapo.rollout.agent_play import AgentPlay
from megatron_dapo.rollout.sampling import Sampler
from megatron_dapo.servers.client import FOREIGN_VERSION, Generation, SamplingParams, SGLangClient, generation_of
from megatron_dapo.servers.server_list import ServerList
from megatron_dapo.servers.server_pool import ServerPool
from megatron_dapo.servers.supervisor import ServerSupervisor
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.storage.server_key import key_header, read_server_key
from megatron_dapo.telemetry.closing_table import read_metrics
from tests.distributed.weight_sync_world import Ranks
from tests.e2e.conftest import converted
from tests.e2e.weight_sync_trainer import changed, rank_main
from tests.elastic import check_accounts, train
from tests.fake_rollout import until
from tests.families import ROUNDINGS
from tests.forked_local import forks
from tests.helpers import free_port
from tests.scripted_agents import agents_of
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.e2e

EVERYTHING = 10_000
PROMPT = [5, 6, 7]
LONG = 2000  # tokens: more than servers write during five pushes, also on a busy machine
NUM_AGENTS, TURN = 4, 80  # agents at once, and tokens of their turns
LAST_PUSH = 10  # versions pushed under agents, at most
OPENING = len(PROMPT) + 1  # tokens of an agent's prompt
STRIDE = 10  # tokens of every response between two pushes, at least
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 128}
BOUND = 1e-4  # between a server's log-prob, in float32, and that of its weights: of a dozen tokens


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2.3 MB per stage: several buckets of 1 MB. An odd vocabulary, padded by servers. A family
    with servers readable tensor by tensor, and with scaled rotary frequencies of the servers'
    own."""
    folder = tmp_path_factory.mktemp("model")
    return make_tiny(folder, "mistral", vocab=65, layers=8, hidden=128, rope=YARN_ROPE)


@pytest.fixture(scope="module")
def servers(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerSupervisor]:
    """Of the same model as hf_to_megatron writes it: they start without its weights."""
    folder, rollout = tmp_path_factory.mktemp("servers"), "actor_rollout_ref.rollout.server"
    made = converted(model_path, folder / "made")
    config: Config = load_config(
        None,
        [
            f"actor_rollout_ref.model.path={made}",
            f"trainer.run_dir={folder}/run",
            f"{rollout}.num_servers=2",
            f"{rollout}.max_total_tokens=8192",
        ],
    )
    supervisor = ServerSupervisor(config, folder)
    with forks():
        supervisor.start()
    try:
        supervisor.wait_healthy()
        yield supervisor
    finally:
        supervisor.stop()


async def read(client: SGLangClient, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    values = {}
    async with client:
        for name, tensor in tensors.items():
            fields = {"name": name, "truncate_size": len(tensor)}
            values[name] = torch.tensor(await client.post("/get_weights_by_name", fields))
    return values


async def generate(client: SGLangClient) -> Generation:
    async with client:
        return await client.generate(PROMPT, SamplingParams(max_new_tokens=12), timeout_s=60)


class LongResponse:
    """A response under way at a server, until a stop or LONG tokens."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url, self._key, self._id = url, key, uuid4().hex
        self._num_tokens, self._written = 0, Condition()
        self._failure: Exception | None = None

    def read(self) -> Generation:
        """Return it when it has ended."""
        try:
            return self._read()
        except Exception as error:
            with self._written:
                self._failure = error
                self._written.notify_all()
            raise

    def _read(self) -> Generation:
        sampling = {"max_new_tokens": LONG, "ignore_eos": True, "stream_interval": STRIDE}
        fields = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "stream": True}
        answer = {}
        with self._post("generate", fields | {"rid": self._id}) as response:
            for line in response.iter_lines():
                if line.startswith(b"data: {"):
                    answer = json.loads(line.removeprefix(b"data: "))
                    with self._written:
                        self._num_tokens = len(answer["output_ids"])
                        self._written.notify_all()
        return generation_of(answer)

    def stop(self) -> None:
        """Have the server end it here."""
        self._post("abort_request", {"rid": self._id}).close()

    def _post(self, route: str, fields: dict) -> requests.Response:
        session = requests.Session()
        session.trust_env = False  # no proxy stands between this machine and itself
        headers = key_header(self._key)
        response = session.post(f"{self._url}/{route}", json=fields, headers=headers, stream=True, timeout=300)
        response.raise_for_status()
        return response

    def wait(self) -> None:
        """Return when STRIDE more tokens are written."""
        with self._written:
            goal = self._num_tokens + STRIDE
            self._written.wait_for(lambda: self._failure or self._num_tokens >= goal, timeout=60)
            assert self._num_tokens >= goal, self._failure or f"{self._num_tokens} tokens in 60 s, not {goal}"


@torch.no_grad()
def log_probs(
    model_path: Path,
    version: int,
    response: np.ndarray,
    dtype: torch.dtype = torch.float64,
    prompt: Sequence[int] = PROMPT,
) -> torch.Tensor:
    """[tokens]: those of transformers, with the weights of a version."""
    model = deepcopy(loaded(model_path))
    for parameter in model.parameters():
        parameter.copy_(changed(parameter, version))
    tokens = torch.tensor([[*prompt, *response.tolist()]])
    logits = model.to(dtype)(tokens).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]


@cache
def loaded(model_path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_path).eval()


def push_in_flight(trainer: Ranks, responses: Sequence[LongResponse], versions: Iterable[int]) -> list[Generation]:
    """Push these versions while the responses are being written, each after some tokens of the one
    before it. Return the responses, ended some tokens later, all as long as the shortest."""
    with ThreadPoolExecutor(len(responses)) as threads:
        running = [threads.submit(response.read) for response in responses]
        for version in versions:
            for response in responses:
                response.wait()
            answers = trainer.order(version)
            assert [status for status, _ in answers] == ["ok", "ok"], answers
        for response in responses:
            response.wait()
        for response in responses:
            response.stop()
        return [response.result() for response in running]


def expected(
    model_path: Path,
    generation: Generation,
    offset: int = 0,
    dtype: torch.dtype = torch.float64,
    prompt: Sequence[int] = PROMPT,
) -> torch.Tensor:
    """[tokens]: log-probs by the weights of each token's version;
    with an offset, of an earlier one's."""
    labels = torch.tensor(generation.weight_versions)
    values = torch.full(labels.shape, torch.nan, dtype=dtype)
    for version in labels.unique().tolist():
        own = log_probs(model_path, version - offset, generation.tokens, dtype, prompt)
        values = torch.where(labels == version, own, values)
    return values


def gap(
    model_path: Path,
    generations: Sequence[Generation],
    offset: int = 0,
    prompts: Iterable[Sequence[int]] = repeat(PROMPT),
) -> torch.Tensor:
    """[tokens of all]: by how much the servers' log-probs differ from `expected`."""
    gaps = [
        torch.from_numpy(each.log_probs) - expected(model_path, each, offset, prompt=prompt)
        for each, prompt in zip(generations, prompts, strict=False)
    ]
    return torch.cat(gaps).abs()


def bound_of(
    model_path: Path, generations: Sequence[Generation], prompts: Iterable[Sequence[int]] = repeat(PROMPT)
) -> float:
    """How far a server may be from `expected`."""
    roundings = [
        expected(model_path, each, dtype=torch.float32, prompt=prompt) - expected(model_path, each, prompt=prompt)
        for each, prompt in zip(generations, prompts, strict=False)
    ]
    return ROUNDINGS * torch.cat(roundings).abs().max().item()


def test_pushes_arrive_bit_for_bit_also_on_the_server_that_outlives_one(model_path, servers):
    checkpoint = load_file(model_path / "model.safetensors")
    steady, doomed = servers.urls
    key = read_server_key(servers.key_file)
    client = partial(SGLangClient, api_key=key)
    config = dict(bucket_size_mb=1, timeout_s=40, verify=True, verify_num_tensors=EVERYTHING)
    # each stage sends three buckets per push: the second one of the eleventh push is fatal
    fatal = {doomed: (servers.pids()[1], 10 * 3 + 2)}
    arguments = (free_port(), 2, {"pp": 2}, str(model_path), servers.overrides(), fatal, config)
    with Ranks(rank_main, 2, *arguments) as trainer:
        trainer.order("open")
        for url in servers.urls:  # weights that nobody pushed: no sample of theirs counts
            assert set(asyncio.run(generate(client(url))).weight_versions) == {FOREIGN_VERSION}
        for version in range(1, 6):
            answers = trainer.order(version)
            assert [status for status, _ in answers] == ["ok", "ok"], answers
            report = answers[0][1]
            print({phase: f"{seconds:.3f} s" for phase, seconds in report.seconds.items()})
            assert report.num_buckets == 6 and report.rejoined == (version == 1)
            for url in servers.urls:
                for name, tensor in asyncio.run(read(client(url), checkpoint)).items():
                    assert torch.equal(tensor, changed(checkpoint[name], version)), f"{name} on {url}, push {version}"
                generation = asyncio.run(generate(client(url)))
                assert set(generation.weight_versions) == {version}
                exact = log_probs(model_path, version, generation.tokens)
                assert (torch.tensor(generation.log_probs) - exact).abs().max() < BOUND

        responses = [LongResponse(url, key) for url in [steady, doomed] * 2]
        check_retracted(model_path, push_in_flight(trainer, responses, range(6, 11)))

        answers = trainer.order(11)
        assert [status for status, _ in answers] == ["ok", "ok"], answers
        assert answers[0][1].num_servers == 1 and "recover" in answers[0][1].seconds
        for name, tensor in asyncio.run(read(client(steady), checkpoint)).items():
            assert torch.equal(tensor, changed(checkpoint[name], 11)), f"{name} on {steady}, push 11"
        assert set(asyncio.run(generate(client(steady))).weight_versions) == {11}

        assert [status for status, _ in trainer.order({"pause_mode": "in_place"})] == ["ok", "ok"]
        responses = [LongResponse(steady, key) for _ in range(2)]
        check_in_place(model_path, push_in_flight(trainer, responses, [12]))


def check_retracted(model_path: Path, generations: Sequence[Generation]) -> None:
    """Each token has the log-prob that the weights of its label give it, and no other version's."""
    for generation in generations:
        assert set(generation.weight_versions) == set(range(5, 11)), "five pushes in flight"
        assert generation.num_retractions == 5
    difference, bound = gap(model_path, generations), bound_of(model_path, generations)
    mislabelled = gap(model_path, generations, offset=1)
    print(f"retract: at most {difference.max():.1e} of {bound:.1e}, by the version before {mislabelled.max():.1e}")
    assert difference.max() < bound
    assert mislabelled.max() > 5 * bound, "a label that is wrong by one would be seen"


def check_in_place(model_path: Path, generations: Sequence[Generation]) -> None:
    """Tokens from before the push are exact; later ones use the earlier keys and values."""
    difference, bound = gap(model_path, generations), bound_of(model_path, generations)
    later = [torch.from_numpy(generation.weight_versions) == 12 for generation in generations]
    assert all(each.any() and not each.all() for each in later), "the push was in flight"
    after = torch.cat(later)
    print(f"in_place: before the push at most {difference[~after].max():.1e}, after {difference[after].max():.1e}")
    assert difference[~after].max() < bound < difference[after].max()


class NotingClient(SGLangClient):
    """Notes the text and the answer of each request."""

    def __init__(self, url: str, key: str | None, noted: list[tuple[list[int], Generation]]) -> None:
        super().__init__(url, key)
        self._noted = noted

    async def generate(self, prompt_tokens: Any, *arguments: Any, **options: Any) -> Generation:
        answer = await super().generate(prompt_tokens, *arguments, **options)
        self._noted.append((np.asarray(prompt_tokens).tolist(), answer))
        return answer


async def play_over_pushes(trainer: Ranks, model: Path, url: str, key: str) -> tuple[Group, list]:
    """Return a group of agents, drawn at version 1, and all texts and answers of the server.
    Weights are pushed until an answer has tokens of two versions; then each agent asks for two
    further turns behind its last one."""
    noted: list[tuple[list[int], Generation]] = []

    def has_spanned() -> bool:
        return any(len(set(answer.weight_versions)) > 1 for _, answer in noted)

    async def agent(task: Any, model: Any) -> Outcome:
        (first,) = (latest,) = await model.ask([*PROMPT, 10 + task.number], room=TURN)
        for number in count():
            if has_spanned():
                break
            (latest,) = await model.ask([10 + number % 50, 10 + number // 50], first.node, room=TURN)
        for suffix in ([8], [9]):
            await model.ask(suffix, latest.node, room=TURN)
        return Outcome(reward=1.0)

    async def wait(condition: Callable[[], bool]) -> None:
        await until(lambda: playing.done() or condition())

    pool = ServerPool(ServerList([url]), 64, 60.0, 1.0, connect=lambda url: NotingClient(url, key, noted))
    tokenizer = load_tokenizer(model)
    play = AgentPlay(agents_of(agent, max_turns=2000), pool, tokenizer, DataConfig()).play
    sampler = Sampler(pool, SimpleNamespace(scores_groups=False), tokenizer, RolloutConfig(), 65, play=play)
    group = Group("g", Prompt(0, "", tuple(PROMPT), "", "", ""), version=1)

    async def play_group() -> Group:
        await pool.start(60.0)
        await pool.expect(1)
        return await sampler.sample_group(group, NUM_AGENTS, SamplingParams(3 * TURN + 3))

    playing = asyncio.create_task(play_group())
    try:
        for version in range(2, LAST_PUSH + 1):
            # each has had a turn, and asks for another one
            await wait(lambda: len(noted) >= NUM_AGENTS and sum(pool.in_flight().values()) == NUM_AGENTS)
            num_before = len(noted)
            answers = await asyncio.to_thread(trainer.order, version)
            assert [status for status, _ in answers] == ["ok"], answers
            await pool.expect(version)
            await wait(lambda num=num_before: has_spanned() or len(noted) >= num + NUM_AGENTS)
            if has_spanned() or playing.done():
                return await playing, noted
        raise AssertionError("no push came within an answer")
    finally:
        playing.cancel()
        await asyncio.wait({playing})
        await pool.close()


def test_an_agents_turn_goes_on_over_a_push_and_each_token_is_of_the_weights_that_its_label_names(model_path, servers):
    """As with max_staleness above 0. Turns behind it are read whole by the new weights."""
    url, key = servers.urls[0], read_server_key(servers.key_file)
    listed = [*servers.overrides(), f"actor_rollout_ref.rollout.server_urls=[{url}]"]
    arguments = (free_port(), 1, {}, str(model_path), listed, {}, dict(bucket_size_mb=1, timeout_s=40))
    with Ranks(rank_main, 1, *arguments) as trainer:
        for order in ("open", 1):
            assert [status for status, _ in trainer.order(order)] == ["ok"]
        group, noted = asyncio.run(play_over_pushes(trainer, model_path, url, key))

    assert [sample.reward_error for sample in group.samples] == [None] * NUM_AGENTS
    prompts, answers = zip(*noted, strict=True)
    versions = [answer.weight_versions.tolist() for answer in answers]
    assert all(each == sorted(each) and set(each) <= {*range(group.version, LAST_PUSH + 1)} for each in versions)
    spanning = [answer for answer in answers if len(set(answer.weight_versions)) > 1]
    difference, bound = gap(model_path, answers, 0, prompts), bound_of(model_path, answers, prompts)
    mislabelled = gap(model_path, answers, 1, prompts)
    print(f"{len(spanning)} of {len(answers)} turns span pushes")
    print(f"agents: at most {difference.max():.1e} of {bound:.1e}, by the version before {mislabelled.max():.1e}")
    assert spanning and difference.max() < bound
    assert mislabelled.max() > 5 * bound, "a label that is wrong by one would be seen"

    rows = [branch for sample in group.samples for branch in sample.branches]
    assert sum(int(row.loss_mask.sum()) for row in rows) == sum(map(len, versions))
    for prompt, answer in noted:
        whole = [*prompt, *answer.tokens]
        with_it = [row for row in rows if [*row.prompt_tokens, *row.response_tokens][: len(whole)] == whole]
        own = slice(len(prompt) - OPENING, len(whole) - OPENING)
        assert np.array_equal(sum(row.loss_mask[own] for row in with_it), np.ones(len(answer.tokens)))
        for row in with_it:
            assert np.array_equal(row.rollout_log_probs[own], answer.log_probs)
            assert np.array_equal(row.weight_versions[own], answer.weight_versions)


class Growing:
    """The running servers, as a run has them: the first one, from `join` on both.
    Dead ones are restarted."""

    def __init__(self, servers: ServerSupervisor, file: Path) -> None:
        self._servers, self._file, self.urls = servers, file, servers.urls[:1]
        self.are_healthy = self.has_joined = False

    def start(self) -> None:
        """They run."""

    def check(self) -> bool:
        self.are_healthy = self._servers.check()
        return self.are_healthy

    def join(self) -> None:
        self.has_joined = True
        write_whole(self._file, "# both\n" + "".join(f"{url}\n" for url in self._servers.urls))

    def kill_first(self) -> None:
        os.kill(self._servers.pids()[0], signal.SIGKILL)

    def pids(self) -> list[int]:
        return self._servers.pids()

    def stop(self) -> None:
        """Others may use them."""


def test_a_run_takes_in_a_server_that_comes_later_and_outlives_the_one_it_began_with(model_path, servers, tmp_path):
    """The second server was killed above: it is restarted while the run begins
    with the first one."""
    rows = [{"prompt": f"{a}+{b}=", "label": "0", "data_source": "any"} for a in range(10) for b in range(10)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config(
        None,
        [
            f"actor_rollout_ref.model.path={model_path}",
            f"data.train_files=[{tmp_path}/prompts.jsonl]",
            "data.apply_chat_template=false",
            "data.train_batch_size=4",
            "data.max_prompt_length=8",
            "data.max_response_length=16",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            f"actor_rollout_ref.rollout.server_api_key_file={servers.key_file}",
            "actor_rollout_ref.rollout.step_timeout_s=200.0",
            "actor_rollout_ref.rollout.request_timeout_s=100.0",
            "reward.function=tests.scripted_reward:even_length",
            "reward.num_workers=1",
            "weight_sync.timeout_s=60.0",
            "weight_sync.verify=true",
            "trainer.total_training_steps=1000",
            "trainer.dump_batches=true",
            "trainer.logger=[jsonl]",
            f"trainer.run_dir={tmp_path}/run",
        ],
    )
    run = RunFolder.of(config.trainer)
    world = Growing(servers, run.path / "servers.txt")
    killed_after: list[int] = []

    def look(num_steps: int) -> None:
        if num_steps >= 2 and world.are_healthy and not world.has_joined:
            world.join()
        if not killed_after and num_steps and read_metrics(run.metrics)[-1]["weight_sync/num_servers"] == 2:
            killed_after.append(num_steps)
            world.kill_first()
        if killed_after and num_steps >= killed_after[0] + 4:
            run.stop.touch()

    with forks():
        assert train(config, world, look) == SAVED_EXIT_CODE, run.log("trainer-rank-0").read_text()[-3000:]
    steps = read_metrics(run.metrics)
    assert check_accounts(config, len(steps)).num_trained == 4 * len(steps)
    assert [step["rollout/num_servers"] for step in steps[:2]] == [1, 1] and steps[-1]["rollout/num_servers"] == 2
    assert sum(step["weight_sync/num_rejoins"] for step in steps) >= 1
    # both fp32: with weights one step old, or others than the trainer's, it would be 0.1 or more
    compared = [step["actor/rollout_abs_diff_max"] for step in steps if "actor/rollout_abs_diff_max" in step]
    assert compared and max(compared) < 1e-3
