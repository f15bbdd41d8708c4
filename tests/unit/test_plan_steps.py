"""A step's time by simulation, the search over layouts, and the command."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_dapo.__main__ import main
from megatron_dapo.commands.plan import search, step_time
from megatron_dapo.commands.plan.fitting import changed_overrides
from megatron_dapo.commands.plan.search import ConfigSource, candidates
from megatron_dapo.commands.plan.server_time import ServerSpeed
from megatron_dapo.commands.plan.shortage import shortage
from megatron_dapo.commands.plan.simulated_server import Machines
from megatron_dapo.commands.plan.simulation import Recipe
from megatron_dapo.commands.plan.step_time import Assumptions, PhaseTimes, phase_times, run_time, simulated
from megatron_dapo.commands.plan.training_time import TrainingTime
from megatron_dapo.config.keys import with_keys
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.recipes import recipe
from megatron_dapo.data.lengths import Lengths
from megatron_dapo.estimates.hardware import HARDWARE
from megatron_dapo.estimates.model_shapes import model_json_named
from megatron_dapo.estimates.recompute import least_that_fits
from megatron_dapo.huggingface.spec_reader import model_spec

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = Lengths(median=60, sigma=0.9, longest=280)
RECIPE = Recipe(train_batch_size=16, gen_batch_size=48, n=4, max_staleness=0, num_steps=4, warm_up=3)


RUNS = SimpleNamespace(run=lambda: None)


def parts(update: float, num_servers: int = 4) -> PhaseTimes:
    training = TrainingTime(update, tensor=0.0, bubble=0.0, optimizer=0.0, score=1.0, mfu=0.4)
    return PhaseTimes(
        ServerSpeed(0.008, 0.0001, slots=16, prefill_s=0.0),
        num_servers,
        server_tp=1,
        training=training,
        score=1.0,
        reference=0.0,
        critic=0.0,
        hand_over=0.5,
        push=0.25,
        prefill_s=0.125,
    )


def test_without_staleness_a_step_is_the_sum_of_its_parts():
    its_parts = parts(update=2.0)
    time = step_time.step_time(its_parts, RECIPE, LENGTHS, 0.5)
    assert its_parts.train_s == 3.5
    assert time.step == pytest.approx(time.sampling + its_parts.train_s + its_parts.push)
    assert 0 < time.tail < time.sampling
    assert time.trainer_idle == pytest.approx(time.sampling / time.step)


def test_a_slow_trainer_that_never_waits_takes_its_own_time_and_the_prefill():
    its_parts = parts(update=60.0)
    time = step_time.step_time(its_parts, replace(RECIPE, max_staleness=2), LENGTHS, 0.5)
    assert time.sampling == pytest.approx(0.0, abs=1e-6)
    assert time.step == pytest.approx(61.5 + 0.25 + 0.125)
    assert time.servers_idle > 0.5 and time.tail is None


@pytest.mark.parametrize(
    "machines",
    [
        # 16 servers with 2048 requests a step, and a quarter of both; the rest is chance: about 700
        # lengths, spread 0.9
        Machines(16, 16, 0.008, train_s=2.0, push_s=0.1, token_s_per_request=0.0001),
        Machines(1, 128, 0.008, train_s=20.0, push_s=0.1, token_s_per_request=0.0004),
    ],
    ids=["servers", "one server"],
)
def test_a_part_of_the_servers_or_of_one_is_as_fast_as_the_whole(monkeypatch, machines):
    for age in (0, 2):
        whole_recipe = Recipe(256, 256 * 3, 4, age, num_steps=4, warm_up=3)
        speeds = []
        for limit in (10**9, 512):
            monkeypatch.setattr(step_time, "SIMULATED_REQUESTS", limit)
            speeds.append(simulated(machines, whole_recipe, LENGTHS, 0.5).steps_per_s)
        assert speeds[1] == pytest.approx(speeds[0], rel=0.1)


def test_one_server_is_simulated_with_as_few_requests_as_many_are(monkeypatch):
    asked = []
    monkeypatch.setattr(step_time, "Simulation", lambda machines, recipe, *_: asked.append((machines, recipe)) or RUNS)
    simulated(Machines(1, 128, 0.008, 20.0, 0.1, 0.0004), Recipe(4096, 8192, 16, 0, 4, 3), LENGTHS, 0.5)
    ((machines, recipe),) = asked
    assert recipe.train_batch_size * recipe.n / 0.5 == pytest.approx(step_time.SIMULATED_REQUESTS, rel=0.2)
    assert machines.slots_per_server * machines.token_s_per_request == pytest.approx(128 * 0.0004)


def assumptions(acceptance: float = 0.45) -> Assumptions:
    return Assumptions(HARDWARE["h100"], Lengths.with_mean(2000, 0.9, 20480), 170, acceptance)


def test_a_step_with_agents_takes_their_tools_and_no_less_than_their_places():
    quick = step_time.step_time(parts(update=2.0), RECIPE, LENGTHS, 0.5)
    with_tools = step_time.step_time(replace(parts(update=2.0), tools=7.0), RECIPE, LENGTHS, 0.5)
    assert with_tools.sampling == pytest.approx(quick.sampling + 7.0)
    assert with_tools.step == pytest.approx(quick.step + 7.0)
    few_places = replace(parts(update=2.0), tools=7.0, places=100.0)
    assert step_time.step_time(few_places, RECIPE, LENGTHS, 0.5).sampling == 100.0
    ahead = step_time.step_time(few_places, replace(RECIPE, max_staleness=2), LENGTHS, 0.5)
    assert ahead.step == 100.0 and ahead.sampling == pytest.approx(100.0 - 3.5 - 0.25 - 0.125)
    assert 0.9 < ahead.servers_idle < 1


def test_rows_are_planned_as_responses(short_simulation):
    """Three rows per trajectory are three times the responses, for the trainer and the servers."""
    spec, keys = model_spec(model_json_named("qwen2.5-7b")), ["data.train_batch_size=64"]
    agent = [f"actor_rollout_ref.rollout.agent.{text}" for text in ("enable=true", "command=[play]", "max_open=32")]
    thrice = load_config(recipe("dapo_7b"), [*keys, "actor_rollout_ref.rollout.n=48"])
    rows = replace(assumptions(), rows=3.0, tools_s=60.0)
    run = phase_times(load_config(recipe("dapo_7b"), [*keys, *agent]), spec, rows)
    same = phase_times(thrice, spec, assumptions())
    assert (run.training, run.hand_over, run.score) == (same.training, same.hand_over, same.score)
    assert step_time.step_recipe(load_config(recipe("dapo_7b"), keys), 1, 3.0) == step_time.step_recipe(thrice, 1)
    writing = 3 * 2000 * (run.server.token_s + 32 / 2 * run.server.token_s_per_request)
    assert run.places == pytest.approx(64 * 16 / 0.45 / 32 * (writing + 60), rel=1e-3)
    assert same.places == 0


def test_a_run_costs_its_steps_times_its_gpus(short_simulation):
    config = load_config(recipe("dapo_7b"), ["trainer.total_training_steps=100", "data.train_batch_size=64"])
    run = run_time(config, model_spec(model_json_named("qwen2.5-7b")), assumptions(), (0,))
    (step,), (hours,), (rate,) = run.steps, run.gpu_hours, run.tokens_per_s
    assert run.num_gpus == 16 and run.num_trainer_gpus == 8
    assert hours == pytest.approx(step.step * 100 * 16 / 3600)
    assert rate == pytest.approx(64 * 16 * (170 + 2000) / step.step / 16)
    assert run.num_optimizer_steps == 2


@pytest.fixture
def small_search(monkeypatch):
    """Four nodes, 64 groups: seconds in place of a minute."""
    monkeypatch.setattr(step_time, "SIMULATED_REQUESTS", 200)
    monkeypatch.setattr(step_time, "MEASURED_STEPS", 1)
    overrides = ("trainer.nnodes=2", "actor_rollout_ref.rollout.server.nnodes=2", "data.train_batch_size=64")
    overrides += ("actor_rollout_ref.rollout.server.num_servers=4", "data.gen_batch_size=192")
    source = ConfigSource(Path(recipe("dapo_7b")), overrides, model_json_named("qwen2.5-7b"))
    return source, load_config(source.path, list(overrides))


def test_the_search_shows_the_ten_fastest_of_all_that_fit(small_search, monkeypatch):
    source, config = small_search
    spec = model_spec(source.model_json)
    monkeypatch.setattr(search, "NUM_SHOWN", 4)
    best = search.search(source, config, assumptions(), (0, 1, 2))
    every = [
        step_time.step_time(
            candidate.parts,
            step_time.step_recipe(candidate.config, candidate.max_staleness),
            assumptions().responses,
            assumptions().acceptance,
            source.simulate,
        ).step
        for candidate in candidates(source, config, assumptions(), (0, 1, 2))
    ]
    assert len(every) > 4
    assert [time.step for _, time in best] == sorted(every)[:4]
    for candidate, time in best:
        # one step of 200 requests, partly written ahead in the warm-up
        assert candidate.bound_s <= time.step * 1.1
        overrides = [*source.overrides, *changed_overrides(config, candidate.keys)]
        pasted = load_config(source.path, overrides)
        assert not shortage(pasted, spec)
        assert pasted.trainer.nnodes + pasted.actor_rollout_ref.rollout.server.nnodes == 4
        assert pasted.actor_rollout_ref.rollout.max_staleness == candidate.max_staleness


@pytest.mark.parametrize(("seconds", "is_tried"), [(109.0, True), (111.0, False)])
def test_the_search_tries_all_that_chance_could_make_faster(seconds, is_tried, monkeypatch, small_search):
    """A step of 100 s is the last one shown; the next candidate's bound is above it."""
    source, config = small_search
    offered = [
        search.Candidate({}, SimpleNamespace(step=100.0), None, 0, 99.0),
        search.Candidate({}, SimpleNamespace(step=95.0), None, 0, seconds),
    ]
    monkeypatch.setattr(search, "candidates", lambda *_: offered)
    monkeypatch.setattr(search, "step_recipe", lambda config, *_: config)
    monkeypatch.setattr(search, "step_time", lambda parts, recipe, *_: recipe)
    ((_, best),) = search.search(source, config, assumptions(), (0,), number=1)
    assert best.step == (95.0 if is_tried else 100.0)


def test_the_search_tries_context_parallel_sizes_that_a_run_would_accept(small_search):
    source, config = small_search
    layouts = [keys for _, keys in search._layouts(source, config, assumptions())]
    names = [f"{search.MEGATRON}.{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context")]
    sizes = [[keys[name] for name in names] for keys in layouts]
    assert all(16 % (tp * pp * cp) == 0 for tp, pp, cp in sizes)
    assert {cp for _, _, cp in sizes} == {1, 2, 4, 8}
    # 4 KV heads let TP be 4 at most: on 16 GPUs without PP the rest is CP or DP
    keys = layouts[sizes.index([4, 1, 4])]
    assert source.accepts(keys)
    assert not source.accepts(keys | {"actor_rollout_ref.model.use_remove_padding": False})


def test_the_search_takes_the_least_recomputation_that_fits(small_search):
    source, config = small_search
    layouts = [keys for _, keys in search._layouts(source, config, assumptions())]
    for keys in layouts:
        fitting = with_keys(config, keys)
        chosen = least_that_fits(fitting, source.actor)
        assert {f"{search.MEGATRON}.{name}": value for name, value in chosen.items()}.items() <= keys.items()
        assert not shortage(fitting, source.actor)
    assert len({keys[f"{search.MEGATRON}.recompute_granularity"] for keys in layouts}) > 1


def test_the_search_counts_a_critic_of_another_size(small_search):
    source, _ = small_search
    overrides = ("trainer.nnodes=2", "actor_rollout_ref.rollout.server.nnodes=2", "data.train_batch_size=64")
    overrides += ("actor_rollout_ref.rollout.server.num_servers=16", "actor_rollout_ref.rollout.server_urls=[]")
    source = replace(source, path=Path(recipe("ppo_qwen2.5_7b")), overrides=overrides)
    config = load_config(source.path, list(overrides))
    critic = model_spec(model_json_named("qwen2.5-14b"))
    larger = list(candidates(replace(source, critic=critic), config, assumptions(1.0), (0,)))
    equal = list(candidates(source, config, assumptions(1.0), (0,)))
    assert larger
    for candidate in larger:
        assert candidate.parts == phase_times(candidate.config, source.actor, assumptions(1.0), critic)
        assert not shortage(candidate.config, source.actor, critic)
    assert min(c.parts.critic for c in larger) > min(c.parts.critic for c in equal) > 0


def test_a_plan_refuses_lengths_that_the_named_model_has_no_positions_for(capsys):
    arguments = ["plan", "--config", recipe("dapo_7b"), "--model", "qwen3-8b", "data.max_response_length=40000"]
    arguments.append("actor_rollout_ref.actor.max_tokens_per_microbatch=43008")
    assert main(arguments) == 2
    assert "above the model's max_position_embeddings 40960" in capsys.readouterr().err


def test_the_controllers_share_of_a_core_is_that_of_all_tokens_that_servers_write():
    its_parts = parts(update=2.0, num_servers=24)
    busy = replace(its_parts, server=its_parts.server.scaled_to(5000.0))
    assert busy.controller_share == pytest.approx(24 * 5000 * step_time.CONTROLLER_S)


def test_the_command_shows_memory_time_and_its_assumptions(capsys, short_simulation):
    arguments = ["plan", "--config", recipe("dapo_7b"), "--mean-length", "2000", "data.train_batch_size=64"]
    assert main([*arguments, "--staleness", "0,1", "--hardware", "H200"]) == 0
    shown = capsys.readouterr().out
    assert "of 141 GB per GPU" in shown and "qwen2.5-7b on 16 H200" in shown
    assert "responses of 2000 tokens on average (spread 0.9" in shown
    assert "max_staleness K                                    0           1\n" in shown


def test_servers_that_keep_their_caches_at_a_push_prefill_nothing_again():
    config = load_config(recipe("dapo_7b"), [])
    spec = model_spec(model_json_named("qwen2.5-7b"))
    kept = with_keys(config, {"weight_sync.pause_mode": "in_place"})
    assert phase_times(config, spec, assumptions()).prefill_s > phase_times(kept, spec, assumptions()).prefill_s == 0


def test_groups_that_are_masked_are_not_sampled_anew(capsys, short_simulation):
    masked = ["algorithm.dynamic_sampling.form=mask", "data.train_batch_size=64", "data.gen_batch_size=64"]
    arguments = ["plan", "--config", recipe("dapo_7b"), "--staleness", "0", *masked]
    assert main(arguments) == 0
    assert "100% of the groups carry signal" in capsys.readouterr().out
    assert main([*arguments, "--acceptance", "0.5"]) == 2
    assert "the config replaces no groups" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "plan needs a config"),
        (["--config", recipe("dapo_7b"), "--model", "gpt-9"], "--model is gpt-9"),
        (["--config", recipe("dapo_7b"), "--hardware", "abacus"], "--hardware is abacus"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--config", recipe("dapo_7b"), "--mean-length", "30000"], "--mean-length is 30000"),
        (["--config", recipe("dapo_7b"), "--rows", "0.5"], "--rows is 0.5"),
        (["--config", recipe("dapo_7b"), "actor_rollout_ref.model.path=models/mine"], "models/mine"),
        (
            ["--config", recipe("dapo_7b"), "--model", "llama-3.1-70b", "data.train_batch_size=64"],
            "A trainer GPU would need",
        ),
        (["--config", recipe("grpo_baseline"), "--model", "qwen2.5-7b", "--acceptance", "0.5"], "--acceptance is 0.5"),
        (
            ["--config", recipe("dapo_7b"), "--hardware", "a100", "actor_rollout_ref.actor.megatron.fp8=hybrid"],
            "fp8 is hybrid with fp8_recipe tensorwise, which needs compute capability 8.9, but a100 has 8.0",
        ),
        (
            [
                "--config",
                recipe("dapo_7b"),
                "--search",
                "actor_rollout_ref.rollout.server.nnodes=0",
                "trainer.nnodes=2",
            ],
            "server.nnodes is 0; set it",
        ),
        (
            ["--config", recipe("dapo_7b"), "--search", "actor_rollout_ref.rollout.server_urls=[http://a:1]"],
            "names running servers",
        ),
    ],
)
def test_a_mistake_is_a_sentence_and_exit_code_2(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(step_time, "SIMULATED_REQUESTS", 50)
    assert main(["plan", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--acceptance=0", "--spread=x", "--staleness=0,-1", "--mean-length=nan"])
def test_an_option_that_makes_no_sense_is_refused(option, capsys):
    with pytest.raises(SystemExit) as end:
        main(["plan", "--config", recipe("dapo_7b"), option])
    assert end.value.code == 2
    assert option.split("=")[0] in capsys.readouterr().err


def test_a_plan_waits_for_no_import_of_torch():
    code = "import sys; import megatron_dapo.commands.plan.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
