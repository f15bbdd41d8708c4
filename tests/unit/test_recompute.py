"""`recompute_granularity: auto` is the least recomputation that the memory estimate leaves room
for."""

import json

import pytest

from megatron_dapo.__main__ import main
from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.commands.plan.shortage import shortage
from megatron_dapo.common.sizes import GB
from megatron_dapo.config.keys import with_keys
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.recipes import recipe
from megatron_dapo.estimates.memory import trainer_memory
from megatron_dapo.estimates.model_shapes import model_json_named
from megatron_dapo.estimates.recompute import in_words, recomputed_share, settled
from megatron_dapo.huggingface.spec_reader import model_spec
from tests.config_overrides import TP8_PP2
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.unit

MEGATRON = "actor_rollout_ref.actor.megatron"
BLOCK = {"recompute_granularity": "full", "recompute_method": "block"}
SPEC = model_spec(model_json_named("qwen2.5-32b"))


RECIPE = load_config(recipe("dapo_32b"), TP8_PP2)


def with_gpus_of(gigabytes: float, **keys: object):
    return with_keys(
        RECIPE, {"trainer.gpu_memory_gb": gigabytes} | {f"{MEGATRON}.{name}": value for name, value in keys.items()}
    )


def total_gb(config) -> float:
    return trainer_memory(config, SPEC).total / GB


def every_choice(gigabytes: float):
    """All that could be recomputed, each layer of a stage by itself too."""
    yield with_gpus_of(gigabytes, recompute_granularity="none")
    yield with_gpus_of(gigabytes, recompute_granularity="selective", recompute_modules=["mlp"])
    yield with_gpus_of(gigabytes, recompute_granularity="full")
    for number in range(1, 32):
        yield with_gpus_of(gigabytes, **BLOCK, recompute_num_layers=number)


def test_of_all_that_fits_the_one_is_chosen_that_repeats_least():
    """From GPUs too small for anything to GPUs without need of recomputation,
    in steps through every choice."""
    least = min(map(total_gb, every_choice(80)))
    most = total_gb(with_gpus_of(80, recompute_granularity="none"))
    chosen = set()
    for step in range(41):
        gigabytes = least + 6.1 + (most - least) * step / 40  # 6 are kept free
        config = settled(with_gpus_of(gigabytes, recompute_granularity="auto"), SPEC)
        fitting = [choice for choice in every_choice(gigabytes) if not shortage(choice, SPEC)]
        assert not shortage(config, SPEC)
        assert recomputed_share(config, SPEC) == min(recomputed_share(choice, SPEC) for choice in fitting)
        chosen.add(in_words(config.actor_rollout_ref.actor.megatron))
    assert {"nothing", "all layers"} <= chosen and len(chosen) > 6
    assert any(words.startswith("the first ") for words in chosen)


def test_where_nothing_fits_all_layers_are_recomputed_and_the_run_is_refused():
    config = settled(with_gpus_of(10, recompute_granularity="auto"), SPEC)
    assert in_words(config.actor_rollout_ref.actor.megatron) == "all layers"
    assert shortage(config, SPEC)


def test_what_the_config_says_itself_is_left_alone():
    config = with_gpus_of(10, recompute_granularity="selective", recompute_modules=["core_attn", "mlp"])
    assert settled(config, SPEC) is config
    assert in_words(config.actor_rollout_ref.actor.megatron) == "attention and MLP"


def test_first_layers_are_counted_in_each_chunk_of_a_stage():
    """Megatron recomputes the first of every virtual stage's layers: 5 of 2 chunks are 10 of 32."""
    plain = with_gpus_of(80, **BLOCK, recompute_num_layers=10)
    virtual = with_gpus_of(80, **BLOCK, recompute_num_layers=5, virtual_pipeline_model_parallel_size=2)
    none = with_gpus_of(80, recompute_granularity="none", virtual_pipeline_model_parallel_size=2)
    assert recomputed_share(plain, SPEC) == recomputed_share(virtual, SPEC) == 10 * 2 / 64
    assert total_gb(virtual) < total_gb(none)
    assert in_words(virtual.actor_rollout_ref.actor.megatron) == "the first 5 layers of each chunk of a stage"


def test_a_run_is_started_with_what_was_chosen_and_the_plan_says_it(tmp_path, capsys):
    model = make_tiny(tmp_path / "model", "qwen2", vocab=64, layers=2, hidden=32, heads=4, kv_heads=2)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    overrides = [f"actor_rollout_ref.model.path={model}", f"{MEGATRON}.recompute_granularity=auto"]
    config = load_and_validate(None, overrides, check_files=False)
    assert config.actor_rollout_ref.actor.megatron.recompute_granularity == "none"
    arguments = ["plan", "--config", recipe("dapo_32b"), f"{MEGATRON}.recompute_granularity=auto", "--staleness=0"]
    main([*arguments, "--mean-length=2000"])
    assert "recomputed in backward: the first " in capsys.readouterr().out
