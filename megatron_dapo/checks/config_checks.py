"""What keys demand of each other. One small function per subject yields a `Mistake` for each; no file is read."""

import importlib.util
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from megatron_dapo.checks.algorithm_checks import ALGORITHM_CHECKS
from megatron_dapo.checks.correction_checks import CORRECTION_CHECKS
from megatron_dapo.checks.length_checks import fits_longest_sample, sum_in_words
from megatron_dapo.checks.lora_checks import LORA_CHECKS
from megatron_dapo.checks.megatron_checks import MEGATRON_CHECKS
from megatron_dapo.checks.rollout_checks import ROLLOUT_CHECKS, is_variable_name, variable_names
from megatron_dapo.config.built_ins import BUILT_IN_REWARDS, BY_DATA_SOURCE, IMPORT_PATH
from megatron_dapo.config.derived import is_server_url, longest_sample, parallel_sizes
from megatron_dapo.config.key_names import ACTOR, LENGTHS, ROLLOUT, STAGES, WITHOUT_SERVERS, WORLD
from megatron_dapo.config.keys import known_keys
from megatron_dapo.config.loader import nearest
from megatron_dapo.config.mistake import Mistake
from megatron_dapo.config.schema.config import Config
from megatron_dapo.config.schema.run import JUDGE_VALUES, JudgeConfig


def batch_sizes(config: Config) -> Iterator[Mistake]:
    groups = config.data.train_batch_size
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if groups % mini:
        yield Mistake(
            ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"),
            f"data.train_batch_size is {groups}, not a multiple of {ACTOR}.ppo_mini_batch_size {mini}; "
            f"set train_batch_size to a multiple of {mini}, or ppo_mini_batch_size to a divisor of {groups}.",
        )
    n = config.actor_rollout_ref.rollout.n
    sizes = parallel_sizes(config)
    model_ranks = sizes.tp * sizes.pp * sizes.cp
    context = f" / CP {sizes.cp}" if sizes.cp > 1 else ""
    if sizes.world % model_ranks == 0 and (mini * n) % sizes.dp:
        yield Mistake(
            (f"{ACTOR}.ppo_mini_batch_size", f"{ROLLOUT}.n", *WORLD, *STAGES),
            f"A mini-batch of {mini * n} samples ({ACTOR}.ppo_mini_batch_size {mini} x {ROLLOUT}.n {n}) cannot be "
            f"shared evenly by {sizes.dp} data-parallel ranks (world size {sizes.world} / TP {sizes.tp} / "
            f"PP {sizes.pp}{context}); change ppo_mini_batch_size, n or the number of ranks.",
        )


def lengths(config: Config) -> Iterator[Mistake]:
    data = config.data
    cap = config.actor_rollout_ref.rollout.server.max_total_tokens
    longest = longest_sample(config)
    yield from fits_longest_sample(
        config, f"{ACTOR}.max_tokens_per_microbatch", config.actor_rollout_ref.actor.max_tokens_per_microbatch
    )
    if cap is not None and cap < longest:
        key = f"{ROLLOUT}.server.max_total_tokens"
        yield Mistake(
            (key, *LENGTHS),
            f"{key} is {cap}, too small for one sample of {longest} tokens ({sum_in_words(config)}); raise it.",
        )
    if data.filter_overlong_prompts and data.truncation == "left":
        yield Mistake(
            ("data.truncation", "data.filter_overlong_prompts"),
            "data.truncation is left, but data.filter_overlong_prompts is true, so that no prompt is left to cut; "
            "set filter_overlong_prompts to false, or truncation to error.",
        )


def optimizer(config: Config) -> Iterator[Mistake]:
    optim = config.actor_rollout_ref.actor.optim
    steps = config.trainer.total_training_steps
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


def evaluation(config: Config) -> Iterator[Mistake]:
    freq = config.trainer.test_freq
    data = config.data
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


def chosen_prompts(config: Config) -> Iterator[Mistake]:
    data = config.data
    if data.mixture and len(data.mixture) != len(data.train_files):
        yield Mistake(
            ("data.mixture", "data.train_files"),
            f"data.mixture has {len(data.mixture)} weights, but data.train_files has {len(data.train_files)} files; "
            f"give one weight per file.",
        )
    band = data.pass_rate
    if band is not None and (len(band) != 2 or band[0] > band[1]):
        yield Mistake(
            ("data.pass_rate",),
            f"data.pass_rate is {band}, but must be [lowest, highest], such as [0.05, 0.95].",
        )
    if data.mixture and config.exp_manager.experience_replay.enable:
        yield Mistake(
            ("data.mixture", "exp_manager.experience_replay.enable"),
            "data.mixture gives shares of the draws, but exp_manager.experience_replay.enable draws prompts of earlier "
            "steps beside them; leave one of the two out.",
        )


def prompt_template(config: Config) -> Iterator[Mistake]:
    if "{prompt}" not in config.data.prompt_template:
        yield Mistake(
            ("data.prompt_template",),
            f"data.prompt_template is {config.data.prompt_template!r}, which has no place for the prompt; put "
            f"{{prompt}} where it is to stand.",
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
    for name in trainer.accept_changes:
        if name not in known_keys():
            near = nearest(name, known_keys())
            yield Mistake(
                ("trainer.accept_changes",),
                f"trainer.accept_changes holds {name}, which is not a key of the config"
                f"{f'; the nearest is {near}' if near else ''}.",
            )
    if trainer.resume == "never" and (trainer.accept_changes or trainer.accept_missing):
        name = "accept_changes" if trainer.accept_changes else "accept_missing"
        yield Mistake(
            (f"trainer.{name}", "trainer.resume"),
            f"trainer.{name} is given, but nothing is resumed while trainer.resume is never; remove it, or set auto.",
        )


def batches(config: Config) -> Iterator[Mistake]:
    if config.trainer.replay and config.trainer.synthetic_batch:
        yield Mistake(
            WITHOUT_SERVERS,
            f"trainer.synthetic_batch is true, but trainer.replay names the batches of {config.trainer.replay}; leave "
            f"one of them out.",
        )


def run_folder_name(config: Config) -> Iterator[Mistake]:
    """Yield a mistake where the experiment's name is no name of a folder below runs/: the run folder is there, so the
    name must not lead out of it."""
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
    yield from _scorers(config)
    name = config.reward.function
    if name == BY_DATA_SOURCE and config.reward.kwargs:
        yield Mistake(
            ("reward.function", "reward.kwargs"),
            f"reward.kwargs has {', '.join(config.reward.kwargs)}, but reward.function is by_data_source, whose "
            f"functions take none; name one reward.function, or leave reward.kwargs out.",
        )
    names = sorted([*BUILT_IN_REWARDS, BY_DATA_SOURCE])
    if name in names or IMPORT_PATH.fullmatch(name):
        return
    near = nearest(name, names)
    yield Mistake(
        ("reward.function",),
        f"reward.function is {name!r}, which is neither {', '.join(names)} nor of the form "
        f"package.module:function{f'; the nearest is {near}' if near else ''}.",
    )


def _scorers(config: Config) -> Iterator[Mistake]:
    model = config.reward.model
    judge = config.reward.judge
    for name, is_there, weight in (("model", model.path, model.weight), ("judge", judge.url, judge.weight)):
        if is_there and not weight:
            yield Mistake(
                (f"reward.{name}.weight",),
                f"reward.{name}.weight is 0, so that the scores of the {name} would be paid for and count for nothing; "
                f"give a weight, or leave the {name} out.",
            )
    if not (model.path or judge.url):
        if config.reward.function == "none":
            yield Mistake(
                ("reward.function", "reward.model.path", "reward.judge.url"),
                "reward.function is none, which leaves the reward to a model or a judge, but reward.model.path and "
                "reward.judge.url are null; give one, or name another reward.function.",
            )
        return
    if config.actor_rollout_ref.rollout.multi_turn.enable:
        key = "reward.model.path" if model.path else "reward.judge.url"
        yield Mistake(
            (key, "actor_rollout_ref.rollout.multi_turn.enable"),
            f"{key} is given, but with actor_rollout_ref.rollout.multi_turn.enable the environment gives the reward; "
            f"leave one of the two out.",
        )
    if model.url and not is_server_url(model.url):
        yield Mistake(
            ("reward.model.url",), f"reward.model.url is {model.url!r}, but must be of the form http://host:port."
        )
    if judge.url:
        yield from _judge(judge)


_PLACEHOLDER = re.compile(r"(?<![\w}])\{([A-Za-z_]\w*)\}")  # not \boxed{answer} or \frac{a}{b}


def _judge(judge: JudgeConfig) -> Iterator[Mistake]:
    if not _is_base_url(judge.url or ""):
        yield Mistake(
            ("reward.judge.url",),
            f"reward.judge.url is {judge.url!r}, but must be of the form http://host:port/v1, without a password or "
            f"anything behind a question mark; a key comes by reward.judge.api_key_env or api_key_file.",
        )
    for word in _PLACEHOLDER.findall(judge.prompt):
        if word not in JUDGE_VALUES:
            near = nearest(word, JUDGE_VALUES)
            known = f"{{{near}}}" if near else " or ".join(f"{{{name}}}" for name in JUDGE_VALUES)
            yield Mistake(
                ("reward.judge.prompt",),
                f"reward.judge.prompt has {{{word}}}, which would be sent as it is; write {known}, or other words.",
            )
    if "{response}" not in judge.prompt:
        yield Mistake(
            ("reward.judge.prompt",),
            f"reward.judge.prompt is {judge.prompt[:80]!r}, which has no place for the response; put {{response}} in.",
        )
    try:
        num_groups = re.compile(judge.pattern).groups
    except re.error as error:
        num_groups = 0
        why = f"is no regular expression ({error})"
    else:
        why = "has no group for the score"
    if not num_groups:
        yield Mistake(("reward.judge.pattern",), f"reward.judge.pattern {why}; write one such as Score: (\\d+).")
    if judge.api_key_env and not is_variable_name(judge.api_key_env):  # it may be the key itself: not shown
        yield Mistake(
            ("reward.judge.api_key_env",),
            "reward.judge.api_key_env is no name of an environment variable; give its name alone, the key stays in the "
            "environment.",
        )
    if judge.api_key_env and judge.api_key_file:
        yield Mistake(
            ("reward.judge.api_key_env", "reward.judge.api_key_file"),
            "reward.judge.api_key_env and reward.judge.api_key_file are both given; leave one of them out.",
        )


def _is_base_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _ = parts.port  # raises for what is no number
    except ValueError:
        return False
    is_plain = not (parts.query or parts.fragment) and "@" not in parts.netloc
    return parts.scheme in ("http", "https") and bool(parts.hostname) and is_plain


# of every run, whatever it learns from
SHARED_CHECKS = (
    *MEGATRON_CHECKS,
    *LORA_CHECKS,
    optimizer,
    prompt_template,
    evaluation,
    logger,
    checkpoints,
    run_folder_name,
)
CHECKS = (
    batch_sizes,
    lengths,
    *SHARED_CHECKS,
    *ALGORITHM_CHECKS,
    *CORRECTION_CHECKS,
    *ROLLOUT_CHECKS,
    chosen_prompts,
    batches,
    reward,
)
