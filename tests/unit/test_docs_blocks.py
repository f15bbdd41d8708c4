"""Copyable parts of the pages: every key exists, blocks of YAML and Python do as the text says."""

import argparse
import asyncio
import math
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from examples.arithmetic.demo import DEMO
from launch.command_line import require_local
from megatron_dapo.agents.interface import AgentTask, Outcome
from megatron_dapo.algorithms.sequence_loss import LossSequence
from megatron_dapo.checks.run_checks import validate
from megatron_dapo.commands.evaluation.command import add_eval_arguments
from megatron_dapo.commands.plan.command import add_plan_arguments
from megatron_dapo.commands.report.command import add_report_arguments
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.aliases import MAIN_SWITCH, canonical, names_in
from megatron_dapo.config.derived import uses_critic, uses_experience_replay
from megatron_dapo.config.keys import known_keys
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.batching import assemble
from megatron_dapo.envs.environment import Task
from tests.synthetic import synthetic_groups, with_branches

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text(encoding="utf-8")
SECTIONS = "|".join(Config.model_fields)
# the user's own names follow
FREE = (
    "reward.kwargs.",
    "actor_rollout_ref.rollout.multi_turn.environment_kwargs.",
    "actor_rollout_ref.rollout.agent.kwargs.",
)


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def fenced(page: str, language: str, part: str = "") -> str:
    """The only block of this language with this part."""
    (block,) = (block for block in re.findall(rf"(?s)```{language}\n(.*?)```", text_of(page)) if part in block)
    return block


def test_every_key_on_a_page_exists():
    keys = known_keys().keys()
    sections = {key[:dot] for key in keys for dot in (m.start() for m in re.finditer(r"\.", key))}
    unknown = [
        f"{page.name}: {name}"
        for page in PAGES
        for name in re.findall(rf"(?<![\w./-])((?:{SECTIONS})(?:\.[a-z_]\w*)+)(?![\w/(-])", without_refusals(page))
        if canonical(name) not in {*keys, *sections, MAIN_SWITCH}
        if not names_in(name) and not name.startswith(FREE) and not is_file(name)
    ]
    assert not unknown


def without_refusals(page: Path) -> str:
    """A page may show the program's answer to an unknown key."""
    return "\n".join(line for line in page.read_text(encoding="utf-8").splitlines() if "Unknown key" not in line)


def test_servers_of_their_own_and_the_trainer_that_uses_them_get_the_same_key():
    commands = README.replace("\\\n", " ").splitlines()
    servers, trainer = (
        next(line for line in commands if word in line and not line.lstrip().startswith("#"))
        for word in ("launch.sglang_server", "rollout.server_urls=")
    )
    (key,) = re.findall(r"rollout\.server_api_key_file=(\S+)", servers)
    assert f"rollout.server_api_key_file={key} " in trainer
    assert any("umask 077; " in line and line.endswith(f"> {key})") for line in commands)


def is_file(name: str) -> bool:
    return name.endswith((".py", ".json", ".gz", ".md", ".yaml"))


def test_the_settings_for_experience_replay_are_a_config(tmp_path):
    (tmp_path / "config.yaml").write_text(fenced("experience_replay.md", "yaml"))
    config = load_config(tmp_path / "config.yaml")
    validate(config, None, check_files=False)
    assert uses_experience_replay(config)


def test_the_command_for_ppo_makes_the_demo_train_a_critic():
    command = re.search(r"(?m)^    python -m examples\.arithmetic\.demo ((?:.*\\\n)*.*)$", text_of("ppo.md"))[1]
    config = load_config(ROOT / "configs" / "demo.yaml", command.replace("\\\n", " ").split())
    validate(config, None, check_files=False)
    assert uses_critic(config) and config.trainer.critic_warmup == 1


def test_the_command_for_data_of_ones_own_says_how_long_a_response_may_be():
    (command,) = re.findall(
        r"(?m)^    python -m launch\.local --config configs/demo_llm\.yaml ((?:.*\\\n)*.*)$", README
    )
    overrides = shlex.split(command.replace("\\\n", " "))
    config = load_config(ROOT / "configs" / "demo_llm.yaml", overrides)
    validate(config, None, check_files=False)
    assert f"data.max_response_length={config.data.max_response_length}" in overrides
    assert config.data.max_response_length >= 256


def test_a_command_that_starts_a_recipe_starts_it():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    on_one_machine = set(re.findall(r"python -m launch\.local --config (configs/[\w./]+\.yaml)", text))
    assert len(on_one_machine) > 3
    for recipe in on_one_machine:
        require_local(load_config(ROOT / recipe))
    by_slurm = set(re.findall(r"CONFIG=([\w./]+) [^\n|]*?sbatch [^\n|]*?(slurm/\w+\.sh)", text))
    assert ("configs/dapo_qwen3_235b_a22b_fp8.yaml", "slurm/dapo_qwen3_235b_a22b.sh") in by_slurm
    for names in by_slurm:
        assert all((ROOT / name).is_file() for name in names)


COOKBOOKS = sorted((ROOT / "docs").glob("cookbook_*.md"))
STARTS = re.compile(r"sbatch |bash slurm/|python -m (launch|megatron_dapo)\b")
OPTIONS = {"plan": add_plan_arguments, "eval": add_eval_arguments, "report": add_report_arguments}


def commands_of(page: Path) -> list[list[str]]:
    """The words of each indented line, without a comment."""
    lines = re.findall(r"(?m)^ {4,}(\S.*)$", page.read_text(encoding="utf-8").replace("\\\n", " "))
    return [shlex.split(line, comments=True) for line in lines if STARTS.search(line)]


def started(words: list[str]) -> tuple[Path, list[str]] | None:
    """Return (recipe, overrides) of a command that starts or plans a run of a recipe."""
    full = [word.replace("$A.", "actor_rollout_ref.rollout.agent.") for word in words]
    overrides = [word for word in full if re.match(r"[a-z_.]+=", word)]
    recipes = [words[words.index("--config") + 1]] if "--config" in words else []
    recipes += [word.removeprefix("CONFIG=") for word in words if word.startswith("CONFIG=")]
    for script in (word for word in words if re.fullmatch(r"slurm/\w+\.sh", word)):
        text = (ROOT / script).read_text(encoding="utf-8")
        recipes += re.findall(r"(?m)^export CONFIG=(?:\$\{CONFIG:-)?([\w./-]+)", text)
    return (ROOT / recipes[0], overrides) if recipes and (ROOT / recipes[0]).is_file() else None


def test_a_run_that_a_page_starts_is_not_refused():
    runs = [(page.name, *run) for page in PAGES for words in commands_of(page) if (run := started(words))]
    assert len(runs) > 40
    refused = []
    for page, recipe, overrides in runs:
        try:
            validate(load_config(recipe, overrides), None, check_files=False)
        except UserError as error:
            refused.append(f"{page}: {recipe.name} {' '.join(overrides)}: {error}")
    assert not refused


@pytest.mark.parametrize("page", COOKBOOKS, ids=lambda page: page.stem)
def test_a_cookbook_is_short_and_gets_the_models_that_it_trains(page):
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) <= 300
    models = {load_config(*run).actor_rollout_ref.model.path for words in commands_of(page) if (run := started(words))}
    assert models and all(f" --local-dir {model}\n" in text or (ROOT / model).is_dir() for model in models)


@pytest.mark.parametrize("page", COOKBOOKS, ids=lambda page: page.stem)
def test_a_cookbook_gives_options_that_exist(page):
    commands = [words[words.index("megatron_dapo") + 1 :] for words in commands_of(page) if "megatron_dapo" in words]
    assert commands
    for command, *arguments in commands:
        parser = argparse.ArgumentParser(exit_on_error=False)
        OPTIONS[command](parser)
        assert not [word for word in parser.parse_known_args(arguments)[1] if word.startswith("-")]


def test_the_other_losses_are_configs_over_a_recipe_of_dapo():
    section = text_of("algorithms.md").partition("\n## Policy loss\n")[2].partition("\n## ")[0]
    seen = []
    for switch, lines in re.findall(r"`(use_dapo=\w+)`:\n\n((?:    .*\n)+)", section):
        for line in lines.splitlines():
            words = [switch, *line.split(), *(["clip_ratio_c=3.0"] if "gspo" not in line else [])]
            keys = [word if "algorithm." in word else f"actor_rollout_ref.actor.{word}" for word in words]
            if "bypass_mode" in line:
                keys.append("algorithm.rollout_correction.rollout_is=none")
            config = load_config(ROOT / "configs" / "dapo_32b.yaml", keys)
            validate(config, None, check_files=False)
            seen.append(config.actor_rollout_ref.actor.policy_loss)
    assert seen == ["cispo", "gspo", "sapo", "dppo_tv"]


def test_the_command_that_the_demo_prints_to_switch_a_technique_off_is_a_config():
    (command,) = (command for what, command in DEMO.next_steps if what == "switch a technique off")
    config = load_config(ROOT / "configs" / "demo.yaml", command.partition("examples.arithmetic.demo ")[2].split())
    validate(config, None, check_files=False)
    assert not config.algorithm.dynamic_sampling.enable


def test_the_reward_function_of_the_page_gives_what_it_says():
    names: dict = {}
    exec(fenced("rewards.md", "python"), names)
    assert names["score"]("", " 7 ", "7", {}, bonus=0.5) == {"score": 1.5, "correct": True}
    assert names["score"]("", "8", "7", {}) == {"score": 0.0, "correct": False}


def test_the_loss_of_the_page_is_that_of_its_formula():
    names: dict = {}
    exec(fenced("loss.md", "python", "def gmpo"), names)
    log_probs = torch.tensor([-1.0, -7.0, -2.0], requires_grad=True)
    old = torch.tensor([-1.5, -3.0, -2.5])
    ones = torch.ones(3)
    good, bad = (LossSequence(log_probs, old, old, None, a, torch.tensor([1.0, 0.0, 1.0])) for a in (ones, -ones))
    loss, count, metrics = names["gmpo"]([good, good])
    assert float(loss.detach()) == pytest.approx(-2 * math.exp(0.4)) and count == 2
    assert [float(x) for x in metrics["actor/clipped_tokens"]] == [4.0, 4.0]
    loss, _, metrics = names["gmpo"]([bad, bad])
    assert float(loss.detach()) == pytest.approx(2 * math.exp(0.5))  # bad and likelier: not bounded
    assert [float(x) for x in metrics["actor/clipped_tokens"]] == [0.0, 4.0]
    loss.backward()
    assert log_probs.grad.tolist() == pytest.approx([math.exp(0.5), 0.0, math.exp(0.5)])


def test_the_credit_of_the_page_is_that_of_the_last_branch():
    names: dict = {}
    exec(fenced("loss.md", "python", "def share"), names)
    groups = with_branches(synthetic_groups(67, num_groups=1))
    for sample in groups[0].samples:
        assert names["share"](sample) == [*[0.0] * len(sample.others), 1.0]
    assert [row.advantage for row in assemble(groups, credit=names["share"]) if row.advantage]


def test_the_game_of_the_page_can_be_played():
    names: dict = {}
    exec(fenced("multi_turn.md", "python"), names)

    async def played(*guesses: str) -> list:
        game = names["Guess"](attempts=2)
        first = await game.reset(Task("Guess!", "games", "7"))
        turns = [await game.step(guess) for guess in guesses]
        await game.close()
        return [first, *turns]

    first, wrong, right = asyncio.run(played("3", " 7"))
    assert not first.messages and not first.done
    assert wrong.messages[0]["content"] == "No." and not wrong.done and wrong.correct is False
    assert right.done and right.reward == 1.0 and right.correct
    assert asyncio.run(played("3", "4"))[-1].done


def test_the_agent_of_the_page_plays_with_a_model_at_a_url():
    """The model's words: 6, then 7."""
    names: dict = {}
    exec(fenced("agents.md", "python"), names)
    asked = []

    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer k"
        asked.append((await request.json())["messages"])
        message = {"role": "assistant", "content": "6" if len(asked) % 2 else " 7"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        whole = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return web.json_response(whole)

    async def played(attempts: int) -> Outcome:
        app = web.Application()
        app.add_routes([web.post("/t/k/v1/chat/completions", answer)])
        server = TestServer(app)
        async with server:
            model = SimpleNamespace(base_url=str(server.make_url("/t/k/v1")), key="k", name="m")
            task = AgentTask("Guess!", [{"role": "user", "content": "Guess!"}], "games", "7")
            return await names["play"](task, model, attempts=attempts)

    assert asyncio.run(played(3)) == Outcome(1.0, True, metrics={"attempts": 2})
    assert [message["content"] for message in asked[1]] == ["Guess!", "6", "No."]
    asked.clear()
    assert asyncio.run(played(1)) == Outcome(0.0)


def test_the_lines_below_the_agents_of_the_page_are_configs():
    lines = re.findall(r"(?m)^    (agent\..*)$", text_of("agents.md"))
    assert len(lines) == 2
    for line in lines:
        words = shlex.split(line)
        on = () if "agent.enable=true" in words else ("actor_rollout_ref.rollout.agent.enable=true",)
        keys = [word if word.startswith("reward.") else f"actor_rollout_ref.rollout.{word}" for word in words]
        validate(load_config(None, [*keys, *on]), None, check_files=False)


def test_the_training_loop_of_the_page_runs():
    block = re.search(r"(?m)(?:^    .*\n)+(?=\n`PPO`)", text_of("classic_control.md"))[0]
    loop = re.sub(r"(?m)^    ", "", block).replace("range(200)", "range(2)")
    names: dict = {}
    exec("import torch\nfrom examples.classic_control.agent import PPO\n", names)
    exec("from examples.classic_control.env import AutoReset, make, reset_batch\n", names)
    exec("from examples.classic_control.types import PPOConfig\n" + loop, names)
    assert names["state"].step == 2 and names["metrics"].total_loss == names["metrics"].total_loss
