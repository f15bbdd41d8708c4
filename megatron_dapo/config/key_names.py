"""Dotted names of sections, and of keys that several checks are about."""

ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
ROLLOUT = "actor_rollout_ref.rollout"
MULTI_TURN = f"{ROLLOUT}.multi_turn"
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
WORLD = ("trainer.nnodes", "trainer.n_procs_per_node")
# what cuts a model's layers into the chunks of a pipeline
CHUNKS = keys_of(MEGATRON, "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "pipeline_layers")
STAGES = keys_of(MEGATRON, "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
# what `derived.uses_servers` reads
WITHOUT_SERVERS = ("trainer.replay", "trainer.synthetic_batch", "sft.enable")
LENGTHS = ("data.max_prompt_length", "data.max_response_length")
# what `derived.uses_dynamic_sampling` reads
SAMPLING_SWITCHES = (f"{SAMPLING}.enable", f"{SAMPLING}.filter_mode")
# what `derived.needs_old_log_probs` reads
READ_FOR_OLD_LOG_PROBS = (
    "data.train_batch_size",
    *keys_of(ACTOR, "ppo_mini_batch_size", "ppo_epochs"),
    *keys_of(CORRECTION, "bypass_mode", "rollout_is", "rollout_rs", "rollout_token_veto_threshold", "max_mismatch"),
    *keys_of(KL_CTRL, "kl_coef"),
    "algorithm.use_kl_in_reward",
    ESTIMATOR,
    f"{REPLAY}.enable",
    "trainer.synthetic_batch",
)
