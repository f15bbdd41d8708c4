"""A run's cost before its start: days, GPU-hours, jobs of a time limit, and allowed requeues."""

import json
import math
import re

import pytest

from launch.slurm.__main__ import main as slurm_main
from launch.slurm.plan import Allocation
from megatron_dapo.__main__ import main
from megatron_dapo.commands.plan import cost
from megatron_dapo.commands.plan.cost import JobLimit, limit_seconds, usual_run
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.recipes import recipe
from megatron_dapo.estimates.model_shapes import model_json_named
from tests.helpers import REPOSITORY
from tests.tiny_models import CHAT_TEMPLATE, make_tokenizer

pytestmark = pytest.mark.unit

SERVER = "actor_rollout_ref.rollout.server"
ROW = '{"prompt": "1+1=", "label": "2", "data_source": "math"}\n'
COST = re.compile(
    r"([\d.]+) days on (\d+) GPUs like H100, (\d+) GPU-hours: (\d+) steps of (\d+) s\n +(\d+) jobs of 24 h"
)


@pytest.mark.parametrize(
    ("hours", "limit", "notice", "jobs", "restarts"),
    [
        (358.3, 24, 2, 17, 24),  # the 32B recipe: 358.3 / 22 = 16.3; 1.25 x 17 + 2 = 23.25
        (22, 24, 2, 1, 4),
        (22.1, 24, 2, 2, 5),
        (0.01, 24, 2, 1, 4),
        (100, math.inf, 2, 1, 4),
        (100, 1, 2, None, None),
        (100, 2, 2, None, None),
    ],
)
def test_jobs_are_as_many_as_fill_the_run_with_their_time_before_the_notice(hours, limit, notice, jobs, restarts):
    limits = JobLimit(limit * 3600, notice * 3600)
    assert (limits.jobs(hours * 3600), limits.planned_restarts(hours * 3600)) == (jobs, restarts)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),  # the forms that the manual page of sbatch has for --time
        ("90:30", 5430),
        ("24:00:00", 86400),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-00:00:05", 86405),
        ("UNLIMITED", math.inf),
    ],
)
def test_a_time_limit_is_read_as_sbatch_reads_it(text, seconds):
    assert limit_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0:00", "-5", "1e9", "24h", "1:2:3:4", "1-", "9" * 400, "1-1-1", " 5", "٣"])
def test_what_is_no_time_limit_is_refused(text):
    with pytest.raises(UserError, match="--time-limit is "):
        limit_seconds(text)


def cost_in(text: str) -> list[float]:
    match = COST.search(text)
    assert match, text
    return [float(number) for number in match.groups()]


def test_plan_and_dry_runs_say_that_the_32b_recipe_takes_weeks_with_a_trainer_that_waits(capsys, short_simulation):
    """15 days or so, by hand from the plan's own step: 500 x 2580 s on 128 GPUs, of which the trainer
    works 576 s and waits 78 %, in jobs of 22 hours each."""
    path = recipe("dapo_32b")
    assert main(["plan", "--config", path, "--staleness", "0"]) == 0
    planned = capsys.readouterr().out
    assert main(["train", "--dry-run", "--config", path]) == 2
    dry = capsys.readouterr().out
    assert slurm_main(["plan", "--config", path, "--notice", "7200", "--time-limit", "24:00:00"]) == 2
    for text in (planned, dry, capsys.readouterr().out):
        days, gpus, hours, steps, step, jobs = cost_in(text)
        # a small simulation is off by up to a fifth
        assert (gpus, steps) == (128, 500) and 12 < days < 18
        assert days == pytest.approx(steps * step / 86400, abs=0.06)
        assert hours == pytest.approx(steps * step * gpus / 3600, rel=1e-3)
        assert jobs == math.ceil(steps * step / (22 * 3600))
        (waits,) = re.findall(r"THE TRAINER WAITS (\d+)% of the time for samples", text)
        assert float(waits) == pytest.approx(78, abs=6)
    assert re.search(rf"^    days +{days}$", planned, re.MULTILINE)
    assert re.search(rf"^    jobs of 24 h +{jobs:.0f}$", planned, re.MULTILINE)


def test_the_time_limit_and_the_notice_of_a_plan_may_be_given(capsys, short_simulation):
    arguments = ["plan", "--config", recipe("dapo_32b"), "--staleness", "0"]
    assert main([*arguments, "--time-limit", "3-00:00:00", "--notice", "3600"]) == 0
    assert re.search(r"\d jobs of 72 h, each asked to save 1 h before its end", capsys.readouterr().out)
    assert main([*arguments, "--time-limit", "1:00:00"]) == 0
    assert "NONE DOES ANYTHING; give a longer time limit" in capsys.readouterr().out
    assert main([*arguments, "--time-limit", "soon"]) == 2
    assert "--time-limit is soon" in capsys.readouterr().err


@pytest.mark.parametrize("name", [path.stem for path in sorted((REPOSITORY / "configs").glob("*.yaml"))])
def test_the_cost_of_every_recipe_with_a_known_model_is_known(name, short_simulation):
    config = load_config(recipe(name))
    run = usual_run(config)
    is_known = not config.sft.enable and cost.read_model_specs(config) is not None
    assert (run is not None) == is_known
    if run is not None:
        assert all(cost.cost_lines(config, run.steps[0], run.num_gpus, JobLimit())) and run.steps[0].step > 0


def test_a_plan_of_many_weight_versions_takes_no_longer(short_simulation, monkeypatch):
    asked = []
    monkeypatch.setattr(cost, "run_time", lambda config, spec, assumed, ages, critic: asked.extend(ages))
    usual_run(load_config(recipe("dapo_32b_async"), ["actor_rollout_ref.rollout.max_staleness=100000"]))
    assert asked == [8]


@pytest.fixture
def job(tmp_path, monkeypatch, short_simulation):
    """Plan an attempt of the 32B recipe with existing files; its plan.json, and its output."""
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text(ROW)
    model = tmp_path / "qwen"
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(model)
    (model / "config.json").write_text(json.dumps(model_json_named("qwen2.5-32b")))
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    nodes = ",".join(f"n{i}" for i in range(16))
    files = [f"data.{name}_files=[{tmp_path}/{name}.jsonl]" for name in ("train", "val")]
    files += [f"actor_rollout_ref.model.path={model}", f"trainer.run_dir={tmp_path}/run"]

    def plan(*options: str):
        arguments = ["plan", "--config", recipe("dapo_32b"), "--nodes", nodes, *options, *files]
        code = slurm_main(arguments)
        path = tmp_path / "run" / "logs" / "attempt-5-0" / "plan.json"
        return code, json.loads(path.read_text()) if path.exists() else None

    return plan


def test_a_job_may_be_requeued_as_often_as_its_plan_asks_for(job, capsys):
    code, plan = job("--notice", "7200")
    printed = capsys.readouterr().out
    asked = math.ceil(1.25 * cost_in(printed)[-1]) + 2
    assert (code, plan["max_restarts"]) == (0, asked) and asked > 20 and "MAX_RESTARTS" not in printed
    code, plan = job("--notice", "7200", "--max-restarts", "9")
    assert (code, plan["max_restarts"]) == (0, 9)
    assert f"MAX_RESTARTS 9 is below the {asked} that the planned jobs ask for" in capsys.readouterr().out


def test_the_time_limit_that_slurm_gave_the_job_counts(job, capsys, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_START_TIME", "1000000")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(1000000 + 12 * 3600))
    code, plan = job("--notice", "7200", "--time-limit", "24:00:00")
    number = int(re.search(r"(\d+) jobs of 12 h, each asked to save 2 h", capsys.readouterr().out)[1])
    assert code == 0 and plan["max_restarts"] == math.ceil(1.25 * number) + 2 > 40
    assert Allocation.of({"SLURM_JOB_ID": "5", "SLURM_JOB_START_TIME": "x"}, ["a"]).time_limit_s is None
    assert Allocation.of({"SLURM_JOB_ID": "5", "SLURM_JOB_END_TIME": "7"}, ["a"]).time_limit_s is None


def test_a_short_run_may_be_requeued_for_preemptions_as_before(tmp_path, monkeypatch, short_simulation):
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    (tmp_path / "prompts.jsonl").write_text(ROW)
    words = ["trainer.nnodes=1", f"{SERVER}.nnodes=1", f"data.train_files=[{tmp_path}/prompts.jsonl]"]
    words += ["data.max_prompt_length=8", "data.max_response_length=40", "data.apply_chat_template=false"]
    words.append(f"trainer.run_dir={tmp_path}/run")
    assert slurm_main(["plan", "--nodes", "a,b", *words, "actor_rollout_ref.model.path=examples/arithmetic/base"]) == 0
    plan = json.loads((tmp_path / "run" / "logs" / "attempt-5-0" / "plan.json").read_text())
    assert plan["max_restarts"] == 20


@pytest.mark.parametrize("name", ["dapo_32b", "dapo_7b", "dapo_qwen3_30b_a3b", "dapo_qwen3_235b_a22b", "one_node"])
def test_a_script_tells_the_dry_run_the_time_limit_that_it_asks_of_slurm(name):
    text = (REPOSITORY / "slurm" / f"{name}.sh").read_text()
    assert re.search(r"^#SBATCH --time=(\S+)$", text, re.MULTILINE)[1] == re.search(r"TIME_LIMIT:-([\d:]+)}", text)[1]


def test_a_plan_of_synthetic_batches_has_a_trainer_and_nothing_else(capsys, short_simulation):
    path = recipe("dapo_7b")
    assert main(["plan", "--config", path, "--staleness", "0"]) == 0
    with_servers = capsys.readouterr().out
    assert main(["plan", "--config", path, "trainer.synthetic_batch=true"]) == 0
    shown = capsys.readouterr().out
    assert "weight sync" in with_servers and "server" in with_servers
    for words in ("weight sync", "sampling", "server:", "carry signal", "a server decodes", "idle", "staleness"):
        assert words not in shown, words
    assert "qwen2.5-7b on 8 H100" in shown and "on synthetic batches, without servers" in shown
    # as trainer.synthetic_batch draws them: 0.3 of the longest, 2048
    assert "prompts of 614" in shown
    seconds = {
        name: float(value) for name, value in re.findall(r"^  (\w[\w ,%-]+?)  +([\d.]+) s$", shown, re.MULTILINE)
    }
    parts = ("hand-over of the batch", "old log-probs", next(name for name in seconds if name.startswith("update")))
    assert seconds["step"] == pytest.approx(sum(seconds[name] for name in parts), rel=0.01)
    assert main(["plan", "--config", path, "--search", "trainer.synthetic_batch=true"]) == 2
    assert "--search divides GPUs between trainer and servers, but the run uses no servers" in capsys.readouterr().err
    assert main(["plan", "--config", path, "trainer.replay=/batches"]) == 2
