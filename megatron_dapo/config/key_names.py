"""Dotted names of sections, and of keys in several checks."""

ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
ROLLOUT = "actor_rollout_ref.rollout"
MULTI_TURN = f"{ROLLOUT}.multi_turn"
AGENT = f"{ROLLOUT}.agent"
SAMPLING = "algorithm.dynamic_sampling"
OVERLONG = "algorithm.overlong_reward_shaping"
KL_CTRL = "algorithm.kl_ctrl"
CORRECTION = "algorithm.rollout_correction"
REPLAY = "exp_manager.experience_replay"


def keys_of(section: str, *names: str) -> tuple[str, ...]:
    """Return the dotted names of keys of a section."""
    return tuple(f"{section}.{name}" for name in names)


USE_DAPO = f"{ACTOR}.use_dapo"
N = f"{ROLLOUT}.n"
POLICY_LOSS = f"{ACTOR}.policy_loss"
LOSS_FUNCTION = f"{ACTOR}.loss_function"
ROUTER_REPLAY = f"{ACTOR}.router_replay"
ESTIMATOR = "algorithm.adv_estimator"
LORA_RANK = "actor_rollout_ref.model.lora_rank"
TARGET_MODULES = "actor_rollout_ref.model.target_modules"
