"""Real servers with FP8 weights: after each push they compute with the blocks of the trainer's
weights."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from launch.local import main
from megatron_dapo.servers.client import Generation, SamplingParams, SGLangClient
from megatron_dapo.servers.supervisor import ServerSupervisor
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.storage.server_key import read_server_key
from tests import fp8_oracle
from tests.distributed.test_parity import hugging_face_log_probs
from tests.distributed.weight_sync_world import Ranks
from tests.e2e.test_hybrid_run import AHEAD, NUM_STEPS, OVERRIDES
from tests.e2e.test_mixture_server import started_server, with_weights_of
from tests.e2e.weight_sync_trainer import rank_main
from tests.families import ROUNDINGS
from tests.forked_local import run_here
from tests.helpers import free_port
from tests.proofs import proof
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.e2e

PROMPTS = [[5, 6, 7, 9, number] for number in range(20, 32)]
NUM_TOKENS = 24  # of each response: some hundred in all, as ROUNDINGS needs; the likeliest, the same each time
FP8 = "actor_rollout_ref.rollout.quantization=fp8"
SERVER = "actor_rollout_ref.rollout.server"
INFINITE = 10**42  # a version whose weights overflow float32
PUSH: dict = dict(bucket_size_mb=1, timeout_s=60, verify=True, verify_num_tensors=10_000)
# whole blocks on each rank: heads of 64, or of 128 with two ranks
SHAPE = dict(vocab=65, layers=2, hidden=128, more=dict(head_dim=64, moe_intermediate_size=128))
NOT_IN_BLOCKS = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "in_proj_b.", "in_proj_a.", "in_proj_ba.", "conv1d")
NOT_IN_BLOCKS += ("A_log", "dt_bias", "shared_expert_gate", ".bias", "e_score_correction_bias")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("mixture") / "model", "qwen3_moe", **SHAPE)


@pytest.fixture(scope="module")
def servers(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerSupervisor]:
    with started_server(model_path, tmp_path_factory.mktemp("logs"), FP8, f"{SERVER}.num_servers=2") as supervisor:
        supervisor.wait_healthy()
        yield supervisor


def generate(server: ServerSupervisor, number: int = 0) -> list[Generation]:
    """A response to each of PROMPTS."""

    async def answers() -> list[Generation]:
        async with SGLangClient(server.urls[number], read_server_key(server.key_file)) as client:
            params = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0)
            return await asyncio.gather(*(client.generate(prompt, params, timeout_s=60) for prompt in PROMPTS))

    return asyncio.run(answers())


def served(path: Path, folder: Path) -> Path:
    """The checkpoint with the weights that blocks stand for."""
    folder.mkdir()
    for file in path.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if not any(word in name for word in NOT_IN_BLOCKS):
            matrices = tensor if tensor.dim() == 3 else tensor[None]
            through = [torch.from_numpy(fp8_oracle.through_blocks(matrix.numpy())) for matrix in matrices]
            tensors[name] = torch.stack(through).reshape(tensor.shape)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def check(answers: list[Generation], model_path: Path, version: int, folder: Path) -> None:
    """The log-probs are those of transformers with the weights of the blocks, not the others."""
    whole = with_weights_of(version, model_path, folder / "whole")
    blocks = served(whole, folder / "blocks")
    tokens = [[*prompt, *answer.tokens.tolist()] for prompt, answer in zip(PROMPTS, answers, strict=True)]

    def log_probs(path: Path, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.cat([each[len(PROMPTS[0]) - 1 :] for each in hugging_face_log_probs(path, tokens, dtype)])

    exact = log_probs(blocks)
    bound = ROUNDINGS * (log_probs(blocks, torch.float32).double() - exact).abs().max().item()
    got = torch.cat([torch.from_numpy(answer.log_probs) for answer in answers])
    difference = (got.double() - exact).abs().max().item()
    change = (log_probs(whole) - exact).abs().max().item()
    print(f"version {version}, {len(got)} tokens: {difference:.1e} of {bound:.1e}; blocks change {change:.1e}")
    assert len(got) >= 100
    assert difference < bound < change / 10
    assert {number for answer in answers for number in answer.weight_versions} == {version}


def test_servers_compute_with_the_blocks_of_each_push_also_one_that_died_in_a_push(model_path, servers, tmp_path):
    num_parameters = 2 * 9 + 3  # per layer: qkv, o, two norms of heads, two norms, router, two of all experts
    doomed = servers.pids()[1]
    deadly = {servers.urls[1]: (doomed, 4)}  # a push has two buckets, so in the second push
    sizes = {"tp": 2, "sp": True, "ep": 2}
    arguments = (free_port(), 2, sizes, str(model_path), servers.overrides(), deadly, PUSH, None, True)
    with Ranks(rank_main, 2, *arguments) as trainer:
        trainer.order("open")
        for version, confirming in ((50, 2), (150, 1), (250, 2)):
            if version == 250:  # its supervisor starts it again, with dummy weights
                assert not servers.check()
                servers.wait_healthy()
                assert servers.pids()[1] != doomed
            answers = trainer.order(version)
            assert [status for status, _ in answers] == ["ok", "ok"], answers
            report = answers[0][1]
            assert (report.num_servers, report.num_buckets) == (confirming, 2)
            assert report.num_verified == num_parameters
            for number in range(confirming):
                folder = tmp_path / f"{version}_{number}"
                folder.mkdir()
                check(generate(servers, number), model_path, version, folder)
        # the source rank goes on gathering with its peer, and both raise at once
        for error, seconds in trainer.order(INFINITE):
            assert "holds NaN or infinity" in error and seconds < PUSH["timeout_s"] / 4


FORMS: dict[str, tuple[str, Mapping[str, object], list[str]]] = {
    "tp2": ("qwen3_moe", {"more": dict(head_dim=128, moe_intermediate_size=256)}, []),
    "tp2_ep2": ("qwen3_moe", {"more": dict(head_dim=128, moe_intermediate_size=128)}, ["--ep-size", "2"]),
}


@proof
@pytest.mark.parametrize("form", FORMS)
def test_servers_of_two_ranks_cut_the_blocks_of_the_whole(form, tmp_path):
    family, shape, more = FORMS[form]
    model_path = make_tiny(tmp_path / "model", family, **(SHAPE | shape))
    rank_options = [f"{SERVER}.tensor_model_parallel_size=2", f"{SERVER}.extra_args={more}"]
    config = PUSH | {"verify": not more}  # SGLang's checksums are of all experts of a rank
    with started_server(model_path, tmp_path, FP8, *rank_options) as server:
        server.wait_healthy()
        arguments = (free_port(), 1, {}, str(model_path), server.overrides(), {}, config, None, True)
        with Ranks(rank_main, 1, *arguments) as trainer:
            trainer.order("open")
            for version in (50, 150):
                [(status, report)] = trainer.order(version)
                assert status == "ok", report
                folder = tmp_path / str(version)
                folder.mkdir()
                check(generate(server), model_path, version, folder)


FAMILIES: dict[str, Mapping[str, object]] = {
    "glm4_moe": dict(more=dict(head_dim=64, moe_intermediate_size=128, intermediate_size=256)),
    "deepseek_v3": dict(
        more=dict(moe_intermediate_size=128, q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=64,
                  qk_rope_head_dim=32, v_head_dim=64, intermediate_size=256),
    ),
    "qwen3_5_moe": dict(
        more=dict(head_dim=64, moe_intermediate_size=128, shared_expert_intermediate_size=128,
                  linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64),
    ),
}  # fmt: skip
FAMILIES["qwen3_next"] = FAMILIES["qwen3_5_moe"]


@proof
@pytest.mark.parametrize("family", FAMILIES)
def test_servers_of_every_mixture_compute_with_the_blocks_of_each_push(family, tmp_path):
    model_path = make_tiny(tmp_path / "model", family, **(SHAPE | FAMILIES[family]))
    with started_server(model_path, tmp_path, FP8) as server:
        server.wait_healthy()
        arguments = (free_port(), 1, {}, str(model_path), server.overrides(), {}, PUSH, None, True)
        with Ranks(rank_main, 1, *arguments) as trainer:
            trainer.order("open")
            for version in (50, 150):
                [(status, report)] = trainer.order(version)
                assert status == "ok", report
                folder = tmp_path / str(version)
                folder.mkdir()
                check(generate(server), model_path, version, folder)


@proof
def test_a_run_learns_with_fp8_servers_and_says_how_far_their_weights_are(tmp_path):
    """With the servers' experts, adapters, and a server ahead of the trainer."""
    make_tiny(tmp_path / "model", "qwen3_moe", **SHAPE)
    rows = [{"data_source": "made up", "prompt": f"{i}+{i}=", "reward_model": {"ground_truth": "0"}} for i in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = RunFolder(tmp_path / "run")
    paths = {"actor_rollout_ref.model.path": tmp_path / "model", "trainer.run_dir": run.path}
    paths |= {"data.train_files": f"[{tmp_path}/prompts.jsonl]"}
    keys = OVERRIDES | AHEAD | paths
    run_here(main, *[f"{key}={value}" for key, value in keys.items()], FP8)
    steps = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    assert all(step["actor/grad_norm"] > 0 and 0.02 < step["weight_sync/fp8_relative_error"] < 0.03 for step in steps)
