"""What keys demand of each other. One small function per subject yields a `Mistake` for each; no file is read.

A technique whose settings are given while its switch is off is a mistake here: silently-off techniques are how
published recipes fail.
"""

import importlib.util
import re
from collections.abc import Iterator

from megatron_dapo.config.derived import (
    clip_keys,
    effective_clip,
    layout,
    longest_micro_batch_sample,
    needs_reference,
)
from megatron_dapo.config.estimator_checks import estimators
from megatron_dapo.config.inert_checks import ACTOR, KL_CTRL, OVERLONG, without_effect
from megatron_dapo.config.keys import known_keys, was_left_off
from megatron_dapo.config.loader import nearest
from megatron_dapo.config.loss_checks import loss_function
from megatron_dapo.config.mistake import Mistake
from megatron_dapo.config.multi_turn_checks import multi_turn, variable_names
from megatron_dapo.config.replay_checks import experience_replay
from megatron_dapo.config.sampling_checks import SAMPLING, SAMPLING_CHECKS
from megatron_dapo.config.schema import Config
from megatron_dapo.config.server_checks import ROLLOUT, SERVER_CHECKS

BUILT_IN_REWARDS = frozenset(
    {"by_data_source", "math_dapo", "math_verify", "exact_match", "reasoning_gym", "environment"}
)
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")

MEGATRON = f"{ACTOR}.megatron"
WORLD = ("trainer.nnodes", "trainer.n_procs_per_node")
STAGES = (f"{MEGATRON}.tensor_model_parallel_size", f"{MEGATRON}.pipeline_model_parallel_size")
LENGTHS = ("data.max_prompt_length", "data.max_response_length")
# what `longest_micro_batch_sample` pads for
PADDING = tuple(f"{MEGATRON}.{key}" for key in ("tensor_model_parallel_size", "sequence_parallel", "fp8", "fp8_recipe"))
USE_DAPO = f"{ACTOR}.use_dapo"


def batch_sizes(config: Config) -> Iterator[Mistake]:
    groups, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if groups % mini:
        yield Mistake(
            ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"),
            f"data.train_batch_size is {groups}, not a multiple of {ACTOR}.ppo_mini_batch_size {mini}; "
            f"set train_batch_size to a multiple of {mini}, or ppo_mini_batch_size to a divisor of {groups}.",
        )
    n, sizes = config.actor_rollout_ref.rollout.n, layout(config)
    model_ranks = sizes.tp * sizes.pp
    if sizes.world % model_ranks == 0 and (mini * n) % sizes.dp:
        yield Mistake(
            (f"{ACTOR}.ppo_mini_batch_size", f"{ROLLOUT}.n", *WORLD, *STAGES),
            f"A mini-batch of {mini * n} samples ({ACTOR}.ppo_mini_batch_size {mini} x {ROLLOUT}.n {n}) cannot be "
            f"shared evenly by {sizes.dp} data-parallel ranks (world size {sizes.world} / TP {sizes.tp} / "
            f"PP {sizes.pp}); change ppo_mini_batch_size, n or the number of ranks.",
        )


def lengths(config: Config) -> Iterator[Mistake]:
    data, actor = config.data, config.actor_rollout_ref.actor
    longest = data.max_prompt_length + data.max_response_length
    sum_in_words = (
        f"data.max_prompt_length {data.max_prompt_length} + data.max_response_length {data.max_response_length}"
    )
    padded = longest_micro_batch_sample(config)
    caps = (
        (f"{ACTOR}.max_tokens_per_microbatch", actor.max_tokens_per_microbatch, padded),
        (f"{ROLLOUT}.server.max_total_tokens", config.actor_rollout_ref.rollout.server.max_total_tokens, longest),
    )
    for key, cap, needed in caps:
        if cap is not None and cap < needed:
            words = sum_in_words if needed == longest else f"{sum_in_words}, padded for sequence parallelism and FP8"
            yield Mistake(
                (key, *LENGTHS, *(PADDING if cap >= longest else ())),
                f"{key} is {cap}, too small for one sample of {needed} tokens ({words}); raise it.",
            )
    if data.filter_overlong_prompts and data.truncation == "left":
        yield Mistake(
            ("data.truncation", "data.filter_overlong_prompts"),
            "data.truncation is left, but data.filter_overlong_prompts is true, so that no prompt is left to cut; "
            "set filter_overlong_prompts to false, or truncation to error.",
        )


def parallel_layout(config: Config) -> Iterator[Mistake]:
    sizes, megatron = layout(config), config.actor_rollout_ref.actor.megatron
    if sizes.world % (sizes.tp * sizes.pp):
        yield Mistake(
            (*WORLD, *STAGES),
            f"The world size is {sizes.world} (trainer.nnodes {config.trainer.nnodes} x trainer.n_procs_per_node "
            f"{config.trainer.n_procs_per_node}), not a multiple of {sizes.tp * sizes.pp} "
            f"({MEGATRON}.tensor_model_parallel_size {sizes.tp} x pipeline_model_parallel_size {sizes.pp}); change one "
            f"of the four.",
        )
    if sizes.tp * sizes.dp % sizes.ep:
        yield Mistake(
            (f"{MEGATRON}.expert_model_parallel_size", *WORLD, *STAGES),
            f"{MEGATRON}.expert_model_parallel_size is {sizes.ep}, but does not divide the {sizes.tp * sizes.dp} "
            f"ranks of a pipeline stage (TP {sizes.tp} x DP {sizes.dp}); choose a divisor.",
        )
    if megatron.sequence_parallel and sizes.tp == 1:
        yield Mistake(
            (f"{MEGATRON}.sequence_parallel", f"{MEGATRON}.tensor_model_parallel_size"),
            f"{MEGATRON}.sequence_parallel is true, but tensor_model_parallel_size is 1; raise it, or set "
            f"sequence_parallel to false.",
        )
    if sizes.vpp is not None and (sizes.pp == 1 or sizes.vpp == 1):
        yield Mistake(
            (f"{MEGATRON}.virtual_pipeline_model_parallel_size", f"{MEGATRON}.pipeline_model_parallel_size"),
            f"{MEGATRON}.virtual_pipeline_model_parallel_size is {sizes.vpp} with pipeline_model_parallel_size "
            f"{sizes.pp}; the interleaved schedule needs at least 2 of both, null is the plain one.",
        )


def fp8(config: Config) -> Iterator[Mistake]:
    megatron = config.actor_rollout_ref.actor.megatron
    given = f"{MEGATRON}.fp8 is {megatron.fp8}"
    if megatron.fp8 == "none":
        default = known_keys()[f"{MEGATRON}.fp8_recipe"].default
        if megatron.fp8_recipe != default:
            yield Mistake(
                (f"{MEGATRON}.fp8_recipe", f"{MEGATRON}.fp8"),
                f"{MEGATRON}.fp8_recipe is {megatron.fp8_recipe}, but has no effect while fp8 is none; "
                f"set fp8 to e4m3 or hybrid, or remove fp8_recipe.",
            )
        return
    if megatron.use_transformer_engine == "off":
        yield Mistake(
            (f"{MEGATRON}.fp8", f"{MEGATRON}.use_transformer_engine"),
            f"{given}, which Transformer Engine computes, but use_transformer_engine is off; "
            f"set it to auto, or fp8 to none.",
        )
    if megatron.dtype == "float32":
        yield Mistake(
            (f"{MEGATRON}.fp8", f"{MEGATRON}.dtype"),
            f"{given}, but dtype is float32; set dtype to bfloat16, or fp8 to none.",
        )


def clipping(config: Config) -> Iterator[Mistake]:
    actor = config.actor_rollout_ref.actor
    low, high = effective_clip(config)
    low_key, high_key = clip_keys(config)
    if low >= 1.0:
        yield Mistake(
            (low_key, USE_DAPO),
            f"{low_key} is {low:g}, but must be below 1: the ratio of two probabilities is never negative.",
        )
    if high < low:
        yield Mistake(
            (high_key, low_key, USE_DAPO),
            f"{ACTOR}.clip_ratio_high is {high:g}, below {low_key.rpartition('.')[2]} {low:g}; clip-higher widens the "
            f"upper side: set clip_ratio_high to that or more.",
        )
    if actor.clip_ratio_c is not None and actor.clip_ratio_c <= 1.0 + high:
        yield Mistake(
            (f"{ACTOR}.clip_ratio_c", high_key, USE_DAPO),
            f"{ACTOR}.clip_ratio_c is {actor.clip_ratio_c:g}, inside the clip range that ends at {1.0 + high:g}; "
            f"set it above that, or to null for no dual clip.",
        )
    for name in ("clip_ratio_low", "clip_ratio_high"):
        value, default = getattr(actor, name), known_keys()[f"{ACTOR}.{name}"].default
        if value not in (default, None) and was_left_off(actor, "use_dapo"):
            yield Mistake(
                (f"{ACTOR}.{name}", USE_DAPO),
                f"{ACTOR}.{name} is {value:g}, but has no effect while {ACTOR}.use_dapo is false; "
                f"set use_dapo to true, or remove {name}.",
            )


def dapo_switches(config: Config) -> Iterator[Mistake]:
    dapo = config.algorithm.dapo
    switches = {SAMPLING: dapo.dynamic_sampling.enable, OVERLONG: dapo.overlong_reward_shaping.enable}
    for key, on in switches.items():
        if on and was_left_off(dapo):
            yield Mistake(
                (f"{key}.enable", "algorithm.dapo.enable"),
                f"{key}.enable is true, but has no effect while algorithm.dapo.enable is false; "
                f"set algorithm.dapo.enable to true, or {key}.enable to false.",
            )
    if dapo.enable and not any(switches.values()):
        yield Mistake(
            ("algorithm.dapo.enable", *(f"{key}.enable" for key in switches)),
            f"algorithm.dapo.enable is true, but does nothing by itself; enable {SAMPLING} or {OVERLONG}, "
            f"or set it to false (clip-higher is {ACTOR}.use_dapo).",
        )


def overlong_shaping(config: Config) -> Iterator[Mistake]:
    shaping, limit = config.algorithm.dapo.overlong_reward_shaping, config.data.max_response_length
    if not shaping.enable:
        return
    if shaping.buffer_len >= limit:
        yield Mistake(
            (f"{OVERLONG}.enable", f"{OVERLONG}.buffer_len", "data.max_response_length"),
            f"{OVERLONG}.buffer_len is {shaping.buffer_len}, but must be below data.max_response_length {limit}; "
            f"a fifth of it is usual.",
        )
    elif shaping.expected_len is not None and shaping.expected_len + shaping.buffer_len > limit:
        yield Mistake(
            (f"{OVERLONG}.enable", f"{OVERLONG}.expected_len", f"{OVERLONG}.buffer_len", "data.max_response_length"),
            f"{OVERLONG}.expected_len {shaping.expected_len} + buffer_len {shaping.buffer_len} is above "
            f"data.max_response_length {limit}, so that the soft interval would be cut; set expected_len to null.",
        )
    yield from _overlong_penalties(config)


def _overlong_penalties(config: Config) -> Iterator[Mistake]:
    shaping = config.algorithm.dapo.overlong_reward_shaping
    penalty, soft = shaping.truncation_penalty, shaping.buffer_len > 0
    if soft and shaping.penalty_factor == 0.0:
        yield Mistake(
            (f"{OVERLONG}.enable", f"{OVERLONG}.penalty_factor", f"{OVERLONG}.buffer_len"),
            f"{OVERLONG}.penalty_factor is 0, so that buffer_len {shaping.buffer_len} punishes nothing; set it to 1.",
        )
    if not soft and penalty == 0.0 and not shaping.filter_truncated:
        yield Mistake(
            (
                f"{OVERLONG}.enable",
                f"{OVERLONG}.buffer_len",
                f"{OVERLONG}.truncation_penalty",
                f"{OVERLONG}.filter_truncated",
            ),
            f"{OVERLONG}.enable is true, but buffer_len is 0, truncation_penalty is 0 and filter_truncated is false: "
            f"nothing would happen; set one of them, or enable to false.",
        )
    if not soft and penalty > 0.0 and shaping.soft_penalty_mode in ("additive", "multiplicative"):
        yield Mistake(
            (
                f"{OVERLONG}.enable",
                f"{OVERLONG}.truncation_penalty",
                f"{OVERLONG}.soft_penalty_mode",
                f"{OVERLONG}.buffer_len",
            ),
            f"{OVERLONG}.truncation_penalty is {penalty:g}, which rewards truncated responses in mode "
            f"{shaping.soft_penalty_mode}; make it negative.",
        )
    if not soft and penalty != 0.0 and shaping.filter_truncated:
        yield Mistake(
            (
                f"{OVERLONG}.enable",
                f"{OVERLONG}.filter_truncated",
                f"{OVERLONG}.truncation_penalty",
                f"{OVERLONG}.buffer_len",
            ),
            f"{OVERLONG}.filter_truncated is true, so that truncated responses have no loss, but truncation_penalty "
            f"{penalty:g} would still shift their groups' means; set it to 0, or filter_truncated to false.",
        )


def kl(config: Config) -> Iterator[Mistake]:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    control = algorithm.kl_ctrl
    pairs = (
        (f"{ACTOR}.use_kl_loss", actor.use_kl_loss, f"{ACTOR}.kl_loss_coef", actor.kl_loss_coef),
        ("algorithm.use_kl_in_reward", algorithm.use_kl_in_reward, f"{KL_CTRL}.kl_coef", control.kl_coef),
    )
    for switch_key, on, coefficient_key, coefficient in pairs:
        if on and coefficient == 0.0:
            yield Mistake(
                (switch_key, coefficient_key),
                f"{switch_key} is true, but {coefficient_key} is 0; set the coefficient, or the switch to false.",
            )
        if on is False and coefficient != 0.0:
            yield Mistake(
                (coefficient_key, switch_key),
                f"{coefficient_key} is {coefficient:g}, but has no effect while {switch_key} is false; "
                f"set the switch to true, or the coefficient to 0.",
            )
    if control.type == "adaptive" and control.kl_coef == 0.0 and not algorithm.use_kl_in_reward:
        yield Mistake(
            (f"{KL_CTRL}.type", f"{KL_CTRL}.kl_coef", "algorithm.use_kl_in_reward"),
            f"{KL_CTRL}.type is adaptive, but steers nothing while {KL_CTRL}.kl_coef is 0; set kl_coef, or type to "
            f"fixed.",
        )
    ref = config.actor_rollout_ref.ref
    if ref.path is not None and not needs_reference(config):
        yield Mistake(
            (
                "actor_rollout_ref.ref.path",
                *(key for switch, _, coefficient, _ in pairs for key in (switch, coefficient)),
            ),
            f"actor_rollout_ref.ref.path is {ref.path}, but no KL coefficient uses a reference model; set "
            f"{ACTOR}.use_kl_loss with kl_loss_coef, or {KL_CTRL}.kl_coef, or null here.",
        )


def optimizer(config: Config) -> Iterator[Mistake]:
    optim, steps = config.actor_rollout_ref.actor.optim, config.trainer.total_training_steps
    if optim.min_lr > optim.lr:
        yield Mistake(
            (f"{ACTOR}.optim.min_lr", f"{ACTOR}.optim.lr"),
            f"{ACTOR}.optim.min_lr is {optim.min_lr:g}, above {ACTOR}.optim.lr {optim.lr:g}; lower it.",
        )
    if optim.lr_warmup_steps >= steps:
        yield Mistake(
            (f"{ACTOR}.optim.lr_warmup_steps", "trainer.total_training_steps"),
            f"{ACTOR}.optim.lr_warmup_steps is {optim.lr_warmup_steps}, but must be below trainer.total_training_steps "
            f"{steps}, or the learning rate never reaches its peak.",
        )


def sampling(config: Config) -> Iterator[Mistake]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.top_k != -1 and rollout.top_k < 1:
        yield Mistake(
            (f"{ROLLOUT}.top_k",), f"{ROLLOUT}.top_k is {rollout.top_k}, but must be 1 or more, or -1 for off."
        )
    if rollout.val_temperature == 0.0 and rollout.val_n > 1:
        yield Mistake(
            (f"{ROLLOUT}.val_n", f"{ROLLOUT}.val_temperature"),
            f"{ROLLOUT}.val_n is {rollout.val_n}, but at val_temperature 0 all answers to a prompt are the same; "
            f"set val_n to 1, or raise val_temperature.",
        )
    if rollout.request_timeout_s > rollout.step_timeout_s:
        yield Mistake(
            (f"{ROLLOUT}.request_timeout_s", f"{ROLLOUT}.step_timeout_s"),
            f"{ROLLOUT}.request_timeout_s is {rollout.request_timeout_s:g}, longer than the whole step's "
            f"{ROLLOUT}.step_timeout_s {rollout.step_timeout_s:g}; lower the first or raise the second.",
        )


def evaluation(config: Config) -> Iterator[Mistake]:
    freq, data = config.trainer.test_freq, config.data
    if freq != -1 and freq < 1:
        yield Mistake(
            ("trainer.test_freq",),
            f"trainer.test_freq is {freq}, but must be 1 or more, or -1 for only before and after the run.",
        )
    if freq > 0 and not data.val_files:
        yield Mistake(
            ("trainer.test_freq", "data.val_files"),
            f"trainer.test_freq is {freq}, but data.val_files is empty; give val_files, or set test_freq to -1.",
        )
    for path in sorted(set(data.val_files) & set(data.train_files)):
        yield Mistake(
            ("data.val_files", "data.train_files"),
            f"data.val_files holds {path}, which is also in data.train_files: not held out; remove it from one.",
        )


def logger(config: Config) -> Iterator[Mistake]:
    if "wandb" in config.trainer.logger and importlib.util.find_spec("wandb") is None:
        yield Mistake(
            ("trainer.logger",),
            "trainer.logger has wandb, which is not installed; pip install -e '.[wandb]', or leave it out.",
        )


def checkpoints(config: Config) -> Iterator[Mistake]:
    trainer = config.trainer
    if trainer.save_interval != -1 and trainer.save_interval < 1:
        yield Mistake(
            ("trainer.save_interval",),
            f"trainer.save_interval is {trainer.save_interval}, but must be 1 or more, or -1 for only when the run is "
            f"asked to stop.",
        )
    if trainer.keep_every is not None and trainer.keep_last is None:
        yield Mistake(
            ("trainer.keep_every", "trainer.keep_last"),
            f"trainer.keep_every is {trainer.keep_every}, but has no effect while keep_last is null and every "
            f"checkpoint is kept; set keep_last, or remove keep_every.",
        )
    for name in trainer.accept_changes:
        if name not in known_keys():
            near = nearest(name, known_keys())
            yield Mistake(
                ("trainer.accept_changes",),
                f"trainer.accept_changes holds {name}, which is not a key of the config"
                f"{f'; the nearest is {near}' if near else ''}.",
            )
    if trainer.resume == "never" and (trainer.accept_changes or trainer.accept_missing):
        given = "accept_changes" if trainer.accept_changes else "accept_missing"
        yield Mistake(
            (f"trainer.{given}", "trainer.resume"),
            f"trainer.{given} is given, but nothing is resumed while trainer.resume is never; remove it, or set auto.",
        )


def run_folder_name(config: Config) -> Iterator[Mistake]:
    """The run folder is below runs/, so the name must not lead out of it."""
    name = config.trainer.experiment_name
    parts = name.split("/")
    if {"", ".", ".."}.isdisjoint(parts) and name.isprintable() and max(len(part.encode()) for part in parts) <= 200:
        return
    yield Mistake(
        ("trainer.experiment_name",),
        f"trainer.experiment_name is {name[:200]!r}, but must be the name of a folder below runs/: printable, without "
        f"empty parts or .., not absolute and of at most 200 bytes a part; trainer.run_dir takes any path.",
    )


def reward(config: Config) -> Iterator[Mistake]:
    yield from variable_names("reward.pass_env", config.reward.pass_env)
    name = config.reward.function
    if name in BUILT_IN_REWARDS or _IMPORT_PATH.fullmatch(name):
        return
    near = nearest(name, sorted(BUILT_IN_REWARDS))
    yield Mistake(
        ("reward.function",),
        f"reward.function is {name!r}, which is neither {', '.join(sorted(BUILT_IN_REWARDS))} nor of the form "
        f"package.module:function{f'; the nearest is {near}' if near else ''}.",
    )


CHECKS = (
    batch_sizes,
    *SAMPLING_CHECKS,
    lengths,
    parallel_layout,
    fp8,
    clipping,
    dapo_switches,
    overlong_shaping,
    estimators,
    experience_replay,
    kl,
    loss_function,
    without_effect,
    optimizer,
    sampling,
    multi_turn,
    *SERVER_CHECKS,
    evaluation,
    logger,
    checkpoints,
    run_folder_name,
    reward,
)
