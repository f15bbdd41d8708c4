"""The process plan of a config as text, for a dry run and for a launcher's start."""

from collections.abc import Iterator

from megatron_dapo.checks.model_checks import published_name, read_model_specs
from megatron_dapo.common.addresses import is_loopback
from megatron_dapo.common.sizes import GB, MB, ceil_div, format_gb
from megatron_dapo.config.built_ins import POLICY_LOSSES
from megatron_dapo.config.derived import (
    critic_batching,
    dapo_techniques,
    effective_clip,
    gen_batch_size,
    has_reference_for_own_loss,
    machines_per_server,
    needs_old_log_probs,
    num_mini_batches,
    num_optimizer_steps_per_rollout_step,
    offload_fraction,
    parallel_sizes,
    replays_servers_experts,
    samples_per_rollout_step,
    servers_per_node,
    shares_gpus,
    starts_servers,
    uses_critic,
    uses_full_kl,
    uses_kl_in_reward,
    uses_kl_loss,
    uses_servers,
)
from megatron_dapo.config.keys import show_text
from megatron_dapo.config.schema.config import Config
from megatron_dapo.config.schema.run import RewardConfig
from megatron_dapo.estimates.memory import host_memory, kept_free, routed_experts_on_host, trainer_memory, usable_memory
from megatron_dapo.estimates.pipeline import split_of
from megatron_dapo.estimates.recompute import in_words
from megatron_dapo.estimates.server_memory import (
    COPY_RATE,
    kept_while_sampling,
    moved_bytes,
    moving_s,
    push_memory,
    server_memory,
    server_share,
)
from megatron_dapo.estimates.server_weights import holds_blocks
from megatron_dapo.huggingface.lora_settings import actor_is_reference, lora_settings
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.queue.group_filter import FILTER_METRICS
from megatron_dapo.storage.run_folder import RunFolder

LABEL_WIDTH = 14

_LAYERS = {  # by use_transformer_engine; rank 0 reports the result after building its layers
    "on": "layers and optimizer of Transformer Engine; without it the ranks refuse to start",
    "off": "layers of our own; no Transformer Engine",
    "auto": "Transformer Engine's layers if it is installed, on GPUs in bfloat16; else our own",
}


def process_plan(config: Config) -> str:
    """Return the plan as aligned lines: run folder, trainer ranks and coordinates, steps, servers,
    controller, rewards, reference."""
    rows = [
        ("run folder", [str(RunFolder.of(config.trainer).path)]),
        ("trainer", list(_trainer(config))),
        *(_fine_tuning(config) if config.sft.enable else _reinforcement_learning(config)),
        ("memory", list(_memory(config))),
    ]
    lines = ["Process plan"]
    for label, texts in rows:
        for i, text in enumerate(texts):
            lines.append(f"  {label if i == 0 else '':<{LABEL_WIDTH}}{text}")
    return "\n".join(lines)


def _reinforcement_learning(config: Config) -> Iterator[tuple[str, list[str]]]:
    yield "rollout step", list(_rollout_step(config))
    yield "techniques", list(_techniques(config))
    yield from _rollout(config)
    yield "reference", list(_reference(config))
    if uses_critic(config):
        yield "critic", list(_critic(config))


def _fine_tuning(config: Config) -> Iterator[tuple[str, list[str]]]:
    size = config.data.train_batch_size
    steps = _count(config.trainer.total_training_steps, "optimizer step")
    longest = config.sft.max_length
    yield "conversations", [f"{size} conversations of at most {longest} tokens in each of {steps}"]
    held_out = ", and ".join(
        ["before the first and after the last step"]
        + ([f"every {config.trainer.test_freq}"] if config.trainer.test_freq > 0 else [])
    )
    yield "held out", [f"the loss of data.val_files, {held_out}" if config.data.val_files else "none"]


def _trainer(config: Config) -> Iterator[str]:
    sizes = parallel_sizes(config)
    trainer = config.trainer
    parallel = f"TP {sizes.tp}, PP {sizes.pp}, DP {sizes.dp}"
    parallel += f", CP {sizes.cp}" if sizes.cp > 1 else ""
    parallel += f", EP {sizes.ep}" if sizes.ep > 1 else ""
    parallel += f", ETP {sizes.etp}" if sizes.etp > 1 else ""
    parallel += f", {sizes.vpp} chunks per stage" if sizes.vpp else ""
    parallel += ", sequence parallel" if config.actor_rollout_ref.actor.megatron.sequence_parallel else ""
    yield f"{_count(sizes.world, 'rank')} ({_count(trainer.nnodes, 'node')} x {trainer.n_procs_per_node}): {parallel}"
    yield _LAYERS[config.actor_rollout_ref.actor.megatron.use_transformer_engine]
    if (lora := lora_settings(config)) is not None:
        modules = show_text(config.actor_rollout_ref.model.target_modules)
        yield f"LoRA: weights are frozen, adapters of rank {lora.rank}, alpha {lora.alpha:g} are trained on {modules}"
    width = len(str(sizes.world - 1))
    for first in range(0, sizes.world, sizes.tp):
        coordinates = sizes.coordinates(first)
        last = first + sizes.tp - 1
        ranks = f"rank  {first:>{width}}" if first == last else f"ranks {first:>{width}}-{last:>{width}}"
        context = f", CP {coordinates.cp}" if sizes.cp > 1 else ""
        tensor_ranks = "0" if sizes.tp == 1 else f"0-{sizes.tp - 1}"
        yield f"{ranks}  TP {tensor_ranks}, PP {coordinates.pp}, DP {coordinates.dp}{context}"


def _rollout_step(config: Config) -> Iterator[str]:
    data = config.data
    actor = config.actor_rollout_ref.actor
    n = config.actor_rollout_ref.rollout.n
    mini_batch = actor.ppo_mini_batch_size
    steps = num_optimizer_steps_per_rollout_step(config)
    yield f"{data.train_batch_size} groups x {n} = {samples_per_rollout_step(config)} samples"
    if config.actor_rollout_ref.rollout.max_staleness:
        yield f"prompts drawn one by one; {gen_batch_size(config)} count as a gen batch"
    else:
        yield f"prompts drawn in waves, a gen batch of {gen_batch_size(config)} at most"
    yield (
        f"{_count(steps, 'optimizer step')} = {num_mini_batches(config)} mini-batches of {mini_batch * n} samples "
        f"({mini_batch} groups) x {_count(actor.ppo_epochs, 'pass', 'passes')}"
    )
    total = config.trainer.total_training_steps
    yield f"{_count(total, 'rollout step')}, {_count(total * steps, 'optimizer step')} in all"


def _techniques(config: Config) -> Iterator[str]:
    low, high = effective_clip(config)
    shaping = config.algorithm.overlong_reward_shaping
    soft = f"soft buffer {shaping.buffer_len}" if shaping.buffer_len else f"truncation {shaping.truncation_penalty:g}"
    details = {
        "clip_higher": f"ratio clipped to [{1 - low:g}, {1 + high:g}]",
        "dynamic_sampling": _dynamic_sampling(config),
        "token_level_loss": config.actor_rollout_ref.actor.loss_agg_mode,
        "overlong_shaping": soft + (", truncated filtered" if shaping.filter_truncated else ""),
    }
    shown_when_off = {"clip_higher", "token_level_loss"}
    actor = config.actor_rollout_ref.actor
    loss = POLICY_LOSSES[actor.policy_loss]
    unused: set[str] = set() if loss.clips_ratio else {"clip_higher"}
    if actor.loss_function:
        yield f"{'loss':<17}{actor.loss_function}, in place of clip and aggregation"
        unused = shown_when_off
    elif loss.summary:
        yield f"{'loss':<17}{loss.summary}"
    if correction := _correction(config):
        yield f"{'correction':<17}{correction}"
    for name, on in dapo_techniques(config).items():
        if name not in unused:
            detail = f"  ({details[name]})" if on or name in shown_when_off else ""
            yield f"{name.replace('_', ' '):<17}{'on ' if on else 'off'}{detail}".rstrip()


def _correction(config: Config) -> str:
    """Return the correction for the servers' log-probs with its cost, or ""."""
    correction = config.algorithm.rollout_correction
    parts = []
    if correction.rollout_is != "none":
        parts.append(f"rollout_is {correction.rollout_is} ({show_text(correction.rollout_is_threshold)})")
    if correction.rollout_rs != "none":
        parts.append(f"rollout_rs {correction.rollout_rs} ({show_text(correction.rollout_rs_threshold)})")
    if correction.rollout_token_veto_threshold is not None:
        parts.append(f"veto below {correction.rollout_token_veto_threshold:g}")
    if correction.bypass_mode:
        parts.append("bypass_mode, the servers' log-probs are the old ones")
    if not parts:
        return ""
    cost = "a forward pass for old log-probs" if needs_old_log_probs(config) else "no pass for old log-probs"
    return f"{', '.join(parts)}; {cost}"


def _dynamic_sampling(config: Config) -> str:
    sampling = config.algorithm.dynamic_sampling
    by = f"spread of {sampling.filter_mode}" if sampling.filter_mode in FILTER_METRICS else sampling.filter_mode
    if sampling.form == "mask":
        return f"{by}, by advantages of 0"
    limit = sampling.max_num_gen_batches
    return f"{by}, {f'at most {limit}' if limit > 0 else 'any number of'} gen batches"


def _rollout(config: Config) -> list[tuple[str, list[str]]]:
    """Return the rows about the source of batches and the targets of weights."""
    if config.trainer.synthetic_batch:
        return [("batches", ["synthetic: random tokens and rewards; no servers, no rewards, no weight sync"])]
    if config.trainer.replay:
        return [("batches", [f"replay of {config.trainer.replay}: no servers, no rewards, no weight sync"])]
    reward = config.reward
    return [
        ("staleness", list(_staleness(config))),
        ("servers", list(_servers(config))),
        ("controller", ["1 process beside rank 0", *_routed_experts(config)]),
        ("rewards", [f"{_count(reward.num_workers, 'process', 'processes')}, {reward.timeout_s:g} s per answer"]),
        *_scorers(reward),
        *_environments(config),
        *_agents(config),
        ("weight sync", [_weight_sync(config)]),
    ]


def _scorers(reward: RewardConfig) -> Iterator[tuple[str, list[str]]]:
    model = reward.model
    judge = reward.judge
    if model.path:
        server = f"1 SGLang server x TP {model.tensor_model_parallel_size}, started by launch/, behind the others"
        yield "reward model", [f"{model.path}: {f'at {model.url}' if model.url else server}"]
    if judge.url:
        yield "judge", [f"{judge.model} at {judge.url}, {_count(judge.max_concurrency, 'question')} at once"]


def _routed_experts(config: Config) -> Iterator[str]:
    """Yield the memory that the servers' experts take until they are distributed."""
    specs = read_model_specs(config)
    if not replays_servers_experts(config) or specs is None or specs[0].moe is None:
        return
    moe = specs[0].moe
    per_token = specs[0].num_layers * moe.experts_per_token * moe.bytes_per_choice
    longest = config.data.max_prompt_length + config.data.max_response_length
    of_step = samples_per_rollout_step(config) * longest * per_token
    yield f"routed experts: {per_token} bytes per token, of a step of samples of full length {format_gb(of_step)} GB;"
    yield "the controller holds those of all waiting groups, rank 0 those of a step twice while it distributes them"


def _environments(config: Config) -> Iterator[tuple[str, list[str]]]:
    keys = config.actor_rollout_ref.rollout.multi_turn
    if keys.enable:
        workers = f"{_count(keys.num_workers, 'process', 'processes')}, {keys.step_timeout_s:g} s per answer"
        yield "environments", [f"{keys.environment}: {workers}, at most {_count(keys.max_turns, 'turn')}"]


def _agents(config: Config) -> Iterator[tuple[str, list[str]]]:
    keys = config.actor_rollout_ref.rollout.agent
    if not keys.enable:
        return
    plays = f"{keys.function}: {_count(keys.num_workers, 'process', 'processes')}"
    if keys.command:
        plays = f"{' '.join(keys.command)}: a process each{' in a sandbox' if keys.sandbox else ''}"
    at = f"{_count(keys.num_gateways, 'gateway')} on {keys.host}, {f'port {keys.port}' if keys.port else 'free ports'}"
    if not is_loopback(keys.host):
        at += ": whoever reaches this address may ask, and is answered only with a trajectory's key"
    each = f"{_count(keys.max_open, 'trajectory', 'trajectories')} at once, {keys.timeout_s:g} s each"
    yield "agents", [f"{plays}, {each}", at]


def _staleness(config: Config) -> Iterator[str]:
    """Yield lines about the meaning of K for the run, and the split of the GPUs."""
    rollout = config.actor_rollout_ref.rollout
    age = rollout.max_staleness
    if age:
        steps = age * num_optimizer_steps_per_rollout_step(config)
        groups = (age + 1) * config.data.train_batch_size
        yield (
            f"max_staleness {_count(age, 'weight version')}: when a step begins to train on a token, it is at most "
            f"{_count(steps, 'optimizer step')} old"
        )
        yield f"servers sample while the trainer trains: at most {groups} groups are drawn and not yet trained on"
    else:
        yield "max_staleness 0: a step is trained on its own weights' responses; trainer and servers take turns"
    server = rollout.server
    if shares_gpus(config):
        yield f"on the same {_count(parallel_sizes(config).world, 'GPU')}: one sleeps while the other works"
    elif server.nnodes:
        num_train = parallel_sizes(config).world
        num_sample = server.num_servers * server.tensor_model_parallel_size
        share = num_train / (num_train + num_sample)
        yield f"{num_train} ranks train ({share:.0%}), {num_sample} sample: docs/cluster.md says how to choose both"


def _servers(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.server_urls:
        yield f"{_count(len(rollout.server_urls), 'server')} that already run"
        yield from rollout.server_urls
        return
    if rollout.server_urls_file:
        yield f"from the file {rollout.server_urls_file}, which may change"
        return
    server = rollout.server
    servers = f"{_count(server.num_servers, 'SGLang server')} x TP {server.tensor_model_parallel_size}"
    if (nodes := machines_per_server(config)) > 1:
        yield f"{servers}, each over {nodes} of {server.nnodes} server nodes"
    elif server.nnodes:
        yield f"{servers}, {servers_per_node(config)} on each of {_count(server.nnodes, 'server node')}"
    else:
        yield f"{servers}, started by launch/ on {server.host}, ports chosen at start"


def _reference(config: Config) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    kl = config.algorithm.kl_ctrl
    reasons = []
    if uses_kl_loss(config):
        reasons.append(f"KL loss with coefficient {actor.kl_loss_coef:g}")
    if uses_kl_in_reward(config):
        reasons.append(f"KL in the reward with {kl.type} coefficient {kl.kl_coef:g}")
    if has_reference_for_own_loss(config):
        reasons.append(f"loss of {actor.loss_function}")
    if not reasons:
        yield "none: no KL coefficient is set"
        return
    default = "the actor without its adapters" if actor_is_reference(config) else "the actor's starting weights"
    yield f"{config.actor_rollout_ref.ref.path or default}, on the trainer ranks, for the {' and the '.join(reasons)}"
    if uses_full_kl(config):
        sizes = parallel_sizes(config)
        megatron = actor.megatron
        sharing = sizes.num_copies * (sizes.tp if megatron.sequence_parallel else 1)
        tokens = ceil_div(samples_per_rollout_step(config) * config.data.max_response_length, sharing)
        yield "KL over the whole vocabulary: each rank of the last stage keeps its last hidden states until the update,"
        yield f"up to {tokens} tokens x hidden size x bytes of dtype, and holds a second chunk of logits"


def _critic(config: Config) -> Iterator[str]:
    sizes = critic_batching(config)
    warmup = config.trainer.critic_warmup
    num_mini_batches = ceil_div(config.data.train_batch_size, sizes.ppo_mini_batch_size)
    weights = config.critic.model.path or "the actor's starting weights"
    yield f"{weights} with a value head, on the trainer ranks"
    yield (
        f"{_count(num_mini_batches * sizes.ppo_epochs, 'optimizer step')} = {num_mini_batches} mini-batches of "
        f"{sizes.ppo_mini_batch_size} groups x {_count(sizes.ppo_epochs, 'pass', 'passes')}"
    )
    if warmup:
        yield f"only the critic trains in the first {_count(warmup, 'rollout step')}"


def _memory(config: Config) -> Iterator[str]:
    path = config.actor_rollout_ref.model.path
    if (specs := read_model_specs(config)) is None:
        yield f"not estimated: the model's config.json is not in {path or 'actor_rollout_ref.model.path'}"
        return
    if name := published_name(path):
        yield f"of the published shape of {name}, since {path} is not here"
    yield from memory_lines(config, specs)


def memory_lines(config: Config, specs: tuple[ModelSpec, ModelSpec | None]) -> Iterator[str]:
    """Yield lines about the estimated memory of the trainer's and the servers' GPUs. specs: of the
    actor and, if its size differs, of the critic."""
    parts = trainer_memory(config, *specs)
    sizes = ", ".join(f"{name} {format_gb(size)}" for name, size in parts.by_name.items())
    fits = parts.total <= usable_memory(config, specs[0])
    whole = f"{format_gb(parts.total)} of {config.trainer.gpu_memory_gb:g} GB per GPU"
    whole += f", {kept_free(config, specs[0]) / GB:g} kept free{'' if fits else ', DO NOT FIT'}"
    yield f"trainer: {whole}: {sizes}"
    if fraction := offload_fraction(config):
        on_host = format_gb(host_memory(config, *specs))
        yield f"{on_host} GB of each node's memory: {fraction:.0%} of the optimizer's state, with its gradients"
    if of_step := routed_experts_on_host(config, specs[0]):
        yield f"{format_gb(of_step)} GB of each node's memory: routed experts of a step of samples of full length"
    split = split_of(specs[0], parallel_sizes(config))
    if not split.is_even:
        yield f"layers of the {len(split.layers)} pipeline chunks: {split}"
    yield f"recomputed in backward: {in_words(config.actor_rollout_ref.actor.megatron)}"
    rollout = config.actor_rollout_ref.rollout
    # a Slurm job names the servers that it starts in a file
    are_a_jobs = bool(rollout.server_urls_file and rollout.server.nnodes and uses_servers(config))
    if starts_servers(config) or are_a_jobs:
        server = server_memory(config, *specs)
        longest = config.data.max_prompt_length + config.data.max_response_length
        form = " in FP8 blocks" if holds_blocks(config) else ""
        yield (
            f"server: weights {format_gb(server.weights)} GB per GPU{form}, KV cache {format_gb(server.kv_cache)} for "
            f"{_count(server.num_tokens, 'token')}, {_count(server.num_tokens // longest, 'sample')} of full length"
        )
        if server.num_requests is not None:
            requests = _count(server.num_requests, "request")
            each = f"{server.states_per_request} of {server.state / MB:.0f} MB"
            yield f"server: states {format_gb(server.states)} GB, {each} for {requests}"
    if shares_gpus(config):
        yield from _in_turns(config, *specs)


def _in_turns(config: Config, actor: ModelSpec, critic: ModelSpec | None) -> Iterator[str]:
    """Yield lines about shared GPUs: who holds what while servers sample and during a push, and
    what is moved in between."""
    kept = kept_while_sampling(config, actor, critic)
    share = server_share(config, actor, critic)
    size = config.trainer.gpu_memory_gb
    yield (
        f"sampling: {format_gb(share * size * GB + kept)} of {size:g} GB per GPU: the server's weights and cache "
        f"{share * size:.1f} (mem_fraction_static {share:g}), kept by the trainer {format_gb(kept)}"
    )
    pushing = format_gb(push_memory(config, actor, critic))
    yield f"push by handles: {pushing} GB per GPU, with the weights of both sides and buckets"
    moved = moved_bytes(config, actor, critic)
    seconds = moving_s(config, moved)
    together = "" if config.trainer.n_procs_per_node == 1 else ", all GPUs of a node at once"
    pinned = format_gb(moved * config.trainer.n_procs_per_node)
    yield (
        f"moved each way: {format_gb(moved)} GB per GPU, {seconds:.2g} s at {COPY_RATE / GB:g} GB/s{together}; "
        f"{pinned} GB of each node's memory are pinned for it"
    )


def _weight_sync(config: Config) -> str:
    sync = config.weight_sync
    groups = (
        "handles of memory on the same GPU"
        if shares_gpus(config)
        else _count(
            parallel_sizes(config).pp,
            "process group (one per pipeline stage)",
            "process groups (one per pipeline stage)",
        )
    )
    verify = f", {sync.verify_num_tensors} tensors compared after each push" if sync.verify else ""
    return f"{groups}, buckets of {sync.bucket_size_mb} MB, deadline {sync.timeout_s:g} s{verify}"


def _count(number: int, singular: str, plural: str | None = None) -> str:
    return f"{number} {singular if number == 1 else plural or f'{singular}s'}"
