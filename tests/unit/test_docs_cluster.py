"""docs/cluster.md is true: its log lines are the program's, and so are exit codes,
settings, sizes."""

import re
import shlex
from pathlib import Path

import pytest

from launch.slurm import outcome
from megatron_dapo.checks.run_checks import validate
from megatron_dapo.commands.plan.cost import JobLimit
from megatron_dapo.commands.plan.plan_text import time_plan
from megatron_dapo.commands.plan.process_plan import memory_lines
from megatron_dapo.commands.plan.shortage import shortage
from megatron_dapo.commands.plan.step_time import Assumptions, phase_times, run_time, server_of
from megatron_dapo.common.exit_codes import SAVED_EXIT_CODE, USER_ERROR_EXIT_CODE
from megatron_dapo.common.sizes import GB
from megatron_dapo.config.derived import machines_per_server, parallel_sizes
from megatron_dapo.config.keys import with_keys
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.hardware import HARDWARE
from megatron_dapo.estimates.memory import trainer_memory
from megatron_dapo.estimates.model_shapes import model_json_named
from megatron_dapo.estimates.recompute import settled
from megatron_dapo.estimates.server_memory import server_memory
from megatron_dapo.estimates.server_weights import fills_blocks
from megatron_dapo.huggingface.spec_reader import model_spec
from tests.config_overrides import TP8_PP2
from tests.model_json import MODEL_JSON
from tests.proofs import proof

pytestmark = pytest.mark.unit

SERVER = "actor_rollout_ref.rollout.server"

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
SECTIONS = dict(section.split("\n", 1) for section in TEXT.split("\n## ")[1:])
FAILURES = (
    "It hangs",
    "Out of memory",
    "Server and trainer disagree",
    "It does not resume",
    "The weight sync is slow",
)
# layers, heads, KV heads, hidden, FFN: config.json of Qwen/Qwen2.5-*B
QWEN = {
    "7B": (28, 28, 4, 3584, 18944),
    "14B": (48, 40, 8, 5120, 13824),
    "32B": (64, 40, 8, 5120, 27648),
    "72B": (80, 64, 8, 8192, 29568),
}
SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size")


@pytest.fixture(scope="module")
def program() -> str:
    """All source text, with strings that are cut over lines put together again."""
    files = [path for folder in ("megatron_dapo", "launch") for path in sorted((ROOT / folder).rglob("*.py"))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in (*files, ROOT / "slurm" / "body.sh"))
    return re.sub(r'"\s*\n\s*f?"', "", text)


@pytest.mark.parametrize("section", FAILURES)
def test_every_failure_has_log_lines_to_look_for_and_the_program_writes_them(section, program):
    (line,) = re.findall(r"^Look for: (.*)$", SECTIONS[section], re.MULTILINE)
    for fragment in re.findall(r"`([^`]+)`", line):
        # the number of a rank and the like are filled in
        assert fragment in program or re.sub(r"\brank\b.*", "", fragment).strip() in program, fragment
        assert len(fragment) >= 9, "too short to be found in a log"


def test_the_exit_codes_are_those_of_the_jobs():
    documented = {line: int(code) for line, code in re.findall(r"^\| `(\w+)[^`]*` \| (\d+) \|", TEXT, re.MULTILINE)}
    failed = {int(code) for code in re.findall(r"^\| `FAILED \((\d+)\)", TEXT, re.MULTILINE)}
    assert (documented["DONE"], documented["SAVED"]) == (outcome.DONE, SAVED_EXIT_CODE)
    codes = (USER_ERROR_EXIT_CODE, outcome.NOT_REQUEUED, *outcome.FAILURES.values())
    assert failed == {*codes, 143}


def test_the_settings_are_the_scripts():
    body = (ROOT / "slurm" / "body.sh").read_text(encoding="utf-8")
    settings = set(re.findall(r"\b([A-Z_]{5,})=", TEXT)) - {
        "NCCL_DEBUG",
        "NVTE_BUILD_USE_NVIDIA_WHEELS",
        "PIP_CONSTRAINT",
        "PLATFORM",
    }
    assert {"CONTAINER", "IMAGE", "MOUNTS", "REQUEUE", "DRY_RUN"} <= settings
    assert all(re.search(rf"^#   .*\b{name}\b", body, re.MULTILINE) for name in settings | {"MAX_RESTARTS", "PYTHON"})


def rows() -> list[tuple[str, list[int]]]:
    lines = re.findall(r"^\| (\d+B) \|([ \d|]+)\|$", SECTIONS["How many nodes"], re.MULTILINE)
    return [(size, [int(number) for number in numbers.split("|")]) for size, numbers in lines]


def test_the_sizing_table_is_the_memory_estimates():
    assert {size for size, _ in rows()} == set(QWEN) and len(rows()) == 8
    for size, (nodes, tp, pp, dp, trainer_gb, server_tp, weights_gb, num_samples) in rows():
        config = load_config(
            ROOT / "configs" / "dapo_32b.yaml",
            [
                *TP8_PP2,
                f"trainer.nnodes={nodes}",
                f"actor_rollout_ref.actor.megatron.tensor_model_parallel_size={tp}",
                f"actor_rollout_ref.actor.megatron.pipeline_model_parallel_size={pp}",
                f"actor_rollout_ref.rollout.server.tensor_model_parallel_size={server_tp}",
            ],
        )
        spec = model_spec(MODEL_JSON | {"vocab_size": 152064} | dict(zip(SIZES, QWEN[size], strict=True)))
        server = server_memory(config, spec)
        assert nodes * 8 == tp * pp * dp
        assert round(trainer_memory(config, spec).total / GB) == trainer_gb, size
        assert (round(server.weights / GB), server.num_tokens // 22528) == (weights_gb, num_samples), size


@pytest.mark.parametrize("size", ["30B-A3B", "235B-A22B"])
def test_the_table_of_mixtures_is_their_recipes(size):
    (line,) = re.findall(rf"^\| {size} \|([ \d|]+)\|$", SECTIONS["How many nodes"], re.MULTILINE)
    spec = model_spec(model_json_named(f"qwen3-{size}"))
    config = settled(load_config(ROOT / "configs" / f"dapo_qwen3_{size.lower().replace('-', '_')}.yaml"), spec)
    sizes = parallel_sizes(config)
    servers = config.actor_rollout_ref.rollout.server
    server = server_memory(config, spec)
    assert [int(number) for number in line.split("|")] == [
        *(config.trainer.nnodes, sizes.tp, sizes.pp, sizes.dp, sizes.ep),
        round(trainer_memory(config, spec).total / GB),
        *(servers.nnodes, servers.tensor_model_parallel_size),
        *(round(server.weights / GB), server.num_tokens // 22528),
    ]


def test_the_first_job_installs_what_its_recipe_demands():
    recipe = load_config(ROOT / "configs" / "dapo_7b.yaml").actor_rollout_ref.actor.megatron
    assert recipe.use_transformer_engine == "on"
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    (install,) = re.findall(r"PIP_CONSTRAINT= .* -r requirements/transformer_engine\.txt", page)
    assert install in SECTIONS["The first job"].partition("sbatch")[0]


def test_the_readme_leads_here():
    assert "docs/cluster.md" in (ROOT / "README.md").read_text(encoding="utf-8")


LARGER = SECTIONS["Models larger than a node"]


def plans_of_the_page() -> dict[str, tuple[Config, list[str]]]:
    """Return, by model, the configs of the section's commands, and the lines below each."""
    plans = {}
    for command in re.split(r"^    (?=python)", LARGER, flags=re.MULTILINE)[1:]:
        words, _, printed = command.replace("\\\n", " ").partition("\n")
        path, *overrides = shlex.split(words)[5:]
        config = load_config(ROOT / path, overrides)
        lines = [line.strip() for line in printed.splitlines() if line.startswith("      ")]
        plans[Path(config.actor_rollout_ref.model.path).name] = config, lines
    return plans


PLANS = plans_of_the_page()


@pytest.mark.parametrize("model", PLANS)
def test_the_smallest_jobs_of_models_larger_than_a_node_are_as_planned(model, short_simulation):
    config, (trainer, server, layout) = PLANS[model]
    spec, assumed = model_spec(model_json_named(model)), Assumptions.usual(config, HARDWARE["h100"])
    validate(config, model_json_named(model), check_files=False)
    assert shortage(config := settled(config, spec), spec) == []
    assert {trainer, server} <= set(memory_lines(config, (spec, None)))
    assert layout in time_plan(config, model, assumed, run_time(config, spec, assumed, [0]), JobLimit())
    over = machines_per_server(config) // 2
    fewer = with_keys(config, {f"{SERVER}.tensor_model_parallel_size": 8 * over})
    assert not server_memory(fewer, spec).holds(config.data.max_prompt_length + config.data.max_response_length)


def jobs_of_the_page() -> list[tuple[str, Config, list[int | float]]]:
    """Return (model, config, numbers) of the section's table."""
    jobs = []
    for model, form, nodes, servers, *numbers in (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in LARGER.splitlines()
        if "x TP" in line and "|" in line
    ):
        number, tp, over = map(int, re.findall(r"\d+", servers))
        values = {"nnodes": int(nodes), "num_servers": number, "tensor_model_parallel_size": tp}
        keys = {f"{SERVER}.{key}": value for key, value in (values | {"nodes_per_server": over}).items()}
        keys |= {f"{SERVER}.max_running_requests": 256, "actor_rollout_ref.rollout.max_concurrency": 256}
        keys |= {"actor_rollout_ref.rollout.quantization": "fp8"} if form == "FP8" else {}
        jobs.append((model, with_keys(PLANS[model][0], keys), [float(cell) for cell in numbers]))
    return jobs


JOBS = jobs_of_the_page()


@pytest.mark.parametrize(("model", "config", "numbers"), JOBS)
def test_servers_of_larger_jobs_are_as_planned(model, config, numbers):
    spec = model_spec(model_json_named(model))
    config = settled(config, spec)
    speed = server_of(config, spec, Assumptions.usual(config, HARDWARE["h100"]))
    server = server_memory(config, spec)
    assert [round(server.weights / GB, 1), speed.slots, round(speed.tokens_per_s)] == numbers[:3]
    validate(config, model_json_named(model), check_files=False)
    assert shortage(config, spec) == []


@proof
@pytest.mark.parametrize(("model", "config", "numbers"), JOBS)
def test_steps_of_larger_jobs_are_as_planned(model, config, numbers):
    spec = model_spec(model_json_named(model))
    config = settled(config, spec)
    (step,) = run_time(config, spec, Assumptions.usual(config, HARDWARE["h100"]), [0]).steps
    assert round(step.step) == numbers[3]


def mixture_in(form: str) -> Config:
    fp8 = [
        "actor_rollout_ref.rollout.quantization=fp8",
        "actor_rollout_ref.rollout.max_concurrency=192",
        f"{SERVER}.max_running_requests=192",
        f"{SERVER}.extra_args=[--ep-size, '2']",
    ]
    config = load_config(ROOT / "configs" / "dapo_qwen3_235b_a22b.yaml", fp8 if form == "FP8" else [])
    validate(config, model_json_named("qwen3-235b-a22b"), check_files=False)
    return settled(config, model_spec(model_json_named("qwen3-235b-a22b")))


FORMS = re.findall(r"^\| (bfloat16|FP8) \|([ \d.|]+)\|$", SECTIONS["How many nodes"], re.MULTILINE)


@pytest.mark.parametrize(("form", "line"), FORMS)
def test_the_table_of_fp8_is_as_planned(form, line):
    config, spec = mixture_in(form), model_spec(model_json_named("qwen3-235b-a22b"))
    server = server_memory(config, spec)
    parts = phase_times(config, spec, Assumptions.usual(config, HARDWARE["h100"]))
    assert [float(cell) for cell in line.split("|")][:5] == [
        *(round(server.weights / GB, 1), server.num_tokens // 22528),
        *(parts.server.slots, round(parts.server.tokens_per_s), round(parts.push, 1)),
    ]
    assert shortage(config, spec) == [] and fills_blocks(config, spec, 8) == (form == "FP8")


@proof
@pytest.mark.parametrize(("form", "line"), FORMS)
def test_the_steps_of_fp8_are_as_planned(form, line):
    config, spec = mixture_in(form), model_spec(model_json_named("qwen3-235b-a22b"))
    (step,) = run_time(config, spec, Assumptions.usual(config, HARDWARE["h100"]), [0]).steps
    days = step.step * config.trainer.total_training_steps / 86400
    assert [float(cell) for cell in line.split("|")][5:] == [round(step.step), round(days, 1)]
