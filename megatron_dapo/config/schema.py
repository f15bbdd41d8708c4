"""The config tree: every key, its type, its default and what it means. This file is the reference manual.

A field's docstring is printed by `python -m megatron_dapo config-reference`. Types and ranges of single keys live here;
checks of several keys together live in `validation.py`.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


# ---------------------------------------------------------------------------------------------------- data


class DataConfig(Section):
    train_files: list[str] = []
    """Prompt files (.jsonl or .parquet, verl's DAPO-Math-17k schema)."""
    val_files: list[str] = []
    """Held-out prompt files, answered before the first step, every `trainer.test_freq` steps and after the last."""
    prompt_key: str = "prompt"
    """Column with the prompt: a list of chat messages, or a string."""
    train_batch_size: PositiveInt = 512
    """Groups (prompts that carry signal) in one rollout step."""
    gen_batch_size: PositiveInt | None = None
    """Prompts sent to the servers in one gen batch; none = `train_batch_size`. Larger = over-sampling."""
    max_prompt_length: PositiveInt = 1024
    """Prompt tokens; longer prompts are dropped, or cut from the left with `truncation: left`."""
    max_response_length: PositiveInt = 2048
    """Response tokens; a response that reaches it is truncated."""
    filter_overlong_prompts: bool = True
    """Drop prompts over `max_prompt_length` when the files are read. With false, `truncation` says what happens."""
    truncation: Literal["error", "left"] = "error"
    """What to do with an over-long prompt that was not filtered: stop, or keep its last tokens."""
    dedup: bool = True
    """Keep one of several prompts with the same content (public DAPO-Math-17k repeats each about 100 times)."""
    shuffle: bool = True
    """Draw prompts in an order fixed by `seed` and the epoch."""
    seed: int = 1
    """Seed of the order of prompts."""
    apply_chat_template: bool = True
    """Render chat messages with the tokenizer's chat template; with false their contents are joined as they are."""


# ---------------------------------------------------------------------------------------------------- actor_rollout_ref


class ModelConfig(Section):
    path: str = ""
    """Folder of the Hugging Face checkpoint (config.json, safetensors, tokenizer)."""
    use_remove_padding: bool = True
    """Pack sequences without padding (THD). With false every micro-batch is a padded [B, S] rectangle."""


class OptimConfig(Section):
    lr: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    lr_warmup_steps: NonNegativeInt = 0
    """Rollout steps of linear warm-up from 0."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up, over the run's steps."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay."""
    clip_grad: NonNegativeFloat = 1.0
    """Global gradient norm above which gradients are scaled down; 0 = never."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.999)  # YAML has lists, not tuples
    """Adam's decay rates."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""


class MegatronConfig(Section):
    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share every layer."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Ranks that share the stack of layers (1F1B schedule)."""
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    """Model chunks per pipeline rank (interleaved schedule); none = plain 1F1B."""
    sequence_parallel: bool = False
    """Split activations between tensor-parallel regions along the sequence; needs TP > 1."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state and main weights over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass still runs."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Parameters and activations; auto = bfloat16 (with fp32 main weights) on GPU, float32 on CPU."""
    recompute_granularity: Literal["none", "full", "selective"] = "none"
    """Activation recompute: whole layers, or only `recompute_modules`."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """With full recompute: every layer in groups, or the first `recompute_num_layers` of each stage."""
    recompute_num_layers: PositiveInt = 1
    """Layers per recompute group (uniform) or recomputed layers per stage (block)."""
    recompute_modules: list[Literal["core_attn", "mlp"]] = ["core_attn"]
    """With selective recompute: what is recomputed."""
    use_transformer_engine: Literal["auto", "on", "off"] = "auto"
    """Transformer Engine layers; auto = on a GPU where it can be imported."""
    fp8: Literal["none", "e4m3", "hybrid"] = "none"
    """FP8 products in the layers by Transformer Engine: e4m3, or hybrid (gradients in e5m2). Weights stay bfloat16."""
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = "tensorwise"
    """Scale of FP8: of the whole tensor, of its past (delayed), of 128 x 128 blocks, of 32 in a row (Blackwell)."""
    timeout_s: PositiveFloat = 600.0
    """Deadline of every collective among the trainer's ranks."""


class ActorConfig(Section):
    ppo_mini_batch_size: PositiveInt = 512
    """Groups per optimizer step; divides `data.train_batch_size`."""
    ppo_epochs: PositiveInt = 1
    """Passes over each rollout step's samples."""
    shuffle: bool = True
    """Assign groups to mini-batches at random (seeded by `trainer.seed` and the step), not in order of arrival."""
    max_tokens_per_microbatch: PositiveInt = 16384
    """Hard cap on the packed tokens of one micro-batch on one data-parallel rank."""
    use_dapo: bool = False
    """Clip-higher: clip to [1 - clip_ratio_low, 1 + clip_ratio_high] instead of 1 +- clip_ratio."""
    clip_ratio: PositiveFloat = 0.2
    """Symmetric clip range, used when `use_dapo` is false."""
    clip_ratio_low: PositiveFloat = 0.2
    """Lower clip range of clip-higher."""
    clip_ratio_high: PositiveFloat = 0.28
    """Upper clip range of clip-higher."""
    clip_ratio_c: PositiveFloat | None = 3.0
    """Dual clip: upper bound of the ratio where the advantage is negative (> 1); none = no bound."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """How token losses become one number; see docs/loss.md."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the loss."""
    use_kl_loss: bool = False
    """Add kl_loss_coef * KL(actor, reference) to the loss."""
    kl_loss_coef: NonNegativeFloat = 0.0
    """Weight of the KL loss; the reference model exists only if a KL coefficient is non-zero."""
    kl_loss_type: Literal["kl", "abs", "mse", "low_var_kl"] = "low_var_kl"
    """KL estimator: k1, |k1|, k2 or k3."""
    calculate_entropy: bool = True
    """Report the policy's entropy (one more reduction over the vocabulary)."""
    log_prob_chunk_size: PositiveInt | None = None
    """Rows of logits held at once by the log-prob head; none = 4096 on GPU, 1024 on CPU."""
    fused_kernels: Literal["auto", "off"] = "auto"
    """auto = the fused head, after a check of it against float64 at the start; off = composed from torch operations."""
    optim: OptimConfig = OptimConfig()
    megatron: MegatronConfig = MegatronConfig()


class ServerConfig(Section):
    """SGLang servers that launch/ starts on this machine."""

    num_servers: PositiveInt = 1
    """Servers to start (ignored when `rollout.server_urls` is given)."""
    tensor_model_parallel_size: PositiveInt = 1
    """GPUs (or CPU processes) per server."""
    host: str = "127.0.0.1"
    """Address the servers bind to."""
    max_total_tokens: PositiveInt | None = None
    """KV cache size in tokens; none = SGLang's choice on GPU, 16384 on CPU."""
    max_running_requests: PositiveInt | None = None
    """Requests decoded at once; none = SGLang's choice on GPU, 64 on CPU."""
    mem_fraction_static: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Share of GPU memory for weights and KV cache; none = SGLang's choice."""
    extra_args: list[str] = []
    """Further arguments of `sglang.launch_server`, as they are."""
    startup_timeout_s: PositiveFloat = 900.0
    """Deadline for a server to become healthy."""
    max_restarts: NonNegativeInt = 3
    """Restarts of a server that died, before the run is given up."""


class RolloutConfig(Section):
    n: PositiveInt = 8
    """Responses per prompt (the group size)."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer's log-probs use it too."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling; 1 = off. Below 1 the server's log-probs are those before the cut."""
    top_k: int = -1
    """Keep the k likeliest tokens; -1 = off."""
    stop_token_ids: list[int] = []
    """Further end-of-response tokens besides the model's own."""
    server_urls: list[str] = []
    """Servers that already run (http://host:port); none = launch/ starts them."""
    server: ServerConfig = ServerConfig()
    max_concurrency: PositiveInt = 512
    """Requests in flight per server."""
    request_timeout_s: PositiveFloat = 1800.0
    """Deadline of one generation request."""
    max_retries: NonNegativeInt = 3
    """Attempts after a failed request, on the other servers first."""
    step_timeout_s: PositiveFloat = 7200.0
    """Deadline of one `next_batch`; the error names what is still missing."""
    val_temperature: NonNegativeFloat = 0.0
    """Temperature of held-out evaluation; 0 = greedy."""
    val_top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling of held-out evaluation; the published AIME figures use 0.7."""
    val_n: PositiveInt = 1
    """Responses per held-out prompt."""
    dump_samples: NonNegativeInt = 8
    """Groups written to rollouts/step_NNNNNN.jsonl per step; 0 = none."""


class RefConfig(Section):
    path: str | None = None
    """Checkpoint of the reference model; none = the actor's starting weights."""


class ActorRolloutRefConfig(Section):
    model: ModelConfig = ModelConfig()
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = RefConfig()
    rollout: RolloutConfig = RolloutConfig()


# ---------------------------------------------------------------------------------------------------- algorithm


class DynamicSamplingConfig(Section):
    enable: bool = False
    """Sample until `data.train_batch_size` groups carry signal."""
    filter_mode: Literal["strict", "remove_all_correct", "remove_all_incorrect", "none"] = "strict"
    """Which groups are dropped, judged on raw correctness: all right or all wrong; all right; all wrong; none."""
    max_num_gen_batches: PositiveInt = 10
    """Gen batches of one rollout step before `on_exhausted` decides."""
    on_exhausted: Literal["raise", "train_partial"] = "raise"
    """At the limit: stop with the counts, or train on the groups there are."""


class OverlongRewardShapingConfig(Section):
    enable: bool = False
    """Punish over-long responses."""
    buffer_len: NonNegativeInt = 0
    """Length of the soft interval before `max_response_length` (DAPO eq. 13); 0 = `truncation_penalty` instead."""
    expected_len: PositiveInt | None = None
    """Response length without punishment; none = max_response_length - buffer_len."""
    penalty_factor: NonNegativeFloat = 1.0
    """Punishment at the end of the soft interval."""
    truncation_penalty: float = -0.5
    """Punishment of a truncated response when `buffer_len` is 0."""
    soft_penalty_mode: Literal["additive", "multiplicative", "replace_if_positive", "cap"] = "additive"
    """How `truncation_penalty` acts on the reward."""
    filter_truncated: bool = False
    """Overlong filtering: give the tokens of truncated responses no loss."""


class DapoConfig(Section):
    enable: bool = False
    """Switch of dynamic sampling and overlong reward shaping; each has its own switch too."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    overlong_reward_shaping: OverlongRewardShapingConfig = OverlongRewardShapingConfig()


class KLControlConfig(Section):
    type: Literal["fixed", "adaptive"] = "fixed"
    """Constant coefficient, or one steered towards `target_kl` (arXiv 1909.08593)."""
    kl_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL penalty in the reward (its start value if adaptive)."""
    target_kl: PositiveFloat = 0.01
    """KL the adaptive controller aims at."""
    horizon: PositiveInt = 10000
    """Samples over which the adaptive controller acts."""


class RolloutCorrectionConfig(Section):
    rollout_is: Literal["none", "token"] = "none"
    """Weigh each token's policy loss by exp(old - server's log-prob), truncated (TIS); see docs/loss.md."""
    rollout_is_threshold: PositiveFloat = 2.0
    """Largest weight of `rollout_is`."""


class AlgorithmConfig(Section):
    adv_estimator: Literal["grpo"] = "grpo"
    """Advantage estimator: group-relative."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation (false = Dr. GRPO)."""
    use_kl_in_reward: bool = False
    """Subtract kl_ctrl.kl_coef * KL(actor, reference) from the rewards."""
    kl_penalty: Literal["kl", "abs", "mse", "low_var_kl"] = "kl"
    """KL estimator of the penalty in the reward."""
    kl_ctrl: KLControlConfig = KLControlConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    dapo: DapoConfig = DapoConfig()


# ---------------------------------------------------------------------------------------------------- the rest


class RewardConfig(Section):
    function: str = "by_data_source"
    """math_dapo, math_verify, exact_match, `package.module:function`, or by_data_source (each prompt's own)."""
    kwargs: dict[str, str | int | float | bool] = {}
    """Keyword arguments of the reward function."""
    num_workers: PositiveInt = 2
    """Reward processes."""
    timeout_s: PositiveFloat = 5.0
    """Hard limit of one reward; the worker is killed and the sample counts as wrong."""
    memory_limit_mb: PositiveInt = 2048
    """Address space of a reward process."""


class WeightSyncConfig(Section):
    bucket_size_mb: PositiveInt = 256
    """Size of a flat bucket; on CPU at most 64."""
    timeout_s: PositiveFloat = 300.0
    """Deadline of one weight push; the error names the missing server or rank."""
    verify: bool = False
    """After each push compare a sample of tensors on every server with the trainer's, bit for bit."""
    verify_num_tensors: PositiveInt = 8
    """Tensors compared per push (a different sample each time)."""


class TrainerConfig(Section):
    experiment_name: str = "run"
    """Name of the run folder."""
    run_dir: str | None = None
    """Run folder; none = runs/EXPERIMENT_NAME."""
    nnodes: PositiveInt = 1
    """Trainer nodes."""
    n_procs_per_node: PositiveInt = 1
    """Trainer processes (GPUs) per node."""
    total_training_steps: PositiveInt = 100
    """Rollout steps of the run."""
    test_freq: int = -1
    """Rollout steps between held-out evaluations; -1 = only before and after (where val_files are given)."""
    logger: list[Literal["console", "jsonl", "tensorboard"]] = ["console", "jsonl", "tensorboard"]
    """Where metrics go."""
    seed: int = 1
    """Seed of mini-batches and samplers."""
    save_interval: int = -1
    """Rollout steps between checkpoints, with one after the last step; -1 = only when the run is asked to stop."""
    keep_last: PositiveInt | None = None
    """Newest checkpoints that are kept, older ones are deleted; none = all."""
    keep_every: PositiveInt | None = None
    """With `keep_last`: checkpoints of steps that are a multiple of this are kept as well."""
    async_save: bool = True
    """Train on while the files of a checkpoint are written."""
    save_hf: bool = False
    """Write the model into each checkpoint's folder hf/ as a Hugging Face checkpoint too."""
    resume: Literal["auto", "required", "never"] = "auto"
    """Go on from the newest complete checkpoint of the run folder: where there is one, always, or never."""
    accept_changes: list[str] = []
    """Keys that may differ from the run that wrote the checkpoint, although they matter to what is learned."""
    accept_missing: list[Literal["optimizer", "controller"]] = []
    """Parts that a checkpoint may lack: the optimizer's state, the prompt cursor with the groups that wait."""
    dump_batches: bool = False
    """Write every finished batch to batches/step_NNNNNN.json.gz of the run folder, for `replay`; off in a replay."""
    replay: str | None = None
    """Folder of dumped batches to train on, without servers, rewards or weight sync (`train --replay DIR`)."""


class Config(Section):
    """The whole tree."""

    data: DataConfig = DataConfig()
    actor_rollout_ref: ActorRolloutRefConfig = ActorRolloutRefConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    reward: RewardConfig = RewardConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    trainer: TrainerConfig = TrainerConfig()
