"""A misfit is printed with advice that works: the plan accepts the advised values."""

import re
from pathlib import Path

import pytest

from launch.slurm.__main__ import main as slurm_main
from megatron_dapo.__main__ import main
from megatron_dapo.checks.run_checks import validate
from megatron_dapo.commands.plan import step_time
from megatron_dapo.commands.plan.fitting import (
    SERVER_TP,
    node_counts,
    server_keys,
    smallest_server,
    smallest_trainer,
)
from megatron_dapo.commands.plan.shortage import shortage
from megatron_dapo.common.sizes import GB
from megatron_dapo.config.derived import parallel_sizes
from megatron_dapo.config.keys import with_keys
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.recipes import recipe
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.memory import trainer_memory
from megatron_dapo.estimates.model_shapes import MODEL_SHAPES
from megatron_dapo.estimates.server_memory import server_memory
from megatron_dapo.estimates.server_weights import fills_blocks
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.spec_reader import model_spec
from tests.config_overrides import TP8_PP2

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
SERVER = "actor_rollout_ref.rollout.server"
KEY = re.compile(r"\b(?:trainer|actor_rollout_ref)[\w.]+=\w+")
SET = re.compile(r"(actor_rollout_ref\.rollout\.server\.\w+) to (\d+)")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(step_time, "SIMULATED_REQUESTS", 50)
    monkeypatch.setattr(step_time, "MEASURED_STEPS", 1)


def plan(capsys, *arguments: str) -> tuple[int, str]:
    code = main(["plan", "--staleness", "0", *arguments])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe_name", "model"),
    [
        ("dapo_qwen3_235b_a22b", "glm-4.5"),
        ("dapo_qwen3_235b_a22b", "glm-4.5-air"),
        ("dapo_32b", "deepseek-v3"),
        ("dapo_7b", "qwen2.5-72b"),
        ("dapo_7b", "gpt-oss-120b"),
        ("dapo_32b", "llama-3.1-70b"),
        ("dapo_qwen3_30b_a3b", "qwen3-235b-a22b"),
    ],
)
def test_the_advice_of_a_shortage_can_be_followed(recipe_name, model, capsys):
    """As a reader would: every KEY=VALUE and `set KEY to VALUE` is pasted."""
    arguments = ["--config", recipe(recipe_name), "--model", model]
    code, printed = plan(capsys, *arguments)
    for _ in range(2):  # a server's GPU may change the trainer's needs
        if code:
            arguments += [*KEY.findall(printed), *(f"{key}={value}" for key, value in SET.findall(printed))]
            code, printed = plan(capsys, *arguments)
    assert code == 0, printed


@pytest.mark.parametrize("model", sorted(MODEL_SHAPES))
def test_what_is_said_to_fit_passes_all_checks(model):
    spec = model_spec(MODEL_SHAPES[model])
    lengths = ["data.max_response_length=8192", "actor_rollout_ref.actor.max_tokens_per_microbatch=16384"]
    config = load_config(ROOT / "configs" / "dapo_32b.yaml", lengths)
    keys = smallest_trainer(config, spec, None, node_counts(1))
    assert keys is not None
    size = smallest_server(config, spec)
    assert size is not None
    keys |= server_keys(config, *size)
    overrides = [*lengths, *(f"{key}={'null' if value is None else value}" for key, value in keys.items())]
    chosen = load_config(ROOT / "configs" / "dapo_32b.yaml", overrides)
    validate(chosen, MODEL_SHAPES[model], check_files=False)
    assert shortage(chosen, spec) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["tensor_model_parallel_size=16", "num_servers=8"], "is 16, and each node has 1 server, but 8 GPUs"),
        (["tensor_model_parallel_size=8", "num_servers=16"], "is 8, and each node has 2 servers, but 8 GPUs"),
    ],
)
def test_a_server_beyond_a_node_is_refused_before_a_job_is_asked_for(overrides, words, capsys):
    arguments = ["--config", recipe("dapo_32b"), *(f"{SERVER}.{text}" for text in overrides)]
    # 64 heads, which 16 divides
    arguments.append("actor_rollout_ref.model.path=models/Qwen2.5-72B")
    code, printed = plan(capsys, *arguments)
    assert code == 2 and words in printed
    assert slurm_main(["plan", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert main(["train", "--dry-run", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_servers_of_one_process_each_may_share_a_cpu():
    config = load_config(None, ["trainer.n_procs_per_node=2", f"{SERVER}.nnodes=1", f"{SERVER}.num_servers=8"])
    assert shortage(config, model_spec(MODEL_SHAPES["qwen2.5-0.5b"])) == []


def rows_of(page: str, section: str) -> list[list[str]]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(f"\n## {section}\n")[2]
    lines = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


QUANTIZATION = "actor_rollout_ref.rollout.quantization"
FORMS = [(80, None), (141, None), (180, None), (80, "fp8"), (141, "fp8")]  # of 180 GB are Blackwells: no FP8
NODES = [{"trainer.gpu_memory_gb": size, QUANTIZATION: form} for size, form in FORMS]


def server_cell(config: Config, spec: ModelSpec) -> str:
    """Return the page's words for the smallest server: its size, its nodes, its samples of full length."""
    if config.actor_rollout_ref.rollout.quantization and not fills_blocks(config, spec, 1):
        return "-"
    size = smallest_server(config, spec)
    if size is None:
        return "no"
    server = server_memory(with_keys(config, {SERVER_TP: size[0]}), spec)
    return f"TP {size[0]}{f' on {size[1]}' if size[1] > 1 else ''}, {server.num_tokens // 22528}"


def test_the_page_says_which_models_fit_which_nodes():
    config = load_config(ROOT / "configs" / "dapo_32b.yaml", TP8_PP2)
    rows = rows_of("models.md", "Nodes that a model fits")
    families = {architecture for row in rows for architecture in MODEL_SHAPES[row[0]]["architectures"]}
    assert families == {architecture for shape in MODEL_SHAPES.values() for architecture in shape["architectures"]}
    for name, *cells in rows:
        spec = model_spec(MODEL_SHAPES[name])
        assert cells[:5] == [server_cell(with_keys(config, node), spec) for node in NODES], name
        keys = smallest_trainer(config, spec, None, node_counts(1))
        trainer = with_keys(config, keys)
        sizes = parallel_sizes(trainer)
        total = round(trainer_memory(trainer, spec).total / GB)
        assert [int(cell) for cell in cells[5:]] == [trainer.trainer.nnodes, sizes.tp, sizes.pp, sizes.ep, total], name


def test_the_page_of_servers_has_the_large_ones():
    config = with_keys(load_config(ROOT / "configs" / "dapo_32b.yaml"), {"trainer.gpu_memory_gb": 80})
    rows = rows_of("servers.md", "Which model fits which nodes")
    assert len(rows) > 5
    for name, *cells in rows:
        for form, (words, gigabytes) in zip((None, "fp8"), (cells[:2], cells[2:]), strict=True):
            formed, spec = with_keys(config, {QUANTIZATION: form}), model_spec(MODEL_SHAPES[name.lower()])
            size = smallest_server(formed, spec)
            if size is None:
                assert words == ("no" if fills_blocks(formed, spec, 1) else "-") and gigabytes == "-", name
                continue
            weights = server_memory(with_keys(formed, {SERVER_TP: size[0]}), spec).weights
            assert words == f"TP {size[0]}{f' over {size[1]} nodes' if size[1] > 1 else ''}", name
            assert gigabytes == f"{weights / GB:.0f}", name
