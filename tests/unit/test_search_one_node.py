"""`plan --search` inside one node and on one GPU: it finds the best of all; what it shows runs."""

import itertools
import shlex
from pathlib import Path

import pytest

from megatron_dapo.commands.plan import search, step_time
from megatron_dapo.commands.plan.fitting import changed_overrides
from megatron_dapo.commands.plan.search import ConfigSource, candidates, gpus_of, search_report
from megatron_dapo.commands.plan.shortage import shortage
from megatron_dapo.commands.plan.step_time import Assumptions, phase_times, step_recipe
from megatron_dapo.config.keys import value_of, with_keys
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.recipes import recipe
from megatron_dapo.estimates.hardware import HARDWARE
from megatron_dapo.estimates.model_shapes import model_json_named
from megatron_dapo.estimates.recompute import settled
from megatron_dapo.huggingface.spec_reader import model_spec
from tests.proofs import proof

pytestmark = pytest.mark.unit

MEGATRON, ROLLOUT = search.MEGATRON, search.ROLLOUT
SERVER = search.SERVER


def source_of(name: str, model: str, *overrides: str):
    source = ConfigSource(Path(recipe(name)), overrides, model_json_named(model))
    config = settled(load_config(source.path, overrides), model_spec(source.model_json))
    return source, config, Assumptions.usual(config, HARDWARE["h100"])


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(step_time, "SIMULATED_REQUESTS", 200)
    monkeypatch.setattr(step_time, "MEASURED_STEPS", 1)


def step_of(source: ConfigSource, config, assumed, age: int) -> float:
    parts = phase_times(config, source.actor, assumed)
    return step_time.step_time(parts, step_recipe(config, age), assumed.responses, assumed.acceptance).step


def every_choice(source: ConfigSource, config, ages):
    """All ways to use four GPUs, each written out: sharing, or so many of each; layouts,
    recomputation, Adam on the host; servers of each size with a full cache; K."""
    layouts = [(tp, pp, cp) for tp, pp, cp in itertools.product((1, 2, 4), repeat=3)]
    recomputes = [{"granularity": "none"}, {"granularity": "full"}]
    for ranks, (tp, pp, cp), recompute, offloaded, server_tp in itertools.product(
        (1, 2, 3, 4), layouts, recomputes, (0.0, 1.0), (1, 2, 4)
    ):
        others = 4 if ranks == 4 else 4 - ranks
        if ranks % (tp * pp * cp) or others % server_tp:
            continue
        keys = {
            search.SHARED: ranks == 4,
            "trainer.n_procs_per_node": ranks,
            f"{SERVER}.num_servers": others // server_tp,
            f"{SERVER}.tensor_model_parallel_size": server_tp,
            f"{MEGATRON}.tensor_model_parallel_size": tp,
            f"{MEGATRON}.pipeline_model_parallel_size": pp,
            f"{MEGATRON}.context_parallel_size": cp,
            f"{MEGATRON}.sequence_parallel": tp > 1,
            f"{MEGATRON}.recompute_granularity": recompute["granularity"],
            f"{MEGATRON}.optimizer_offload_fraction": offloaded,
            f"{ROLLOUT}.max_concurrency": 10**6,
        }
        changed = with_keys(config, keys)
        if source.accepts(keys) and not shortage(changed, source.actor):
            yield from ((changed, age) for age in ages if not age or ranks < 4)


@proof
def test_of_all_ways_to_use_four_gpus_the_fastest_is_found(monkeypatch):
    monkeypatch.setattr(step_time, "SIMULATED_REQUESTS", 10**9)  # all: no part stands for the whole
    monkeypatch.setattr(step_time, "MEASURED_STEPS", 2)
    overrides = ("trainer.n_procs_per_node=4", f"{MEGATRON}.tensor_model_parallel_size=2", f"{SERVER}.num_servers=4")
    overrides += (f"{SERVER}.tensor_model_parallel_size=1", "data.train_batch_size=8", "data.gen_batch_size=24")
    overrides += ("actor_rollout_ref.actor.ppo_mini_batch_size=8",)
    source, config, assumed = source_of("one_node_7b", "qwen2.5-1.5b", *overrides)
    every = list(every_choice(source, config, (0, 1)))
    best = min(step_of(source, changed, assumed, age) for changed, age in every)
    rows = search.search(source, config, assumed, (0, 1))
    assert len(every) > 50
    assert rows[0][1].step == pytest.approx(best, rel=0.01)


def test_what_is_shown_is_pasted_runs_and_fits(quick):
    source, config, assumed = source_of(
        "one_node_7b", "qwen2.5-7b", "data.train_batch_size=32", "data.gen_batch_size=96"
    )
    rows = search.search(source, config, assumed, (0, 1, 2))
    assert len(rows) == search.NUM_SHOWN
    for candidate, _ in rows:
        pasted = load_config(source.path, [*source.overrides, *changed_overrides(source.as_read, candidate.keys)])
        assert shortage(settled(pasted, source.actor), source.actor) == []
        assert gpus_of(pasted) == 8
        assert value_of(pasted, f"{ROLLOUT}.max_concurrency") == candidate.parts.server.slots
    every = list(candidates(source, config, assumed, (0, 1)))
    ranks = {candidate.keys["trainer.n_procs_per_node"] for candidate in every}
    assert {2, 4, 8} <= ranks
    assert all(candidate.max_staleness == 0 for candidate in every if candidate.keys[search.SHARED])
    assert len({candidate.keys[f"{SERVER}.tensor_model_parallel_size"] for candidate in every}) > 1


def test_on_one_gpu_sharing_it_is_the_only_way(quick):
    source, config, assumed = source_of("one_gpu_1.5b", "qwen2.5-1.5b", "trainer.gpu_memory_gb=24")
    rows = search.search(source, config, assumed, (0, 1))
    assert rows and all(candidate.keys[search.SHARED] for candidate, _ in rows)
    assert {candidate.keys[f"{MEGATRON}.optimizer_offload_fraction"] for candidate, _ in rows} == {1.0}


def test_a_mixture_that_does_not_fit_is_found_with_adam_on_the_host_and_with_adapters(quick):
    source, config, assumed = source_of("one_node_qwen3_30b_a3b_full", "qwen3-30b-a3b", "data.train_batch_size=32")
    text = search_report(source, config, assumed, (0,))
    table, _, commands = text.partition("\n\n")
    whole, _, adapters = table.partition("\nTraining of adapters of rank 32")
    assert "8 in turns" in whole and "100%" in whole and "  0%  " not in whole.split("\n")[2]
    assert "8 in turns" in adapters
    first = shlex.split(commands.splitlines()[1])
    assert first[1:5] == ["python", "-m", "megatron_dapo", "train"]


def test_few_of_many_candidates_are_simulated_and_checked(quick, monkeypatch):
    """What a search takes: a simulation a third of a second, a check of a config a thirtieth."""
    simulations, checks = [], []
    simulated, accepts = search.simulated, ConfigSource.accepts

    def counted(*arguments, **options):
        simulations.append(arguments)
        return simulated(*arguments, **options)

    monkeypatch.setattr(search, "simulated", counted)
    monkeypatch.setattr(ConfigSource, "accepts", lambda self, keys: checks.append(keys) or accepts(self, keys))
    source, config, assumed = source_of("one_node_7b", "qwen2.5-7b")
    search_report(source, config, assumed, (0, 1, 2))
    assert len(list(candidates(source, config, assumed, (0, 1, 2)))) > 25
    assert len(simulations) <= 20 and len(checks) <= 100
