"""Every shipped recipe parses, has no contradictions, and switches on the features in its name."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from megatron_dapo.checks.run_checks import load_for_evaluation, validate
from megatron_dapo.commands.plan.process_plan import process_plan
from megatron_dapo.commands.plan.shortage import shortage
from megatron_dapo.commands.plan.simulated_server import Machines
from megatron_dapo.commands.plan.simulation import Recipe, Simulation, random_draws
from megatron_dapo.commands.plan.step_time import Assumptions, slots_in_cache
from megatron_dapo.common.sizes import GB
from megatron_dapo.config.derived import (
    dapo_techniques,
    effective_clip,
    gen_batch_size,
    needs_reference,
    num_optimizer_steps_per_rollout_step,
    parallel_sizes,
    samples_per_rollout_step,
    server_option,
    servers_per_node,
    shares_gpus,
    uses_critic,
    world_size,
)
from megatron_dapo.config.keys import value_of
from megatron_dapo.config.loader import EXTENDS, load_config, to_yaml
from megatron_dapo.config.recipes import recipe as path_of
from megatron_dapo.config.schema.config import Config
from megatron_dapo.config.yaml_dialect import parse_yaml
from megatron_dapo.data.lengths import Lengths
from megatron_dapo.data.tokenizer import load_tokenizer
from megatron_dapo.estimates.hardware import HARDWARE
from megatron_dapo.estimates.memory import trainer_memory
from megatron_dapo.estimates.model_shapes import model_json_named
from megatron_dapo.estimates.pipeline import split_of
from megatron_dapo.estimates.recompute import settled
from megatron_dapo.estimates.server_memory import server_memory
from megatron_dapo.huggingface.spec_reader import model_spec
from megatron_dapo.rewards.reward_registry import score_response
from megatron_dapo.rollout.build_rollout import load_prompts
from tests.fake_rollout import write_files
from tests.model_json import QWEN2_5_7B, QWEN2_5_32B
from tests.proofs import amount

pytestmark = pytest.mark.unit

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = sorted(path.name for path in CONFIGS.glob("*.yaml"))
MODELS = {  # the sizes in the published config.json of each model
    "models/Qwen2.5-32B": QWEN2_5_32B,
    "models/Qwen2.5-7B": QWEN2_5_7B,
    "models/Qwen2.5-1.5B": model_json_named("qwen2.5-1.5b"),
    "models/Qwen3-30B-A3B": model_json_named("qwen3-30b-a3b"),
    "models/Qwen3-235B-A22B": model_json_named("qwen3-235b-a22b"),
    "models/text/Qwen3.5-9B": model_json_named("qwen3.5-9b"),
    "models/text/Qwen3.5-35B-A3B": model_json_named("qwen3.5-35b-a3b"),
    "models/Qwen2.5-3B-Instruct": model_json_named("qwen2.5-3b"),
    "models/Qwen3-8B": model_json_named("qwen3-8b"),
}
RECIPES_OF_GPUS = [name for name in RECIPES if load_config(CONFIGS / name, []).actor_rollout_ref.model.path in MODELS]
ALL_FOUR_ON = {"clip_higher": True, "dynamic_sampling": True, "token_level_loss": True, "overlong_shaping": True}


def recipe(name: str) -> Config:
    return load_config(CONFIGS / name, [])


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_free_of_mistakes(name):
    config = recipe(name)
    validate(config, MODELS.get(config.actor_rollout_ref.model.path), check_files=False)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_being_written_out(name, tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(recipe(name)), encoding="utf-8")
    assert load_config(tmp_path / "config.yaml", []) == recipe(name)


def values(section: dict, prefix: str = "") -> dict[str, object]:
    """Return key -> value of all keys of a config in one dictionary."""
    by_key: dict[str, object] = {}
    for key, value in section.items():
        by_key |= values(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return by_key


def stated(path: Path) -> dict[str, object]:
    """Return a recipe file's own settings, by the dotted names of the keys."""
    return values(parse_yaml(path.read_text(encoding="utf-8"))[0])


EXTENDING = [path for path in sorted(CONFIGS.rglob("*.yaml")) if EXTENDS in stated(path)]


@pytest.mark.parametrize("path", EXTENDING, ids=lambda path: path.stem)
def test_a_recipe_that_extends_another_states_nothing_but_its_differences(path):
    keys = stated(path)
    base, config = load_config(path.parent / keys.pop(EXTENDS)), load_config(path)
    assert keys and [key for key in keys if value_of(config, key) == value_of(base, key)] == []


@pytest.mark.parametrize("name", [name for name in RECIPES if "dapo_" in name])
def test_a_dapo_recipe_has_all_four_techniques_on_and_its_model_is_checked(name):
    config = recipe(name)
    assert dapo_techniques(config) == ALL_FOUR_ON
    assert config.actor_rollout_ref.model.path in MODELS
    assert not needs_reference(config)


# The reference run, DAPO on Qwen2.5-32B: arXiv 2503.14476, section 4.1 ("Training Details"). The
# authors' public recipe (verl, recipe/dapo) fills the paper's gaps: prompts, dual clip, details of
# the optimizer. That recipe draws gen batches of 1536 prompts and discards a step's surplus over
# 512.
PUBLISHED = {
    "data.train_batch_size": 512,
    "data.max_prompt_length": 2048,
    "data.truncation": "left",
    "data.filter_overlong_prompts": False,
    "data.dedup": True,  # the published file has every prompt about a hundred times
    "data.max_response_length": 20480,  # 16384 expected + 4096
    "algorithm.adv_estimator": "grpo",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.dynamic_sampling.enable": True,
    "algorithm.dynamic_sampling.filter_mode": "strict",
    "algorithm.dynamic_sampling.max_num_gen_batches": 10,
    "algorithm.overlong_reward_shaping.enable": True,
    "algorithm.overlong_reward_shaping.buffer_len": 4096,
    # max_response_length - buffer_len = 16384
    "algorithm.overlong_reward_shaping.expected_len": None,
    "algorithm.overlong_reward_shaping.penalty_factor": 1.0,
    "actor_rollout_ref.rollout.n": 16,
    "actor_rollout_ref.rollout.temperature": 1.0,
    "actor_rollout_ref.rollout.top_p": 1.0,
    "actor_rollout_ref.rollout.top_k": -1,
    "actor_rollout_ref.rollout.val_temperature": 1.0,
    "actor_rollout_ref.rollout.val_top_p": 0.7,
    "actor_rollout_ref.rollout.val_n": 32,  # avg@32
    "actor_rollout_ref.actor.ppo_mini_batch_size": 32,  # x 16 = 512 responses
    "actor_rollout_ref.actor.ppo_epochs": 1,
    "actor_rollout_ref.actor.use_dapo": True,
    "actor_rollout_ref.actor.clip_ratio_low": 0.2,
    "actor_rollout_ref.actor.clip_ratio_high": 0.28,
    "actor_rollout_ref.actor.clip_ratio_c": 10.0,
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "actor_rollout_ref.actor.entropy_coef": 0.0,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.optim.lr_decay_style": "constant",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": 20,
    "actor_rollout_ref.actor.optim.weight_decay": 0.1,
    "actor_rollout_ref.actor.optim.clip_grad": 1.0,
    "actor_rollout_ref.actor.optim.betas": (0.9, 0.999),
    "reward.function": "math_dapo",
}
# Trainer nodes, server nodes, (TP, PP, DP), servers,
# GPUs per server: all GPUs of 8 per node are used.
NODES = {"dapo_32b.yaml": (8, 8, (4, 4, 2), 8, 8), "dapo_7b.yaml": (1, 1, (2, 1, 1), 2, 4)}
# Changes made by sampling beside training: steps of a quarter of the size, four times the number.
# Also the split of the nodes, and the allowed age of a group.
ASYNCHRONOUS = {
    "data.train_batch_size": (512, 128),
    "data.gen_batch_size": (1536, 384),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": (20, 80),
    "actor_rollout_ref.rollout.max_staleness": (0, 4),
    "actor_rollout_ref.rollout.server.nnodes": (8, 12),
    "actor_rollout_ref.rollout.server.num_servers": (8, 12),
    "trainer.experiment_name": ("dapo_32b", "dapo_32b_async"),
    "trainer.nnodes": (8, 4),
    "trainer.total_training_steps": (500, 2000),
    "trainer.test_freq": (5, 20),
    "trainer.save_interval": (1, 4),
    "trainer.keep_every": (100, 400),
}


@pytest.mark.parametrize("key", PUBLISHED)
@pytest.mark.parametrize("name", NODES)
def test_the_reference_runs_recipes_have_its_published_values(name, key):
    section, value = recipe(name), PUBLISHED[key]
    for part in key.split("."):
        section = getattr(section, part)
    assert section == value


@cache
def discarded_share(train_batch_size: int, gen_batch_size: int, acceptance: float) -> float:
    """Of all generated groups, by the program's own queue and admission, in `make test` of a quarter
    of them; the lengths of responses have no part in it."""
    part = amount(4, 1)
    steps = Recipe(train_batch_size // part, gen_batch_size // part, n=2, max_staleness=0, num_steps=8, warm_up=0)
    draws = random_draws(Lengths(median=1, sigma=0.0, longest=1), acceptance, n=2, seed=3)
    machines = Machines(num_servers=1, slots_per_server=4096, token_s=1.0, train_s=1.0, push_s=0.0)
    return Simulation(machines, steps, draws).run().discarded_share


@pytest.mark.parametrize("acceptance", [0.3, 0.45, 0.6, 0.8])
@pytest.mark.parametrize("name", NODES)
def test_the_reference_runs_recipes_train_on_their_own_weights_and_discard_little(name, acceptance):
    config = recipe(name)
    assert discarded_share(config.data.train_batch_size, gen_batch_size(config), acceptance) < 0.15
    sampling = config.algorithm.dynamic_sampling
    num_prompts = sampling.max_num_gen_batches * gen_batch_size(config)
    assert acceptance * num_prompts > config.data.train_batch_size and sampling.on_exhausted == "train_partial"
    assert config.actor_rollout_ref.rollout.max_staleness == 0
    assert config.algorithm.rollout_correction.rollout_is == "token"


@pytest.mark.parametrize("name", NODES)
def test_the_reference_runs_recipes_fill_their_nodes_and_take_16_optimizer_steps_per_rollout_step(name):
    config, (trainer_nodes, server_nodes, parallel, num_servers, gpus) = recipe(name), NODES[name]
    server, actor = config.actor_rollout_ref.rollout.server, config.actor_rollout_ref.actor
    sizes = parallel_sizes(config)
    assert (config.trainer.nnodes, server.nnodes, config.trainer.n_procs_per_node) == (trainer_nodes, server_nodes, 8)
    assert (sizes.tp, sizes.pp, sizes.dp) == parallel and actor.megatron.sequence_parallel
    assert (server.num_servers, server.tensor_model_parallel_size) == (num_servers, gpus)
    assert num_servers * gpus == 8 * server_nodes and servers_per_node(config) * gpus == 8
    assert (samples_per_rollout_step(config), num_optimizer_steps_per_rollout_step(config)) == (8192, 16)
    assert actor.max_tokens_per_microbatch >= config.data.max_prompt_length + config.data.max_response_length
    assert config.data.val_files and config.trainer.test_freq > 0


def test_the_asynchronous_recipe_differs_from_the_synchronous_one_by_steps_split_and_age_alone():
    synchronous, asynchronous = (values(recipe(name).model_dump()) for name in ("dapo_32b.yaml", "dapo_32b_async.yaml"))
    assert synchronous.keys() == asynchronous.keys()
    both = {key: (value, asynchronous[key]) for key, value in synchronous.items() if asynchronous[key] != value}
    assert both == ASYNCHRONOUS


# Changes made by training and sampling on the same GPUs.
IN_TURNS = {
    "actor_rollout_ref.hybrid_engine": (False, True),
    "actor_rollout_ref.rollout.max_concurrency": (288, 240),
    "actor_rollout_ref.rollout.server.nnodes": (8, 0),
    "actor_rollout_ref.rollout.server.num_servers": (8, 16),
    "trainer.experiment_name": ("dapo_32b", "dapo_32b_in_turns"),
    "trainer.nnodes": (8, 16),
}


def test_the_recipe_in_turns_is_the_reference_run_on_as_many_nodes():
    apart, in_turns = (values(recipe(name).model_dump()) for name in ("dapo_32b.yaml", "dapo_32b_in_turns.yaml"))
    assert {key: (value, in_turns[key]) for key, value in apart.items() if in_turns[key] != value} == IN_TURNS
    config = recipe("dapo_32b_in_turns.yaml")
    server = config.actor_rollout_ref.rollout.server
    assert world_size(config) == server.num_servers * server.tensor_model_parallel_size == 128
    spec = model_spec(QWEN2_5_32B)
    assert shortage(settled(config, spec), spec) == []


def test_the_asynchronous_recipe_takes_as_many_optimizer_steps_on_as_many_nodes_and_its_plan_says_the_age():
    synchronous, asynchronous = recipe("dapo_32b.yaml"), recipe("dapo_32b_async.yaml")
    for config in (synchronous, asynchronous):
        server = config.actor_rollout_ref.rollout.server
        assert config.trainer.nnodes + server.nnodes == 16
        assert server.num_servers * server.tensor_model_parallel_size == 8 * server.nnodes
        assert num_optimizer_steps_per_rollout_step(config) * config.trainer.total_training_steps == 8000
    sizes = parallel_sizes(asynchronous)
    assert (sizes.tp, sizes.pp, sizes.cp, sizes.dp) == (4, 4, 2, 1)
    assert num_optimizer_steps_per_rollout_step(asynchronous) == 4
    plan = process_plan(asynchronous)
    for words in (
        "staleness     max_staleness 4 weight versions: when a step begins to train on a token",
        "it is at most 16 optimizer steps old",  # 4 x 4
        "at most 640 groups are drawn and not yet trained on",  # 5 x 128
        "32 ranks train (25%), 96 sample",
        "prompts drawn one by one; 384 count as a gen batch",
    ):
        assert words in plan, plan
    assert "staleness     max_staleness 0: a step is trained on its own weights' responses" in process_plan(synchronous)
    assert "64 ranks train (50%), 64 sample" in process_plan(synchronous)
    assert "prompts drawn in waves, a gen batch of 1536 at most" in process_plan(synchronous)


# (TP, PP, DP, EP), layers of the chunks, GB of the fullest GPU, samples of full length that a
# server's cache holds
MIXTURES = {
    "dapo_qwen3_30b_a3b.yaml": ((4, 1, 4, 8), "48", 74, 90),
    "dapo_qwen3_235b_a22b.yaml": ((4, 6, 4, 8), "15, 4 x 16, 15", 72, 10),
}
# differences of a mixture's recipe from dapo_32b.yaml: nothing of the algorithm
OTHERWISE = re.compile(
    r"actor_rollout_ref\.(model\.path|actor\.megatron\.\w+_size|rollout\.(max_concurrency|server\.\w+))|trainer\.(experiment_name|nnodes|save_interval)"
)


@pytest.mark.parametrize("name", MIXTURES)
def test_the_recipes_of_mixtures_have_the_algorithm_of_the_reference_run_and_fit_into_memory(name):
    reference, config = recipe("dapo_32b.yaml"), recipe(name)
    spec = model_spec(MODELS[config.actor_rollout_ref.model.path])
    other = {key for key, value in values(config.model_dump()).items() if values(reference.model_dump())[key] != value}
    assert all(OTHERWISE.fullmatch(key) for key in other), other
    parallel, layers, trainer_gb, num_samples = MIXTURES[name]
    config, sizes = settled(config, spec), parallel_sizes(config)
    assert (sizes.tp, sizes.pp, sizes.dp, sizes.ep) == parallel and str(split_of(spec, sizes)) == layers
    server = config.actor_rollout_ref.rollout.server
    assert server.num_servers * server.tensor_model_parallel_size == 8 * server.nnodes
    assert round(trainer_memory(config, spec).total / GB) == trainer_gb <= config.trainer.gpu_memory_gb - 6
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert server_memory(config, spec).num_tokens // longest == num_samples


def test_the_recipe_with_fp8_servers_is_the_same_run_with_more_samples_on_each_server():
    plain, fp8 = (values(recipe(f"dapo_qwen3_235b_a22b{ending}.yaml").model_dump()) for ending in ("", "_fp8"))
    changes = {key.rpartition(".")[2]: (value, fp8[key]) for key, value in plain.items() if fp8[key] != value}
    extra = ["--context-length", "24576", "--chunked-prefill-size", "4096"]
    assert changes == {
        "quantization": (None, "fp8"),
        "max_concurrency": (64, 192),
        "max_running_requests": (64, 192),
        "extra_args": (extra, [*extra, "--ep-size", "2"]),
        "experiment_name": ("dapo_qwen3_235b_a22b", "dapo_qwen3_235b_a22b_fp8"),
    }


@pytest.mark.parametrize("name", RECIPES_OF_GPUS)
def test_a_recipe_for_gpus_loses_few_steps_with_its_nodes(name):
    config = recipe(name)
    most = 4 if config.actor_rollout_ref.rollout.max_staleness else 2  # small ones
    most = 100 if config.sft.enable else most  # seconds each
    assert 1 <= recipe(name).trainer.save_interval <= most and recipe(name).trainer.keep_last


ONE_NODE = {  # GPUs that train and, if others sample, those
    "one_gpu_1.5b.yaml": (1, 0),
    "one_node_7b.yaml": (8, 0),
    "one_node_7b_async.yaml": (4, 4),
    "one_node_qwen3_30b_a3b.yaml": (8, 0),
    "one_node_qwen3_30b_a3b_full.yaml": (8, 0),
    "one_node_qwen3.5_9b.yaml": (8, 0),
    "two_nodes_qwen3.5_35b_a3b.yaml": (16, 0),
}


@pytest.mark.parametrize("name", ONE_NODE)
def test_the_recipes_of_one_node_or_two_use_all_their_gpus_and_fit(name):
    config, (trainers, others) = recipe(name), ONE_NODE[name]
    spec = model_spec(MODELS[config.actor_rollout_ref.model.path])
    server = config.actor_rollout_ref.rollout.server
    sampling = server.num_servers * server.tensor_model_parallel_size
    assert world_size(config) == trainers and sampling == (others or trainers)
    assert shares_gpus(config) == (not others)
    assert shortage(settled(config, spec), spec) == []
    assert dapo_techniques(config) == ALL_FOUR_ON
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert config.actor_rollout_ref.actor.max_tokens_per_microbatch >= longest
    assert int(server.extra_args[1]) > longest


FROM_THE_PLAN = [name for name in RECIPES_OF_GPUS if "# responses of mean length that" in (CONFIGS / name).read_text()]


@pytest.mark.parametrize("name", FROM_THE_PLAN)
def test_a_recipe_runs_as_many_requests_as_the_plan_has_slots_where_it_says_so(name):
    config = recipe(name)
    spec = model_spec(MODELS[config.actor_rollout_ref.model.path])
    config = settled(config, spec)
    slots = slots_in_cache(config, spec, Assumptions.usual(config, HARDWARE["h100"]))
    assert config.actor_rollout_ref.rollout.max_concurrency == pytest.approx(slots, rel=0.02)


@pytest.mark.parametrize("name", ["one_node_qwen3.5_9b.yaml", "two_nodes_qwen3.5_35b_a3b.yaml"])
def test_states_and_cache_of_a_hybrids_recipe_last_for_as_many_requests_and_graphs_for_all(name):
    config = recipe(name)
    spec = model_spec(MODELS[config.actor_rollout_ref.model.path])
    most = config.actor_rollout_ref.rollout.max_concurrency
    config = settled(config, spec)
    assert server_memory(config, spec).num_requests == pytest.approx(most, rel=0.02)
    assert server_option(config, "--cuda-graph-max-bs-decode") == str(most)


def test_the_asynchronous_recipe_of_one_node_differs_by_split_and_age_alone():
    in_turns, beside = (values(recipe(name).model_dump()) for name in ("one_node_7b.yaml", "one_node_7b_async.yaml"))
    other = {key for key, value in in_turns.items() if beside[key] != value}
    layout = re.compile(
        r"actor_rollout_ref\.(hybrid_engine|actor\.megatron\.\w+_size|rollout\.(max_\w+|server\.\w+))|trainer\.\w+"
    )
    assert all(layout.fullmatch(key) for key in other), other


def test_the_two_recipes_of_a_mixture_on_one_node_differ_by_what_is_trained():
    adapters, whole = (values(recipe(f"one_node_qwen3_30b_a3b{end}.yaml").model_dump()) for end in ("", "_full"))
    other = {key for key, value in adapters.items() if whole[key] != value}
    assert {"actor_rollout_ref.model.lora_rank", "actor_rollout_ref.actor.optim.lr"} <= other
    assert not any(key.startswith(("data.", "algorithm.")) for key in other)


@pytest.mark.parametrize("name", [*NODES, "grpo_baseline.yaml"])
def test_the_reference_runs_recipes_do_not_fall_back_to_slower_layers_in_silence(name):
    assert recipe(name).actor_rollout_ref.actor.megatron.use_transformer_engine == "on"


def test_the_largest_recipes_servers_have_time_to_start_and_hold_every_sample():
    config = recipe("dapo_32b.yaml")
    server = config.actor_rollout_ref.rollout.server
    option, context_length = server.extra_args
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert option == "--context-length" and longest < int(context_length) <= QWEN2_5_32B["max_position_embeddings"]
    assert server.startup_timeout_s >= 1800


def test_the_ppo_recipe_has_a_critic_that_learns_first_and_tells_so():
    config = recipe("ppo_qwen2.5_7b.yaml")
    assert uses_critic(config) and needs_reference(config) and config.trainer.critic_warmup > 0
    assert (
        config.actor_rollout_ref.model.path in MODELS
        and config.critic.optim.lr > config.actor_rollout_ref.actor.optim.lr
    )
    assert (config.critic.value_loss_coef, config.critic.cliprange_value, config.algorithm.lam) == (0.5, 0.2, 0.95)
    plan = process_plan(config)
    assert "with a value head" in plan and "only the critic trains in the first 5 rollout steps" in plan


@pytest.mark.parametrize(
    "names", [("grpo_baseline.yaml", "dapo_7b.yaml"), ("alfworld_grpo_3b.yaml", "alfworld_dapo_3b.yaml")]
)
def test_a_baseline_differs_from_its_recipe_by_the_algorithm_alone(names):
    baseline, dapo = map(recipe, names)
    assert not any(dapo_techniques(baseline).values()) and needs_reference(baseline)
    assert baseline.actor_rollout_ref.model == dapo.actor_rollout_ref.model
    assert baseline.actor_rollout_ref.rollout == dapo.actor_rollout_ref.rollout
    assert baseline.actor_rollout_ref.actor.optim == dapo.actor_rollout_ref.actor.optim
    assert baseline.actor_rollout_ref.actor.megatron == dapo.actor_rollout_ref.actor.megatron
    assert baseline.data.model_copy(update={"gen_batch_size": dapo.data.gen_batch_size}) == dapo.data
    assert baseline.reward == dapo.reward


def test_the_agent_recipe_has_the_published_agent_values_and_plays_alfworld():
    config = recipe("alfworld_dapo_3b.yaml")
    actor, shaping = config.actor_rollout_ref.actor, config.algorithm.overlong_reward_shaping
    assert (shaping.truncation_penalty, shaping.soft_penalty_mode, shaping.buffer_len) == (-0.3, "additive", 0)
    assert config.algorithm.dynamic_sampling.filter_mode == "strict"
    assert (effective_clip(config), actor.loss_agg_mode) == ((0.2, 0.28), "token-mean")
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    assert (
        multi_turn.enable
        and multi_turn.environment == "examples.text_games.alfworld:Alfworld"
        and config.reward.function == "environment"
    )


ROWS = {  # as the published files have them: name -> (row, the end of a right response)
    "aime24": (
        ({"id": 60, "problem": "Every morning ...", "solution": "...", "answer": "204", "url": "u", "year": "2024"},
         "Answer: 204"),
        ({"id": 67, "problem": "There exist ...", "solution": "...", "answer": "025", "url": "u", "year": "2024"},
         "Answer: 25"),
    ),
    "aime25": (
        ({"question": "Find the sum ...", "answer": "70"}, "Answer: $70$"),
        ({"question": "Suppose ...", "answer": "336^\\circ"}, "Answer: 336"),
    ),
    "math500": (
        ({"problem": "Convert ...", "solution": "...", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
          "subject": "Precalculus", "level": 2, "unique_id": "test/precalculus/807.json"},
         "\\boxed{(3, \\frac{\\pi}{2})}"),
    ),
    "amc23": (
        ({"id": "0", "question": "Cities A and B ...", "answer": "27"}, "\\boxed{27}"),
        ({"id": 0, "question": "Cities A and B ...", "answer": 27.0, "url": "u"}, "\\boxed{27}"),
    ),
}  # fmt: skip


def test_every_recipe_of_an_evaluation_has_a_published_row():
    assert {path.stem for path in (CONFIGS / "eval").glob("*.yaml")} == ROWS.keys()


@pytest.mark.parametrize("name, row, answer", [(name, *pair) for name, rows in ROWS.items() for pair in rows])
def test_published_files_are_read_and_scored_as_they_are(name, row, answer, tmp_path):
    write_files(tmp_path)  # a tokenizer
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5_32B))
    file = tmp_path / "file.jsonl"
    file.write_text(json.dumps(row) + "\n")
    overrides = [
        f"data.val_files=[{file}]",
        f"actor_rollout_ref.model.path={tmp_path}",
        "data.apply_chat_template=false",
    ]
    config = load_for_evaluation(path_of(f"eval/{name}"), overrides)
    (prompt,) = load_prompts(config.data.val_files, config, load_tokenizer(tmp_path))
    question = row.get("problem") or row["question"]
    assert question in prompt.text and prompt.text != question and prompt.data_source == name
    for response, right in ((f"so\n{answer}", True), ("so \\boxed{5}\nAnswer: 5", False)):
        score = score_response(
            config.reward.function, config.reward.kwargs, prompt.data_source, response, prompt.ground_truth, {}
        )
        assert score.correct is right
