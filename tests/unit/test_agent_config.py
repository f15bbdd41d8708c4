"""Demands of agents on the config: every contradiction is one sentence, with key and cure."""

import pytest

from megatron_dapo.checks.known_mistakes import known_mistakes
from megatron_dapo.checks.machine_checks import EVALUATION_CHECKS, MACHINE_CHECKS
from megatron_dapo.checks.run_checks import validate
from megatron_dapo.commands.plan.process_plan import process_plan
from megatron_dapo.commands.plan.shortage import shortage
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.recipes import recipe
from megatron_dapo.estimates.model_shapes import model_json_named
from megatron_dapo.estimates.recompute import settled
from megatron_dapo.huggingface.spec_reader import model_spec

pytestmark = pytest.mark.unit

ROLLOUT = "actor_rollout_ref.rollout"
KEY = f"{ROLLOUT}.agent"
ON = (f"{KEY}.enable=true", f"{KEY}.function=own_agents:play")
COMMAND = (f"{KEY}.enable=true", f"{KEY}.command=[sh,-c,exit]")


def sentences(*overrides):
    try:
        validate(load_config(None, list(overrides)), None, check_files=False)
    except UserError as error:
        return error.sentences
    return []


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ON,
        COMMAND,
        (*ON, "reward.function=environment", "algorithm.adv_estimator=rloo", f"{KEY}.credit=own_agents:shares"),
        (*ON, f"{KEY}.kwargs.attempts=3", f"{KEY}.num_workers=2", f"{KEY}.pass_env=[SEARCH_API_KEY]"),
        (*COMMAND, f"{KEY}.sandbox=true", f"{KEY}.tool_parser=qwen25", f"{KEY}.reasoning_parser=own_agents:thoughts"),
        (*ON, f"{KEY}.host=0.0.0.0", f"{KEY}.port=8100", f"{KEY}.public_url=https://agents.example/run-1"),
        (*ON, f"{KEY}.port=65534", f"{KEY}.num_gateways=2", f"{ROLLOUT}.server_urls=[http://127.0.0.1:30000]"),
        (*ON, f"{KEY}.port=30000", f"{ROLLOUT}.server_urls=[http://far.example:30000]"),
        (*ON, f"{KEY}.timeout_s=7140.0", f"{KEY}.max_tokens_per_turn=2047"),
        (*ON, f"{ROLLOUT}.deterministic=true"),
        (*COMMAND, f"{KEY}.sandbox=true", "reward.judge.url=http://127.0.0.1:1/v1", "reward.judge.model=m"),
        (f"{KEY}.function=own_agents:play", f"{KEY}.max_turns=3", f"{KEY}.enable=false"),
    ],
)
def test_what_fits_together_is_taken(overrides):
    assert sentences(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((f"{KEY}.enable=true",), [f"Of {KEY}.function and command none is given"]),
        ((*ON, f"{KEY}.command=[sh]"), ["command both are given", "give one of them"]),
        ((f"{KEY}.enable=true", f"{KEY}.function=own_agents"), ["function is 'own_agents'", "package.module:name"]),
        ((f"{KEY}.enable=true", f"{KEY}.function='own agents:play'"), ["function is 'own agents:play'"]),
        ((*ON, f"{KEY}.credit=shares"), ["credit is 'shares'", "package.module:name"]),
        ((*ON, f"{KEY}.tool_parser=own_agents:"), ["tool_parser is 'own_agents:'"]),
        ((*ON, f"{KEY}.reasoning_parser=:f"), ["reasoning_parser is ':f'"]),
        ((f"{KEY}.function=own_agents:play",), ["has no effect while", "set enable to true"]),
        ((*COMMAND, f"{KEY}.kwargs.attempts=3"), ["has no effect while", "function is null", "set function"]),
        ((*ON, f"{KEY}.sandbox=true"), ["sandbox is true", "command is []", "set command"]),
        (
            (*ON, f"{ROLLOUT}.multi_turn.enable=true", f"{ROLLOUT}.multi_turn.environment=reasoning_gym"),
            [f"{KEY}.enable and {ROLLOUT}.multi_turn.enable are both true"],
        ),
        ((*ON, f"{KEY}.pass_env=[KEY=sk-1234]"), ["pass_env[0] is no name", "give its name alone"]),
        ((*ON, f"{KEY}.public_url=agents.example"), ["public_url is 'agents.example'", "https://host:port"]),
        ((*ON, f"{KEY}.public_url=http://a:b@agents.example"), ["of the form https://host:port"]),
        ((*ON, f"{KEY}.public_url=http://agents.example", f"{KEY}.num_gateways=2"), ["num_gateways is 2"]),
        ((*ON, f"{KEY}.port=65535", f"{KEY}.num_gateways=2"), ["port is 65535", "up to 65536"]),
        (
            (*ON, f"{KEY}.port=29999", f"{KEY}.num_gateways=2", f"{ROLLOUT}.server_urls=[http://localhost:30000]"),
            ["port 29999", "port 30000", "http://localhost:30000", "choose another port"],
        ),
        ((*ON, f"{KEY}.port=8100", f"{ROLLOUT}.server_urls=[http://localhost:99999]"), ["http://localhost:99999"]),
        ((*ON, f"{KEY}.timeout_s=7141.0"), ["timeout_s and end_timeout_s are together 7201", "step_timeout_s 7200"]),
        ((*ON, f"{KEY}.max_tokens_per_turn=2048"), ["is 2048", "below data.max_response_length 2048"]),
        ((*ON, "algorithm.adv_estimator=gae"), ["adv_estimator is gae", "choose one of grpo, rloo"]),
        ((*ON, "algorithm.adv_estimator=reinforce_plus_plus"), ["adv_estimator is reinforce_plus_plus"]),
        ((*ON, "exp_manager.experience_replay.enable=true"), ["experience_replay.enable is true", f"{KEY}.enable"]),
        (("reward.function=environment",), ["reward.function is environment", f"or {KEY}.enable to true"]),
        ((*COMMAND, f"{KEY}.sandbox=true", "reward.function=environment"), ["an agent outside a sandbox"]),
        ((f"{KEY}.enable=true", f"{KEY}.command=[play,'--key={{key}}']"), ["command has {key}", "OPENAI_API_KEY"]),
        ((*ON, "reward.judge.url=http://127.0.0.1:1/v1", "reward.judge.model=m"), [f"{KEY}.enable the agent gives"]),
    ],
)
def test_a_contradiction_is_one_sentence(overrides, words):
    (sentence,) = sentences(*overrides)
    assert all(word in sentence for word in words), sentence


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_agents.py").write_text("raise SystemExit('this ran')\nasync def play(task, model): ...\n")
    return tmp_path


def on_machine(*overrides, checks=MACHINE_CHECKS):
    mistakes = known_mistakes(checks, load_config(None, list(overrides)))
    return [sentence for sentence in mistakes if sentence.startswith(KEY)]


@pytest.mark.parametrize("checks", [MACHINE_CHECKS, EVALUATION_CHECKS])
def test_an_agents_code_is_found_without_running_it(folder, checks):
    assert on_machine(*ON, checks=checks) == []
    (sentence,) = on_machine(*ON, f"{KEY}.credit=own_agents:plya", checks=checks)
    assert "credit is own_agents:plya, but the module own_agents defines no plya" in sentence
    (sentence,) = on_machine(f"{KEY}.enable=true", f"{KEY}.function=absent_agents:play", checks=checks)
    assert "the module absent_agents is not found" in sentence


def test_a_program_must_be_here_and_executable(folder):
    program = folder / "agent"
    assert on_machine(*COMMAND) == []
    (sentence,) = on_machine(f"{KEY}.enable=true", f"{KEY}.command=[{program},--fast]")
    assert str(program) in sentence and "give its path, or a name on PATH" in sentence
    program.write_text("#!/bin/sh\n")
    assert len(on_machine(f"{KEY}.enable=true", f"{KEY}.command=[{program}]")) == 1
    program.chmod(0o755)
    assert on_machine(f"{KEY}.enable=true", f"{KEY}.command=[{program}]") == []
    assert len(on_machine(f"{KEY}.enable=true", f"{KEY}.command=[{folder}]")) == 1


def test_a_sandbox_needs_bubblewrap(folder, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    (sentence,) = on_machine(f"{KEY}.enable=true", f"{KEY}.command=[/bin/sh]", f"{KEY}.sandbox=true")
    assert "bwrap is not installed here" in sentence and "make setup-sandbox" in sentence


def test_an_evaluation_has_the_keys_own_checks_but_not_those_of_training(folder):
    config = load_config(None, [*ON, "algorithm.adv_estimator=gae", f"{KEY}.max_tokens_per_turn=4096"])
    mistakes = [sentence for sentence in known_mistakes(EVALUATION_CHECKS, config) if KEY in sentence]
    assert len(mistakes) == 1 and "max_tokens_per_turn" in mistakes[0]


def test_the_plan_says_who_plays_and_who_may_ask():
    text = process_plan(load_config(None, list(ON)))
    assert "agents        own_agents:play: 4 processes, 64 trajectories at once, 1800 s each" in text
    assert "1 gateway on 127.0.0.1, free ports\n" in text
    open_to_all = (f"{KEY}.sandbox=true", f"{KEY}.host=0.0.0.0", f"{KEY}.port=8100", f"{KEY}.num_gateways=2")
    text = process_plan(load_config(None, [*COMMAND, *open_to_all]))
    assert "sh -c exit: a process each in a sandbox, 64 trajectories" in text
    assert "2 gateways on 0.0.0.0, port 8100: whoever reaches this address may ask, and is answered only with" in text
    assert "agents" not in process_plan(load_config(None, []))


def test_the_recipe_of_an_agent_runs_it_in_a_sandbox_and_hidden_tests_score():
    config = load_config(recipe("agent_qwen3_8b"))
    agent = config.actor_rollout_ref.rollout.agent
    assert agent.enable and agent.sandbox and config.reward.function == "code_tests"
    servers = config.actor_rollout_ref.rollout.server.num_servers
    assert agent.max_open > servers * config.actor_rollout_ref.rollout.max_concurrency
    spec = model_spec(model_json_named("qwen3-8b"))
    assert shortage(settled(config, spec), spec) == []


def test_a_replayed_run_needs_no_agent():
    assert on_machine(f"{KEY}.enable=true", f"{KEY}.function=absent_agents:play", "trainer.replay=batches") == []
