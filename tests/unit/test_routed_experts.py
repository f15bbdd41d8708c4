"""The servers' chosen experts: asked for, read, joined over turns,
kept in states and files, dropped."""

import asyncio
import base64
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from aiohttp import web

from megatron_dapo.checkpointing.state_file import from_bytes, to_bytes
from megatron_dapo.commands.plan.process_plan import process_plan
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.actor_rollout_ref import RolloutConfig
from megatron_dapo.data.batching import assemble
from megatron_dapo.data.flat_pickle import flat_pickle, from_flat_pickle
from megatron_dapo.data.routed_experts import RouterShape, as_text, from_text
from megatron_dapo.data.samples import Group, Prompt, RolloutBatch, drop_experts
from megatron_dapo.huggingface.experts import MoEConfig
from megatron_dapo.queue.plain_data import group_from_plain, group_to_plain
from megatron_dapo.rewards.reward_result import RewardResult
from megatron_dapo.rewards.shaping import unshaped
from megatron_dapo.rollout.batch_files import read_batch, write_batch
from megatron_dapo.rollout.sampling import Sampler, _to_sample
from megatron_dapo.rollout.trajectory import Budget, Trajectory, TrajectoryStart, single_turn
from megatron_dapo.servers.client import ExpertQuestion, Generation, SamplingParams
from megatron_dapo.servers.run_servers import _of_reward_model
from megatron_dapo.servers.server import Server
from megatron_dapo.servers.server_command import sglang_command
from megatron_dapo.servers.server_error import ServerError
from megatron_dapo.training.expert_cut import ExpertCut
from tests.synthetic import synthetic_groups, with_experts
from tests.tiny_models import make_tiny
from tests.unit.test_client import SAMPLING, answer, ask, json_answer
from tests.unit.test_trajectory import Turn, ids, play, says, tokenizer  # noqa: F401  a fixture

pytestmark = pytest.mark.unit

SHAPE = RouterShape(2, MoEConfig(num_experts=8, experts_per_token=2, norm_topk_prob=True))
WIDE = RouterShape(2, MoEConfig(num_experts=257, experts_per_token=2, norm_topk_prob=True))


def sent(rows) -> str:
    """As SGLang sends [rows, layers, experts per token]."""
    return base64.b64encode(np.asarray(rows, dtype="<i4").tobytes()).decode()


ROWS = np.arange(4 * 2 * 2).reshape(4, 2, 2) % 8


def test_what_a_server_sends_is_read_into_a_byte_per_expert():
    read = SHAPE.decode(sent(ROWS), 4)
    assert read.dtype == np.uint8 and read.tolist() == ROWS.flatten().tolist()
    assert SHAPE.rows(read, [1]).tolist() == ROWS[:, 1:].tolist()
    assert WIDE.decode(sent([[[256, 0], [1, 2]]]), 1).dtype == np.uint16
    behind_a_dense_layer = replace(SHAPE, moe=replace(SHAPE.moe, num_dense_layers=1))
    assert behind_a_dense_layer.decode(sent([[[0, 0], [1, 2]]]), 1).tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (sent(ROWS[:3]), "12 routed experts for 4 tokens, but the model has 4 per token"),
        (sent(np.where(ROWS == 3, 8, ROWS)), "the routed expert 8, but the model has 8 per layer"),
        (sent(np.where(ROWS == 3, -1, ROWS)), "the routed expert -1"),
        (sent(np.where(ROWS == 3, 2, ROWS)), "the routed expert 2 twice for a token in a layer"),
        ("AAA", "cannot be read"),
        ("AAAAAAA=", "cannot be read"),
        (3, "cannot be read"),
    ],
)
def test_experts_that_cannot_be_the_models_are_refused_by_what_is_wrong(text, words):
    with pytest.raises(ValueError, match=words):
        SHAPE.decode(text, 4)


def test_a_request_asks_for_experts_from_a_place_on_and_its_answer_has_them():
    seen = {}

    async def handler(request: web.Request) -> web.Response:
        seen.update(await request.json())
        return await json_answer(answer(tokens=(7, 8, 5), routed_experts=sent(ROWS[:3])))

    def asked(question: ExpertQuestion | None) -> Generation:
        return ask({"POST /generate": handler}, lambda client: client.generate([1, 2], SAMPLING, 5.0, experts=question))

    # 2 + 3 tokens, without the first and the last
    generation = asked(ExpertQuestion(SHAPE, start=1))
    assert (seen["return_routed_experts"], seen["routed_experts_start_len"]) == (True, 1)
    assert generation.routed_experts.tolist() == ROWS[:3].flatten().tolist()
    with pytest.raises(ServerError, match="12 routed experts for 4 tokens"):
        asked(ExpertQuestion(SHAPE))
    seen.clear()
    assert not len(asked(None).routed_experts) and "return_routed_experts" not in seen


def test_turns_are_joined_and_each_request_asks_for_what_is_not_known_yet(tokenizer):  # noqa: F811
    """The experts of an environment's tokens come with the turn that answers them."""
    turns = [(*ids(tokenizer, "The answer"), 2), (*ids(tokenizer, "is 5."), 2)]
    starts = []

    async def generate(tokens, params, budget):
        starts.append(budget.num_routed)
        written = turns[len(starts) - 1]
        # each token's row is its place
        known = np.arange(budget.num_routed, len(tokens) + len(written) - 1)
        experts = np.repeat(known, SHAPE.per_token).astype(np.uint8)
        return Generation(written, (-0.5,) * len(written), "stop", (7,) * len(written), routed_experts=experts)

    trajectory = play(tokenizer, Turn(says("5"), says("", done=True)), generate)
    num_prompt = len(trajectory.prompt_tokens)
    assert starts == [0, num_prompt + len(turns[0]) - 1]
    places = np.arange(num_prompt + len(trajectory.response_tokens) - 1)
    assert trajectory.routed_experts.tolist() == np.repeat(places, SHAPE.per_token).tolist()


def test_a_response_that_goes_on_after_a_stop_gets_the_experts_of_all_of_it():
    """Its request reads the earlier part again: only tokens are kept."""
    asked = []

    async def generate(tokens, params, budget):
        asked.append(budget.num_routed)
        rows = len(tokens) + 2 - 1
        return Generation((4, 5), (-0.5,) * 2, "stop", (7, 7), routed_experts=np.ones(rows * 4, np.uint8))

    begun = Trajectory((1, 2))
    begun.add_model_turn(Generation((3, 9), (-0.5,) * 2, "abort", (7, 7)))
    start = TrajectoryStart(Prompt(0, "", (1, 2), "", "", ""), SamplingParams(8), generate, begun=begun.partial())
    trajectory = asyncio.run(single_turn(start))
    assert asked == [0]
    assert trajectory.response_tokens.tolist() == [3, 4, 5] and len(trajectory.routed_experts) == 4 * 4


def group() -> Group:
    return with_experts(synthetic_groups(64, num_groups=1, n=2), SHAPE)[0]


def test_experts_survive_a_state_a_batch_file_and_the_way_to_the_trainer(tmp_path):
    for one in (group(), *with_experts(synthetic_groups(64, num_groups=1, n=2), WIDE)):
        assert len(one.samples[0].routed_experts) == (one.samples[0].num_tokens - 1) * 4
        assert group_from_plain(from_bytes(to_bytes(group_to_plain(one)))) == one
        write_batch(tmp_path, 1, RolloutBatch((one,), {}))
        assert read_batch(tmp_path, 1).groups == (one,)
        handed = from_flat_pickle(flat_pickle(assemble([one])))
        for sample, expected in zip(handed, one.samples, strict=True):
            assert sample.routed_experts.dtype == expected.routed_experts.dtype
            assert np.array_equal(sample.routed_experts, expected.routed_experts)


def test_an_array_of_no_bytes_in_a_batch_file_is_empty():
    assert len(from_text("uint8")) == 0


@pytest.mark.parametrize("text", ["float32 AAAA", "uint8 AAA"])
def test_a_damaged_array_in_a_batch_file_is_named(text):
    with pytest.raises(ValueError, match="routed experts"):
        from_text(text)
    assert from_text(as_text(np.array([3, 300], np.uint16))).tolist() == [3, 300]


def test_groups_lose_their_experts_and_all_memory_that_they_shared_with_them():
    groups = from_flat_pickle(flat_pickle([group()]))
    before = groups[0]
    drop_experts(groups)
    for sample, had in zip(groups[0].samples, before.samples, strict=True):
        assert sample == replace(had, routed_experts=()) and len(had.routed_experts)
        assert all(getattr(sample, name).base is None for name in sample.ARRAYS)
    kept = list(groups)
    drop_experts(groups)
    assert groups[0] is kept[0]


def test_a_finished_trajectory_is_a_sample_with_its_experts():
    trajectory = Trajectory((1, 2))
    trajectory.add_model_turn(Generation((3, 4), (-1.0, -1.0), "stop", (0, 0), routed_experts=ROWS[:3].flatten()))
    made = _to_sample("uid", 0, trajectory, RewardResult(1.0, True), unshaped)
    assert made.routed_experts.tolist() == ROWS[:3].flatten().tolist()


def test_experts_of_another_model_are_one_sentence_and_samples_without_are_counted(caplog):
    samples = assemble([group(), *synthetic_groups(64, num_groups=1, n=3)])
    ExpertCut(SHAPE, (0, 1), None, from_servers=True).check(7, samples)
    assert caplog.messages == [
        "Step 7: 3 of 5 responses have no routed experts: for their tokens the trainer's routers choose."
    ]
    with pytest.raises(UserError, match="has .* routed experts for .* tokens, but the model .* has 6 per token"):
        ExpertCut(replace(SHAPE, num_layers=3), (0, 1), None, from_servers=True).check(7, samples)


def test_servers_are_told_to_return_experts_where_the_trainer_replays_them_and_the_reward_model_never(tmp_path):
    model = make_tiny(tmp_path / "model", "qwen3_moe", layers=1)
    classifier = tmp_path / "classifier"
    classifier.mkdir()
    (classifier / "config.json").write_text('{"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}')
    (classifier / "tokenizer.json").write_text("{}")
    for mode, asked in (("off", False), ("old", False), ("rollout", True)):
        keys = [f"actor_rollout_ref.model.path={model}", f"actor_rollout_ref.actor.router_replay={mode}"]
        config = load_config(None, [*keys, f"reward.model.path={classifier}"])
        commands = [sglang_command(each, "h", 1, []).command for each in (config, _of_reward_model(config))]
        assert ["--enable-return-routed-experts" in command for command in commands] == [asked, False]
        lines = [line for line in process_plan(config).splitlines() if "routed experts: " in line]
        assert bool(lines) == asked
    # 1 layer x 2 experts of a byte
    lengths = config.data.max_prompt_length + config.data.max_response_length
    size = config.data.train_batch_size * config.actor_rollout_ref.rollout.n * lengths * 2 / 1e9
    assert "2 bytes per token" in lines[0] and f"{size:.3f} GB" in lines[0]


def sampled(experts: np.ndarray, reason: str = "stop") -> Generation:
    """A server's answer as taken by a sampler with need of experts."""

    class Client:
        url = "http://one:1"

        async def generate(self, tokens, params, timeout_s, request_id, salt, question):
            assert question == ExpertQuestion(SHAPE, 0)
            return Generation((1,), (0.0,), reason, (1,), servers=(self.url,), routed_experts=experts)

    @asynccontextmanager
    async def slot(avoid, prefer, is_first):
        yield Server(Client())

    pool = SimpleNamespace(version=1, slot=slot, cache_salt=None, is_aborting=True)
    sampler = Sampler(pool, None, None, RolloutConfig(request_timeout_s=60.0, max_retries=0), 64, routers=SHAPE)
    return asyncio.run(sampler._generate(Group("uid", None), (1,), SamplingParams(1), Budget()))


def test_a_server_without_the_option_is_named_with_the_cure():
    assert sampled(np.zeros(4, np.uint8)).routed_experts.tolist() == [0] * 4
    # of a response ended by a stop only tokens are kept
    assert sampled((), reason="abort").finish_reason == "abort"
    with pytest.raises(UserError, match="Server http://one:1 .* --enable-return-routed-experts, or set router_replay"):
        sampled(())
