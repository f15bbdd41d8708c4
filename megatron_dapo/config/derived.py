"""Arithmetic on a config, done once for all: layout, steps, clip range, techniques."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from megatron_dapo.common.rank_coordinates import RankCoordinates
from megatron_dapo.common.sizes import round_up
from megatron_dapo.config.built_ins import Estimator, estimator_of
from megatron_dapo.config.schema.actor_rollout_ref import MegatronConfig
from megatron_dapo.config.schema.config import Config


@dataclass(frozen=True)
class ParallelSizes:
    """Parallel sizes of the trainer."""

    tp: int
    pp: int
    vpp: int | None
    world: int
    ep: int = 1  # of the TP x CP x DP ranks of a stage, as etp
    cp: int = 1
    pipeline_layers: tuple[int, ...] | None = None  # per chunk, if given (estimates/pipeline.py)
    etp: int = 1

    @property
    def dp(self) -> int:
        """Return the data-parallel size: the world's share left by TP, PP and CP."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def num_copies(self) -> int:
        """Return the number of ranks with the same weights; they share their optimizer state."""
        return self.cp * self.dp

    @property
    def expert_dp(self) -> int:
        """Return the number of ranks with the same experts, or the same part of them. They share
        their optimizer state."""
        return self.tp * self.num_copies // (self.ep * self.etp)

    @property
    def segment_multiple(self) -> int:
        """Return `segment_multiple` of these sizes."""
        return segment_multiple(self.cp)

    def coordinates(self, rank: int) -> RankCoordinates:
        """Return a rank's coordinates in Megatron's order: tensor ranks adjacent, context ranks
        next, pipeline ranks farthest apart."""
        return RankCoordinates(
            dp=rank // (self.tp * self.cp) % self.dp,
            pp=rank // (self.tp * self.cp * self.dp),
            tp=rank % self.tp,
            cp=rank // self.tp % self.cp,
        )


def segment_multiple(cp: int) -> int:
    """Return the divisor of a packed segment's length: context parallelism cuts it into 2 x cp
    chunks (models/context_parallel.py)."""
    return 2 * cp if cp > 1 else 1


def parallel_sizes(config: Config) -> ParallelSizes:
    megatron = config.actor_rollout_ref.actor.megatron
    return ParallelSizes(
        tp=megatron.tensor_model_parallel_size,
        pp=megatron.pipeline_model_parallel_size,
        vpp=megatron.virtual_pipeline_model_parallel_size,
        world=world_size(config),
        ep=megatron.expert_model_parallel_size,
        etp=megatron.expert_tensor_parallel_size,
        cp=megatron.context_parallel_size,
        pipeline_layers=None if megatron.pipeline_layers is None else tuple(megatron.pipeline_layers),
    )


def world_size(config: Config) -> int:
    """Return the number of trainer ranks."""
    return config.trainer.nnodes * config.trainer.n_procs_per_node


def has_given_servers(config: Config) -> bool:
    """Return whether the config names running servers: launch/ then starts none."""
    rollout = config.actor_rollout_ref.rollout
    return bool(rollout.server_urls or rollout.server_urls_file)


def uses_servers(config: Config) -> bool:
    """Return whether servers sample the batches: no dumped or synthetic ones, no conversations."""
    return not (config.trainer.replay or config.trainer.synthetic_batch or config.sft.enable)


def shares_gpus(config: Config) -> bool:
    """Return whether trainer and servers use the same GPUs in turns."""
    return config.actor_rollout_ref.hybrid_engine and uses_servers(config)


def may_give_own_reward(config: Config) -> bool:
    """Return whether a trajectory may bring its reward: its environment's, or that of an agent
    outside a sandbox."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.multi_turn.enable or (rollout.agent.enable and not rollout.agent.sandbox)


def starts_servers(config: Config) -> bool:
    """Return whether launch/ starts servers for the run: it uses some, and none are given.

    The answer holds for the user's own config: the config of a Slurm job's processes names the
    job's servers in a file.
    """
    return uses_servers(config) and not has_given_servers(config)


def starts_reward_model(config: Config) -> bool:
    """Return whether launch/ starts a server of the reward model: there is a model, but no URL.
    Like `starts_servers`, this holds for the user's own config."""
    return uses_servers(config) and bool(config.reward.model.path and not config.reward.model.url)


def is_server_url(text: str) -> bool:
    """Return whether a text is of the form http://host:port: no user, no password, nothing behind
    the port."""
    try:
        parts = urlsplit(text)
        is_plain = parts.path in ("", "/") and not (parts.query or parts.fragment) and "@" not in parts.netloc
        return parts.scheme in ("http", "https") and bool(parts.hostname and parts.port) and is_plain
    except ValueError:  # a port in letters, an unclosed bracket
        return False


def is_base_url(text: str) -> bool:
    """Return whether a text is an HTTP URL to which a path can be added, without a user or a
    password."""
    try:
        parts = urlsplit(text)
        _ = parts.port  # raises for a port without a number
    except ValueError:
        return False
    is_plain = not (parts.query or parts.fragment) and "@" not in parts.netloc
    return parts.scheme in ("http", "https") and bool(parts.hostname) and is_plain


def servers_per_node(config: Config) -> int:
    """Return the number of SGLang servers with GPUs of one node: all of them without server nodes,
    unless they share the trainer's."""
    server = config.actor_rollout_ref.rollout.server
    if shares_gpus(config):
        return server.num_servers // config.trainer.nnodes
    return server.num_servers * server.nodes_per_server // server.nnodes if server.nnodes else server.num_servers


def gpus_per_server_node(config: Config) -> int:
    """Return the GPUs of one node that a server has: all of its GPUs without server nodes."""
    server = config.actor_rollout_ref.rollout.server
    return server.tensor_model_parallel_size // (server.nodes_per_server if server.nnodes else 1)


def is_validation_step(config: Config, step: int) -> bool:
    """Return whether the weights after this step are validated; 0 = those before the first step."""
    every = config.trainer.test_freq
    return step in (0, config.trainer.total_training_steps) or (every > 0 and step % every == 0)


def gen_batch_size(config: Config) -> int:
    """Return the number of prompts per gen batch."""
    return config.data.gen_batch_size or config.data.train_batch_size


def samples_per_rollout_step(config: Config) -> int:
    if config.sft.enable:
        return config.data.train_batch_size
    return config.data.train_batch_size * config.actor_rollout_ref.rollout.n


def offload_fraction(config: Config) -> float:
    """Return the share of the optimizer's state on the host; auto counts as none until it is
    settled (estimates/recompute.py)."""
    fraction = config.actor_rollout_ref.actor.megatron.optimizer_offload_fraction
    return 0.0 if fraction == "auto" else fraction


def state_keys(megatron: MegatronConfig) -> dict[str, float | str]:
    """Return the keys, by their last names, of optimizer state moved or shortened against the
    default."""
    values = {
        "optimizer_offload_fraction": megatron.optimizer_offload_fraction,
        "exp_avg_dtype": megatron.exp_avg_dtype,
        "exp_avg_sq_dtype": megatron.exp_avg_sq_dtype,
    }
    return {name: value for name, value in values.items() if value not in (0.0, "float32")}


# Tokens of a rank's slice per FP8 product of Transformer Engine: 16 bytes, or a block with a scale.
FP8_TOKENS = {"tensorwise": 16, "delayed": 16, "blockwise": 128, "mxfp8": 32}


def tokens_multiple(config: Config, sequence_multiple: int) -> int:
    """Return the number of tokens for padding: each micro-batch is padded to a multiple of it.

    FP8 needs a multiple in each rank's slice. With `tp_comm_overlap` the multiple is the largest
    micro-batch: all have that length. sequence_multiple: for sequence and context parallelism.
    """
    actor = config.actor_rollout_ref.actor
    megatron = actor.megatron
    multiple = sequence_multiple * (1 if megatron.fp8 == "none" else FP8_TOKENS[megatron.fp8_recipe])
    if not megatron.tp_comm_overlap:
        return multiple
    return max(actor.max_tokens_per_microbatch // multiple, 1) * multiple


def longest_sample(config: Config) -> int:
    """Return the tokens of the longest sample: prompt and response, or a conversation."""
    if config.sft.enable:
        return config.sft.max_length
    return config.data.max_prompt_length + config.data.max_response_length


def longest_micro_batch_sample(config: Config) -> int:
    """Return the tokens of the longest sample in a micro-batch, with the padding for sequence and
    context parallelism, FP8 and `tp_comm_overlap`."""
    megatron = config.actor_rollout_ref.actor.megatron
    slices = megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1
    multiple = tokens_multiple(config, slices * segment_multiple(megatron.context_parallel_size))
    return round_up(longest_sample(config), multiple)


def log_prob_chunk_size(config: Config, *, on_gpu: bool) -> int:
    """Return the rows of logits in the log-prob head at once."""
    return config.actor_rollout_ref.actor.log_prob_chunk_size or (4096 if on_gpu else 1024)


def num_mini_batches(config: Config) -> int:
    """Return the number of mini-batches in one rollout step."""
    return config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size


def num_optimizer_steps_per_rollout_step(config: Config) -> int:
    return num_mini_batches(config) * config.actor_rollout_ref.actor.ppo_epochs


def advantage_estimator(config: Config) -> Estimator:
    return estimator_of(config.algorithm.adv_estimator)


def uses_critic(config: Config) -> bool:
    """Return whether the advantages need values, and so a critic."""
    return advantage_estimator(config).needs_critic


@dataclass(frozen=True)
class CriticBatching:
    """The critic's passes through a rollout step."""

    ppo_mini_batch_size: int  # groups per optimizer step
    ppo_epochs: int
    max_tokens_per_microbatch: int


def critic_batching(config: Config) -> CriticBatching:
    """Return the keys of the section `critic`; the actor's value stands in for each one left
    out."""
    actor = config.actor_rollout_ref.actor
    critic = config.critic
    return CriticBatching(
        critic.ppo_mini_batch_size or actor.ppo_mini_batch_size,
        critic.ppo_epochs or actor.ppo_epochs,
        critic.max_tokens_per_microbatch or actor.max_tokens_per_microbatch,
    )


def critic_path(config: Config) -> str:
    """Return the path of the critic's first checkpoint."""
    return config.critic.model.path or config.actor_rollout_ref.model.path


def effective_clip(config: Config) -> tuple[float, float]:
    """Return (low, high) of the policy loss, for a ratio clipped to [1 - low, 1 + high]."""
    actor = config.actor_rollout_ref.actor
    sides = (actor.clip_ratio_low, actor.clip_ratio_high) if actor.use_dapo else (None, None)
    low, high = (actor.clip_ratio if side is None else side for side in sides)
    return low, high


def clip_keys(config: Config) -> tuple[str, str]:
    """Return the names of the two keys behind (low, high) of `effective_clip`."""
    actor = config.actor_rollout_ref.actor
    names = [
        name if actor.use_dapo and getattr(actor, name) is not None else "clip_ratio"
        for name in ("clip_ratio_low", "clip_ratio_high")
    ]
    low, high = (f"actor_rollout_ref.actor.{name}" for name in names)
    return low, high


def uses_experience_replay(config: Config) -> bool:
    return config.exp_manager.experience_replay.enable


def replays_servers_experts(config: Config) -> bool:
    """Return whether the servers send their routers' choices of experts for router replay."""
    return config.actor_rollout_ref.actor.router_replay == "rollout"


def uses_kl_loss(config: Config) -> bool:
    actor = config.actor_rollout_ref.actor
    return actor.use_kl_loss and actor.kl_loss_coef != 0.0


def uses_kl_in_reward(config: Config) -> bool:
    """Return whether the rewards have a KL penalty: with a coefficient, unless it is switched
    off."""
    return config.algorithm.use_kl_in_reward is not False and config.algorithm.kl_ctrl.kl_coef != 0.0


def uses_full_kl_in_reward(config: Config) -> bool:
    return uses_kl_in_reward(config) and config.algorithm.kl_penalty == "full"


def uses_full_kl(config: Config) -> bool:
    """Return whether some KL is over the whole vocabulary: the reference's hidden states are then
    kept until the update."""
    in_loss = uses_kl_loss(config) and config.actor_rollout_ref.actor.kl_loss_type == "full"
    return in_loss or uses_full_kl_in_reward(config)


def max_mismatch(config: Config) -> float | None:
    """Return the largest mean difference allowed between the servers' log-probs and the trainer's.

    None: no limit. Synthetic tokens have none, for no model wrote them.
    """
    return None if config.trainer.synthetic_batch else config.algorithm.rollout_correction.max_mismatch


def needs_old_log_probs(config: Config) -> bool:
    """Return whether the log-probs before the update are computed.

    With one optimizer step the current ones serve, except for replayed tokens, and for whole
    responses weighed or rejected before their loss. With bypass_mode the servers' stand in. A
    critic learns first, and must not learn from samples refused by `max_mismatch`.
    """
    correction = config.algorithm.rollout_correction
    refuses_first = uses_critic(config) and max_mismatch(config) is not None
    if config.sft.enable:
        return False
    if uses_kl_in_reward(config) or refuses_first:
        return True
    if correction.bypass_mode:
        return False
    several_steps = num_optimizer_steps_per_rollout_step(config) > 1
    weighs_responses = correction.rollout_is == "sequence"
    return several_steps or weighs_responses or rejects_tokens(config) or uses_experience_replay(config)


def rejects_tokens(config: Config) -> bool:
    """Return whether tokens or responses too far from the servers' log-probs are rejected."""
    correction = config.algorithm.rollout_correction
    return correction.rollout_rs != "none" or correction.rollout_token_veto_threshold is not None


def needs_reference(config: Config) -> bool:
    """Return whether the reference model is built: only for a non-zero KL coefficient, or for a
    user's own loss with a reference."""
    return uses_kl_loss(config) or uses_kl_in_reward(config) or has_reference_for_own_loss(config)


def has_reference_for_own_loss(config: Config) -> bool:
    """Return whether `actor.loss_function` gets log-probs of a reference model, by the path
    of one."""
    references = config.actor_rollout_ref
    return references.actor.loss_function is not None and references.ref.path is not None


def uses_dynamic_sampling(config: Config) -> bool:
    """Return whether groups without signal are replaced or masked."""
    sampling = config.algorithm.dynamic_sampling
    return sampling.enable and sampling.filter_mode != "none"


def replaces_groups(config: Config) -> bool:
    """Return whether groups without signal are dropped, and others sampled in their place."""
    return uses_dynamic_sampling(config) and config.algorithm.dynamic_sampling.form == "resample"


def uses_overlong_shaping(config: Config) -> bool:
    """Return whether truncated or over-long responses are punished or filtered."""
    shaping = config.algorithm.overlong_reward_shaping
    soft = shaping.buffer_len > 0 and shaping.penalty_factor > 0.0
    hard = shaping.buffer_len == 0 and shaping.truncation_penalty != 0.0
    return shaping.enable and (soft or hard or shaping.filter_truncated)


def dapo_techniques(config: Config) -> dict[str, bool]:
    """Return name -> whether it acts, for the four techniques of DAPO (arXiv 2503.14476, section
    3)."""
    low, high = effective_clip(config)
    return {
        "clip_higher": high > low,
        "dynamic_sampling": uses_dynamic_sampling(config),
        "token_level_loss": config.actor_rollout_ref.actor.loss_agg_mode == "token-mean",
        "overlong_shaping": uses_overlong_shaping(config),
    }


def server_option(config: Config, *spellings: str) -> str | None:
    """Return the value of an option in `server.extra_args`: the last one given."""
    arguments = config.actor_rollout_ref.rollout.server.extra_args
    last = None
    for argument, following in zip(arguments, [*arguments, None][1:], strict=True):
        name, equals, value = argument.partition("=")
        if name in spellings:
            last = value if equals else following
    return last


def server_expert_parts(config: Config, tp: int) -> int:
    """Return the parts into which a server of `tp` GPUs divides its experts: SGLang's `--ep-size`."""
    if (server_option(config, "--moe-a2a-backend") or "none") != "none":
        return tp  # whatever else is given
    value = server_option(config, "--ep-size", "--expert-parallel-size", "--ep") or ""
    return max(1, int(value)) if value.isdecimal() else 1


def machines_per_server(config: Config) -> int:
    """Return the nodes of a server: 1 on the trainer's machine, in any number of processes."""
    server = config.actor_rollout_ref.rollout.server
    return server.nodes_per_server if server.nnodes else 1
