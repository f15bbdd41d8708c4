"""Section `actor_rollout_ref`: the model, its training, its sampling."""

from typing import Annotated, Literal, TypeVar

from pydantic import Field

from megatron_dapo.config.built_ins import POLICY_LOSSES, policy_losses_with
from megatron_dapo.config.schema.agent import AgentConfig
from megatron_dapo.config.schema.base import (
    BoundedInt,
    Decay,
    ImportPath,
    NonNegativeFloat,
    NonNegativeInt,
    NumProcesses,
    NumResponses,
    NumRetries,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
)
from megatron_dapo.config.schema.multi_turn import MultiTurnConfig
from megatron_dapo.config.schema.rules import ActsIf, Is, IsNot, IsOn, MayChangeOnResume

T = TypeVar("T")
OfBuiltInLoss = Annotated[T, ActsIf(Is("loss_function", None))]
OfClip = Annotated[
    T, ActsIf(Is("loss_function", None)), ActsIf(Is("policy_loss", *policy_losses_with(clips_ratio=True)))
]
WithLora = Annotated[T, ActsIf(IsNot("lora_rank", 0))]
WHILE_REPLAYING = ActsIf(IsOn("exp_manager.experience_replay.enable"))
ON_SHARED_GPUS = ActsIf(IsOn("actor_rollout_ref.hybrid_engine"))


class ModelConfig(Section):
    path: str = ""
    """Folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer), or of a checkpoint of this program, of
    which the model is taken."""
    use_remove_padding: MayChangeOnResume[bool] = True
    """Pack sequences without padding (THD). With false every micro-batch is a padded [B, S] rectangle."""
    lora_rank: NonNegativeInt = 0
    """Rank of low-rank adapters (LoRA), which are trained in place of the model's weights (docs/lora.md); 0 = none, the
    whole model is trained."""
    lora_alpha: WithLora[PositiveFloat] = 16.0
    """Adapters are multiplied by lora_alpha / lora_rank."""
    target_modules: WithLora[str | list[str]] = "all-linear"
    """Linear modules that have an adapter, by PEFT's names: a list of q_proj, k_proj, v_proj, o_proj, gate_proj,
    up_proj, down_proj, or what the family has in their place (docs/lora.md); all-linear = all of them."""
    lora_adapter_path: WithLora[str | None] = None
    """Folder of a PEFT adapter (adapter_config.json, adapter_model.safetensors) that training goes on from; null = new
    adapters, which change nothing at first."""


class OptimConfig(Section):
    lr: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    lr_warmup_steps: NonNegativeInt = 0
    """Rollout steps of linear warm-up from 0."""
    lr_decay_style: Literal["constant", "linear", "cosine"] | ImportPath = "constant"
    """Shape of the learning rate after the warm-up, over the run's steps; or your own function (docs/extend.md)."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay."""
    clip_grad: NonNegativeFloat = 1.0
    """Global gradient norm above which gradients are scaled down; 0 = never."""
    # YAML has lists, not tuples
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.999)
    """Adam's decay rates."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""


class MegatronConfig(Section):
    tensor_model_parallel_size: MayChangeOnResume[NumProcesses] = 1
    """Ranks that share every layer."""
    pipeline_model_parallel_size: MayChangeOnResume[NumProcesses] = 1
    """Ranks that share the stack of layers (1F1B schedule)."""
    virtual_pipeline_model_parallel_size: MayChangeOnResume[NumProcesses | None] = None
    """Model chunks per pipeline rank (interleaved schedule); null = plain 1F1B."""
    pipeline_layers: MayChangeOnResume[list[NonNegativeInt] | None] = None
    """Layers of each of the PP x VPP chunks, in the order in which tokens pass them (chunk c is on pipeline rank c mod
    PP). The first has the embedding besides, the last the head; these two may have no layer. null = as even as
    possible, with embedding and head counted as a layer each where the layers do not divide (docs/models.md)."""
    sequence_parallel: MayChangeOnResume[bool] = False
    """Split activations between tensor-parallel regions along the sequence; needs TP > 1."""
    expert_model_parallel_size: MayChangeOnResume[NumProcesses] = 1
    """Ranks that share the experts of a MoE model, out of a stage's TP x CP x DP."""
    expert_tensor_parallel_size: MayChangeOnResume[NumProcesses] = 1
    """Ranks that share each expert, out of those that EP leaves of a stage's TP x CP x DP; 1 = each expert is whole on
    its rank."""
    context_parallel_size: MayChangeOnResume[NumProcesses] = 1
    """Ranks that share the tokens of each packed micro-batch, for sequences too long for one; on GPUs needs Transformer
    Engine."""
    use_distributed_optimizer: MayChangeOnResume[bool] = True
    """Shard optimizer state and main weights over the data-parallel ranks (DP x CP)."""
    overlap_grad_reduce: MayChangeOnResume[bool] = False
    """Reduce gradients while the backward pass still runs."""
    overlap_param_gather: MayChangeOnResume[bool] = False
    """Gather weights while the forward pass behind an optimizer step runs, save the last of a rollout step; needs
    use_distributed_optimizer and overlap_grad_reduce."""
    tp_comm_overlap: MayChangeOnResume[bool] = False
    """Overlap the communication of tensor-parallel ranks with products, in Transformer Engine's user buffers; pads each
    micro-batch to all of `max_tokens_per_microbatch`, and needs sequence_parallel (docs/models.md)."""
    optimizer_offload_fraction: MayChangeOnResume[Annotated[float, Field(ge=0.0, le=1.0)] | Literal["auto"]] = 0.0
    """Share of the optimizer's state (float32 weights, Adam's moments) that is kept, and stepped, in the machine's
    memory in place of the GPU's; auto = the least of 0, 0.25, 0.5, 0.75 and 1 that `trainer.gpu_memory_gb` leaves room
    for by the plan, which shows it. Needs Transformer Engine and use_distributed_optimizer."""
    param_offload: Annotated[MayChangeOnResume[bool], ON_SHARED_GPUS] = True
    """While servers are awake, keep the weights in the machine's memory in place of the GPU's, those of the reference
    and the critic too."""
    optimizer_offload: Annotated[MayChangeOnResume[bool], ON_SHARED_GPUS] = True
    """While servers are awake, keep the optimizer's state (float32 weights, Adam's moments) in the machine's memory."""
    exp_avg_dtype: Literal["float32", "bfloat16"] = "float32"
    """Adam's first moment: bfloat16 saves 2 bytes per parameter; needs Transformer Engine and
    use_distributed_optimizer."""
    exp_avg_sq_dtype: Literal["float32", "bfloat16"] = "float32"
    """Adam's second moment, likewise; bfloat16 needs `optim.betas` whose second is below 0.996, or it would never
    fall."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Parameters and activations; auto = bfloat16 (with fp32 main weights) on GPU, float32 on CPU."""
    recompute_granularity: MayChangeOnResume[Literal["none", "full", "selective", "auto"]] = "none"
    """Activation recompute: whole layers, or only `recompute_modules`; auto = the least that `trainer.gpu_memory_gb`
    leaves room for by the plan, which shows it (docs/plan.md)."""
    recompute_method: MayChangeOnResume[Literal["uniform", "block"]] = "uniform"
    """With full recompute: every layer in groups, or the first `recompute_num_layers` of each chunk of a stage."""
    recompute_num_layers: MayChangeOnResume[PositiveInt] = 1
    """Layers per recompute group (uniform) or recomputed layers per chunk of a stage (block)."""
    recompute_modules: MayChangeOnResume[list[Literal["core_attn", "mlp"]]] = ["core_attn"]
    """With selective recompute: what is recomputed."""
    use_transformer_engine: Literal["auto", "on", "off"] = "auto"
    """Transformer Engine layers; auto = on a GPU where it can be imported."""
    fp8: Literal["none", "e4m3", "hybrid"] = "none"
    """FP8 products in the layers by Transformer Engine: e4m3, or hybrid (gradients in e5m2). Weights stay bfloat16."""
    fp8_recipe: Annotated[Literal["tensorwise", "delayed", "blockwise", "mxfp8"], ActsIf(IsNot("fp8", "none"))] = (
        "tensorwise"
    )
    """Scale of FP8: of the whole tensor, of its past (delayed), of 128 x 128 blocks, of 32 in a row (Blackwell)."""
    timeout_s: MayChangeOnResume[Seconds] = 600.0
    """A rank that computes for so long without progress, or is not heard of, ends the run and is named (docs/hangs.md);
    collectives among the trainer's ranks fail 60 s later."""


class ActorConfig(Section):
    ppo_mini_batch_size: PositiveInt = 512
    """Groups per optimizer step; divides `data.train_batch_size`."""
    ppo_epochs: PositiveInt = 1
    """Passes over each rollout step's samples."""
    shuffle: bool = True
    """Assign groups to mini-batches at random (seeded by `trainer.seed` and the step), not in the order in which their
    prompts were drawn."""
    max_tokens_per_microbatch: MayChangeOnResume[PositiveInt] = 16384
    """Hard cap on the packed tokens of one micro-batch on one data-parallel rank; context-parallel ranks share them."""
    policy_loss: OfBuiltInLoss[Literal[*POLICY_LOSSES]] = "dapo"  # type: ignore[valid-type]
    """What becomes of tokens far from the old policy: the surrogate is clipped (dapo); the ratio that weighs a log-prob
    (cispo); the surrogate with one ratio per response (gspo); a soft gate in place of the clip (sapo); a mask by total
    variation or KL (dppo_tv, dppo_kl). See docs/loss.md."""
    use_dapo: OfClip[bool] = False
    """Clip-higher: clip to [1 - clip_ratio_low, 1 + clip_ratio_high] instead of 1 +- clip_ratio."""
    clip_ratio: OfClip[
        Annotated[PositiveFloat, ActsIf(Is("use_dapo", False), Is("clip_ratio_low", None), Is("clip_ratio_high", None))]
    ] = 0.2
    """Symmetric clip range."""
    clip_ratio_low: OfClip[Annotated[PositiveFloat | None, ActsIf(IsOn("use_dapo"))]] = 0.2
    """Lower clip range of clip-higher; null = clip_ratio."""
    clip_ratio_high: OfClip[Annotated[PositiveFloat | None, ActsIf(IsOn("use_dapo"))]] = 0.28
    """Upper clip range of clip-higher; null = clip_ratio."""
    clip_ratio_c: OfBuiltInLoss[
        Annotated[PositiveFloat | None, ActsIf(Is("policy_loss", *policy_losses_with(clips_surrogate=True)))]
    ] = 3.0
    """Dual clip: upper bound of the ratio where the advantage is negative (> 1); null = no bound."""
    tau_pos: OfBuiltInLoss[Annotated[PositiveFloat, ActsIf(Is("policy_loss", "sapo"))]] = 1.0
    """Temperature of sapo's gate where the advantage is positive; the larger, the narrower the gate."""
    tau_neg: OfBuiltInLoss[Annotated[PositiveFloat, ActsIf(Is("policy_loss", "sapo"))]] = 1.05
    """The same for other advantages."""
    dppo_threshold: OfBuiltInLoss[
        Annotated[
            Annotated[float, Field(gt=0, lt=1)] | None,
            ActsIf(Is("policy_loss", "dppo_tv", "dppo_kl")),
        ]
    ] = None
    """Largest divergence of a token's chance from that of the old policy; null = 0.15 of dppo_tv, 0.05 of
    dppo_kl."""
    loss_agg_mode: OfBuiltInLoss[
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
    ] = "token-mean"
    """How token losses become one number; see docs/loss.md."""
    loss_function: ImportPath | None = None
    """A loss of your own over the log-probs of whole sequences, in place of the loss that the keys of this section make
    (docs/loss.md); null = that one."""
    off_policy_shaping_mode: Annotated[Literal["exgrpo_policy_shaping", "dapo_clip_higher"], WHILE_REPLAYING] = (
        "exgrpo_policy_shaping"
    )
    """Loss of replayed tokens: -A r / (r + off_policy_shaping_beta), not clipped; or clipped as new ones are."""
    off_policy_shaping_beta: Annotated[
        PositiveFloat,
        WHILE_REPLAYING,
        ActsIf(Is("off_policy_shaping_mode", "exgrpo_policy_shaping")),
    ] = 0.1
    """Ratio at which exgrpo_policy_shaping gives one half; the smaller, the less tokens count that are still likely."""
    off_policy_clip_ratio_high: Annotated[
        PositiveFloat | None,
        WHILE_REPLAYING,
        ActsIf(Is("off_policy_shaping_mode", "dapo_clip_higher")),
    ] = None
    """Upper clip range of replayed tokens with dapo_clip_higher; null = that of new ones."""
    router_replay: Literal["off", "rollout", "old"] = "off"
    """Which experts the routers of a mixture take in training: their own choice (off); those that the servers chose
    (rollout); in the update those of the pass for old log-probs (old). See docs/models.md."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the loss."""
    use_kl_loss: bool = False
    """Add kl_loss_coef * KL(actor, reference) to the loss."""
    kl_loss_coef: Annotated[NonNegativeFloat, ActsIf(Is("use_kl_loss", True))] = 0.0
    """Weight of the KL loss; the reference model exists only if a KL coefficient is non-zero."""
    kl_loss_type: Annotated[Literal["kl", "abs", "mse", "low_var_kl", "full"], ActsIf(Is("use_kl_loss", True))] = (
        "low_var_kl"
    )
    """KL estimator: k1, |k1|, k2 or k3; full = the KL itself, over the whole vocabulary (see docs/loss.md)."""
    calculate_entropy: MayChangeOnResume[bool] = True
    """Report the policy's entropy (one more reduction over the vocabulary)."""
    log_prob_chunk_size: MayChangeOnResume[PositiveInt | None] = None
    """Rows of logits held at once by the log-prob head; null = 4096 on GPU, 1024 on CPU."""
    fused_kernels: MayChangeOnResume[Literal["auto", "off"]] = "auto"
    """auto = the fused head, after a check of it against float64 at the start; off = composed from torch operations."""
    optim: OptimConfig = OptimConfig()
    megatron: MegatronConfig = MegatronConfig()


class ServerConfig(Section):
    """SGLang servers that launch/ starts."""

    num_servers: NumProcesses = 1
    """Servers to start, in all (ignored when servers are given by URL)."""
    nnodes: NonNegativeInt = 0
    """Nodes that run servers and nothing else, num_servers x nodes_per_server / nnodes each; 0 = they are on the
    trainer's machine."""
    tensor_model_parallel_size: NumProcesses = 1
    """GPUs (or CPU processes) per server, on all of its nodes together."""
    nodes_per_server: NumProcesses = 1
    """Nodes of a server; each gives `tensor_model_parallel_size / nodes_per_server` GPUs."""
    host: str = "127.0.0.1"
    """Address of this machine that the servers bind to."""
    max_total_tokens: PositiveInt | None = None
    """KV cache size in tokens; null = SGLang's choice on GPU, 16384 on CPU."""
    max_running_requests: PositiveInt | None = None
    """Requests decoded at once; null = SGLang's choice on GPU, 64 on CPU."""
    mem_fraction_static: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Share of GPU memory for weights and KV cache; null = SGLang's choice, with `hybrid_engine` 0.82 without what the
    trainer keeps on the GPU by the plan, which shows it."""
    extra_args: list[str] = []
    """Further arguments of `sglang.launch_server`, as they are; some are refused (docs/servers.md)."""
    startup_timeout_s: Seconds = 900.0
    """Deadline for a server to become healthy."""
    max_restarts: NumRetries = 3
    """Restarts of a server that died, before it is given up; the run is when none is left."""


class RolloutConfig(Section):
    n: NumResponses = 8
    """Responses per prompt (the group size)."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer's log-probs use it too."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling; 1 = off. Below 1 the server's log-probs are those before the cut."""
    top_k: BoundedInt = -1
    """Keep the k likeliest tokens; -1 = off."""
    stop_token_ids: list[int] = []
    """Further end-of-response tokens besides the model's own."""
    server_urls: MayChangeOnResume[list[str]] = []
    """Servers that already run (http://host:port); empty = launch/ starts them."""
    server_urls_file: MayChangeOnResume[str | None] = None
    """File with such URLs, one per line, in place of the list; it is watched: servers may be added and removed."""
    server_api_key_file: MayChangeOnResume[str | None] = None
    """File (mode 600) with the key that the servers demand; null = servers given by URL are asked without one, and our
    own demand a random one of the run."""
    server: MayChangeOnResume[ServerConfig] = ServerConfig()
    quantization: Literal["fp8"] | None = None
    """fp8: servers of a mixture hold the weights of attention, MLPs and experts in FP8, half the memory, quantized anew
    for each push (docs/servers.md); needs `algorithm.rollout_correction`. null = they hold the trainer's type."""
    max_staleness: NonNegativeInt = 0
    """Weight versions between the oldest sampled token of a group and the step that trains on it. 0 = trainer and
    servers take turns, and each step is trained on what its own weights wrote; above 0 servers go on while the trainer
    trains, which needs `algorithm.rollout_correction`."""
    max_concurrency: MayChangeOnResume[PositiveInt] = 512
    """Requests in flight per server."""
    request_timeout_s: MayChangeOnResume[Seconds] = 1800.0
    """Deadline of one generation request, its server's pauses for weight pushes included."""
    max_retries: MayChangeOnResume[NumRetries] = 3
    """Attempts after a failed request, on the other servers first."""
    step_timeout_s: MayChangeOnResume[Seconds] = 7200.0
    """Deadline of one `next_batch`; the error names what is still missing."""
    val_temperature: MayChangeOnResume[NonNegativeFloat] = 0.0
    """Temperature of held-out evaluation; 0 = greedy."""
    val_top_p: MayChangeOnResume[Annotated[float, Field(gt=0.0, le=1.0)]] = 1.0
    """Nucleus sampling of held-out evaluation; the published AIME figures use 0.7."""
    val_n: MayChangeOnResume[NumResponses] = 1
    """Responses per held-out prompt."""
    deterministic: MayChangeOnResume[bool] = False
    """Servers sample each token from the seed of its request, by kernels whose results do not depend on what else is in
    the batch (SGLang's deterministic inference), so that two runs get the same responses (docs/rollout.md); slower.
    Needs max_staleness 0."""
    dump_samples: MayChangeOnResume[NonNegativeInt] = 8
    """Groups written to rollouts/step_NNNNNN.jsonl per step; 0 = none."""
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    agent: AgentConfig = AgentConfig()


class RefConfig(Section):
    path: str | None = None
    """Checkpoint of the reference model, of either kind; null = the actor's starting weights."""


class ActorRolloutRefConfig(Section):
    model: ModelConfig = ModelConfig()
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = RefConfig()
    rollout: RolloutConfig = RolloutConfig()
    hybrid_engine: MayChangeOnResume[bool] = False
    """Trainer and servers use the same GPUs in turns (docs/colocated.md): servers sleep while the trainer trains, and
    the trainer's memory is parked while they sample. Needs max_staleness 0."""
