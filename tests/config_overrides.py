"""Overrides of a config with short names for long keys,
and the mistakes that the checks find in it."""

from megatron_dapo.checks.run_checks import validate
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from tests.model_json import MODEL_JSON

SOUND = ["data.train_files=[train.jsonl]", "data.val_files=[val.jsonl]", "actor_rollout_ref.model.path=model"]
SHORT = {
    "tp": "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
    "pp": "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
    "vpp": "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size",
    "ep": "actor_rollout_ref.actor.megatron.expert_model_parallel_size",
    "etp": "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size",
    "buffer": "algorithm.overlong_reward_shaping.buffer_len",
    "actor.": "actor_rollout_ref.actor.",
    "megatron.": "actor_rollout_ref.actor.megatron.",
    "rollout.": "actor_rollout_ref.rollout.",
    "ref.": "actor_rollout_ref.ref.",
    "sampling.": "algorithm.dynamic_sampling.",
    "overlong.": "algorithm.overlong_reward_shaping.",
    "rc.": "algorithm.rollout_correction.",
}


def overrides(text: str) -> list[str]:
    """`"rollout.n=2 tp=3"` -> overrides with the whole keys."""
    whole = []
    for word in text.split():
        short = next((short for short in SHORT if word.startswith(short if short.endswith(".") else f"{short}=")), "")
        whole.append(SHORT.get(short, "") + word.removeprefix(short))
    return whole


# Layouts of a trainer that numbers worked out by hand are of, in place of a recipe's.
ALL_RECOMPUTED = overrides(
    "megatron.context_parallel_size=1 megatron.recompute_granularity=full"
    " megatron.recompute_method=uniform megatron.recompute_num_layers=1"
)
TP4 = [*overrides("tp=4"), *ALL_RECOMPUTED]
TP8_PP2 = [*overrides("tp=8 pp=2"), *ALL_RECOMPUTED]


def mistakes(text: str, **options) -> list[str]:
    options = {"model_json": MODEL_JSON, "check_files": False} | options
    try:
        validate(load_config(None, SOUND + overrides(text)), **options)
    except UserError as error:
        return error.sentences
    return []
