"""Checks across keys: one small check per rule. No file is read."""

import importlib.util
import re
from collections.abc import Iterator

from megatron_dapo.checks.agent_checks import agent, training_with_agent
from megatron_dapo.checks.algorithm_checks import ALGORITHM_CHECKS
from megatron_dapo.checks.colocated_checks import COLOCATED_CHECKS
from megatron_dapo.checks.correction_checks import CORRECTION_CHECKS
from megatron_dapo.checks.fp8_server_checks import FP8_SERVER_CHECKS
from megatron_dapo.checks.length_checks import fits_longest_sample, longest_in_words
from megatron_dapo.checks.lora_checks import LORA_CHECKS
from megatron_dapo.checks.megatron_checks import MEGATRON_CHECKS
from megatron_dapo.checks.rollout_checks import ROLLOUT_CHECKS, is_variable_name, variable_names
from megatron_dapo.config.built_ins import BUILT_IN_REWARDS, BY_DATA_SOURCE, IMPORT_PATH
from megatron_dapo.config.derived import (
    is_base_url,
    is_server_url,
    longest_sample,
    may_give_own_reward,
    world_size,
)
from megatron_dapo.config.key_names import ACTOR, AGENT, MULTI_TURN, ROLLOUT
from megatron_dapo.config.keys import known_keys
from megatron_dapo.config.loader import nearest
from megatron_dapo.config.schema.config import Config
from megatron_dapo.config.schema.run import JUDGE_VALUES


def mini_batches(config: Config) -> Iterator[str]:
    groups = config.data.train_batch_size
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if groups % mini:
        yield (
            f"data.train_batch_size is {groups}, not a multiple of {ACTOR}.ppo_mini_batch_size {mini}; "
            f"set train_batch_size to a multiple of {mini}, or ppo_mini_batch_size to a divisor of {groups}."
        )


def _shares_of_ranks(config: Config) -> Iterator[str]:
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    n = config.actor_rollout_ref.rollout.n
    megatron = config.actor_rollout_ref.actor.megatron
    tp = megatron.tensor_model_parallel_size
    pp = megatron.pipeline_model_parallel_size
    cp = megatron.context_parallel_size
    dp, rest = divmod(world_size(config), tp * pp * cp)
    if not rest and mini * n % dp:
        yield (
            f"A mini-batch of {mini * n} samples ({ACTOR}.ppo_mini_batch_size {mini} x {ROLLOUT}.n {n}) cannot be "
            f"shared evenly by {dp} data-parallel ranks (world size {world_size(config)} / TP {tp} / "
            f"PP {pp}{f' / CP {cp}' if cp > 1 else ''}); change ppo_mini_batch_size, n or the number of ranks."
        )


def _micro_batches(config: Config) -> Iterator[str]:
    cap = config.actor_rollout_ref.actor.max_tokens_per_microbatch
    yield from fits_longest_sample(config, f"{ACTOR}.max_tokens_per_microbatch", cap)


def _server_tokens(config: Config) -> Iterator[str]:
    cap = config.actor_rollout_ref.rollout.server.max_total_tokens
    longest = longest_sample(config)
    if cap is not None and cap < longest:
        key = f"{ROLLOUT}.server.max_total_tokens"
        yield f"{key} is {cap}, too small for one sample of {longest} tokens ({longest_in_words(config)}); raise it."


def truncation(config: Config) -> Iterator[str]:
    if config.data.filter_overlong_prompts and config.data.truncation == "left":
        yield (
            "data.truncation is left, but data.filter_overlong_prompts is true, so that no prompt is left to cut; "
            "set filter_overlong_prompts to false, or truncation to error."
        )


def _learning_rate(config: Config) -> Iterator[str]:
    optim = config.actor_rollout_ref.actor.optim
    if optim.min_lr > optim.lr:
        yield f"{ACTOR}.optim.min_lr is {optim.min_lr:g}, above {ACTOR}.optim.lr {optim.lr:g}; lower it."


def _warm_up(config: Config) -> Iterator[str]:
    optim = config.actor_rollout_ref.actor.optim
    steps = config.trainer.total_training_steps
    if optim.lr_warmup_steps >= steps:
        yield (
            f"{ACTOR}.optim.lr_warmup_steps is {optim.lr_warmup_steps}, but must be below trainer.total_training_steps "
            f"{steps}, or the learning rate never reaches its peak."
        )


def _evaluation_interval(config: Config) -> Iterator[str]:
    freq = config.trainer.test_freq
    if freq != -1 and freq < 1:
        yield f"trainer.test_freq is {freq}, but must be 1 or more, or -1 for only before and after the run."
    if freq > 0 and not config.data.val_files:
        yield f"trainer.test_freq is {freq}, but data.val_files is empty; give val_files, or set test_freq to -1."


def _held_out_files(config: Config) -> Iterator[str]:
    for path in sorted(set(config.data.val_files) & set(config.data.train_files)):
        yield f"data.val_files holds {path}, which is also in data.train_files: not held out; remove it from one."


def mixture(config: Config) -> Iterator[str]:
    data = config.data
    if data.mixture and len(data.mixture) != len(data.train_files):
        yield (
            f"data.mixture has {len(data.mixture)} weights, but data.train_files has {len(data.train_files)} files; "
            f"give one weight per file."
        )


def pass_rate(config: Config) -> Iterator[str]:
    band = config.data.pass_rate
    if band is not None and (len(band) != 2 or band[0] > band[1]):
        yield f"data.pass_rate is {band}, but must be [lowest, highest], such as [0.05, 0.95]."


def _mixture_with_replay(config: Config) -> Iterator[str]:
    if config.data.mixture and config.exp_manager.experience_replay.enable:
        yield (
            "data.mixture gives shares of the draws, but exp_manager.experience_replay.enable draws prompts of earlier "
            "steps beside them; leave one of the two out."
        )


def prompt_template(config: Config) -> Iterator[str]:
    if "{prompt}" not in config.data.prompt_template:
        yield (
            f"data.prompt_template is {config.data.prompt_template!r}, which has no place for the prompt; put "
            f"{{prompt}} where it is to stand."
        )


def logger(config: Config) -> Iterator[str]:
    for name in ("wandb", "mlflow"):
        if name in config.trainer.logger and importlib.util.find_spec(name) is None:
            yield f"trainer.logger has {name}, which is not installed; pip install -e '.[{name}]', or leave it out."


def save_interval(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if trainer.save_interval != -1 and trainer.save_interval < 1:
        yield (
            f"trainer.save_interval is {trainer.save_interval}, but must be 1 or more, or -1 for only when the run is "
            f"asked to stop."
        )


def _accepted_changes(config: Config) -> Iterator[str]:
    for name in config.trainer.accept_changes:
        if name not in known_keys():
            near = nearest(name, known_keys())
            yield (
                f"trainer.accept_changes holds {name}, which is not a key of the config"
                f"{f'; the nearest is {near}' if near else ''}."
            )


def resume(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if trainer.resume == "never" and (trainer.accept_changes or trainer.accept_missing):
        name = "accept_changes" if trainer.accept_changes else "accept_missing"
        yield f"trainer.{name} is given, but nothing is resumed while trainer.resume is never; remove it, or set auto."


def _batches(config: Config) -> Iterator[str]:
    if config.trainer.replay and config.trainer.synthetic_batch:
        yield (
            f"trainer.synthetic_batch is true, but trainer.replay names the batches of {config.trainer.replay}; leave "
            f"one of them out."
        )


def _run_folder_name(config: Config) -> Iterator[str]:
    """Yield a mistake for an experiment name unfit for a folder below runs/: the run folder must
    not lie outside."""
    name = config.trainer.experiment_name
    parts = name.split("/")
    if {"", ".", ".."}.isdisjoint(parts) and name.isprintable() and max(len(part.encode()) for part in parts) <= 200:
        return
    yield (
        f"trainer.experiment_name is {name[:200]!r}, but must be the name of a folder below runs/: printable, without "
        f"empty parts or .., not absolute and of at most 200 bytes a part; trainer.run_dir takes any path."
    )


def _own_order(config: Config) -> Iterator[str]:
    if ":" in config.data.curriculum and config.data.mixture:
        yield (
            f"data.curriculum is {config.data.curriculum}, which orders the prompts of all files, but data.mixture "
            f"gives the files shares; leave one out."
        )


def _reward_environment(config: Config) -> Iterator[str]:
    yield from variable_names("reward.pass_env", config.reward.pass_env)


def _reward_arguments(config: Config) -> Iterator[str]:
    name = config.reward.function
    if name == BY_DATA_SOURCE and config.reward.kwargs:
        yield (
            f"reward.kwargs has {', '.join(config.reward.kwargs)}, but reward.function is by_data_source, whose "
            f"functions take none; name one reward.function, or leave reward.kwargs out."
        )


def _reward_function(config: Config) -> Iterator[str]:
    name = config.reward.function
    names = sorted([*BUILT_IN_REWARDS, BY_DATA_SOURCE])
    if name in names or IMPORT_PATH.fullmatch(name):
        return
    near = nearest(name, names)
    yield (
        f"reward.function is {name!r}, which is neither {', '.join(names)} nor of the form "
        f"package.module:function{f'; the nearest is {near}' if near else ''}."
    )


def _model_weight(config: Config) -> Iterator[str]:
    if config.reward.model.path and not config.reward.model.weight:
        yield _pointless_scores("model")


def _judge_weight(config: Config) -> Iterator[str]:
    if config.reward.judge.url and not config.reward.judge.weight:
        yield _pointless_scores("judge")


def _pointless_scores(scorer: str) -> str:
    return (
        f"reward.{scorer}.weight is 0, so that the scores of the {scorer} would be paid for and count for nothing; "
        f"give a weight, or leave the {scorer} out."
    )


def _scorers(config: Config) -> Iterator[str]:
    reward = config.reward
    if reward.function == "none" and not (reward.model.path or reward.judge.url):
        yield (
            "reward.function is none, which leaves the reward to a model or a judge, but reward.model.path and "
            "reward.judge.url are null; give one, or name another reward.function."
        )


def _scorers_of_turns(config: Config) -> Iterator[str]:
    scorers = {"reward.model.path": config.reward.model.path, "reward.judge.url": config.reward.judge.url}
    key = next((key for key, value in scorers.items() if value), None)
    if key is not None and may_give_own_reward(config):
        section, giver = (MULTI_TURN, "environment")
        if config.actor_rollout_ref.rollout.agent.enable:
            section, giver = (AGENT, "agent")
        yield f"{key} is given, but with {section}.enable the {giver} gives the reward; leave one of the two out."


def _model_url(config: Config) -> Iterator[str]:
    url = config.reward.model.url
    if url and config.reward.model.path and not is_server_url(url):
        yield f"reward.model.url is {url!r}, but must be of the form http://host:port."


_PLACEHOLDER = re.compile(r"(?<![\w}])\{([A-Za-z_]\w*)\}")  # not \boxed{answer} or \frac{a}{b}


def _judge_url(config: Config) -> Iterator[str]:
    url = config.reward.judge.url
    if url and not is_base_url(url):
        yield (
            f"reward.judge.url is {url!r}, but must be of the form http://host:port/v1, without a password or "
            f"anything behind a question mark; a key comes by reward.judge.api_key_env or api_key_file."
        )


def _judge_prompt(config: Config) -> Iterator[str]:
    judge = config.reward.judge
    if not judge.url:
        return
    for word in _PLACEHOLDER.findall(judge.prompt):
        if word not in JUDGE_VALUES:
            near = nearest(word, JUDGE_VALUES)
            known = f"{{{near}}}" if near else " or ".join(f"{{{name}}}" for name in JUDGE_VALUES)
            yield f"reward.judge.prompt has {{{word}}}, which would be sent as it is; write {known}, or other words."
    if "{response}" not in judge.prompt:
        yield f"reward.judge.prompt is {judge.prompt[:80]!r}, which has no place for the response; put {{response}} in."


def _judge_pattern(config: Config) -> Iterator[str]:
    judge = config.reward.judge
    if not judge.url:
        return
    try:
        num_groups = re.compile(judge.pattern).groups
    except re.error as error:
        num_groups = 0
        why = f"is no regular expression ({error})"
    else:
        why = "has no group for the score"
    if not num_groups:
        yield f"reward.judge.pattern {why}; write one such as Score: (\\d+)."


def _judge_key(config: Config) -> Iterator[str]:
    judge = config.reward.judge
    if not judge.url:
        return
    # the sentence leaves the value out: it may be the key itself
    if judge.api_key_env and not is_variable_name(judge.api_key_env):
        yield (
            "reward.judge.api_key_env is no name of an environment variable; give its name alone, the key stays in the "
            "environment."
        )
    if judge.api_key_env and judge.api_key_file:
        yield "reward.judge.api_key_env and reward.judge.api_key_file are both given; leave one of them out."


# of every run, of reinforcement learning or fine-tuning
SHARED_CHECKS = (
    *MEGATRON_CHECKS,
    *LORA_CHECKS,
    _learning_rate,
    _warm_up,
    prompt_template,
    _evaluation_interval,
    _held_out_files,
    logger,
    save_interval,
    _accepted_changes,
    resume,
    _run_folder_name,
)
REWARD_CHECKS = (
    _reward_environment,
    _reward_arguments,
    _reward_function,
    _model_weight,
    _judge_weight,
    _scorers,
    _scorers_of_turns,
    _model_url,
    _judge_url,
    _judge_prompt,
    _judge_pattern,
    _judge_key,
)
CHECKS = (
    mini_batches,
    _shares_of_ranks,
    _micro_batches,
    _server_tokens,
    truncation,
    *SHARED_CHECKS,
    *ALGORITHM_CHECKS,
    *CORRECTION_CHECKS,
    *ROLLOUT_CHECKS,
    agent,
    training_with_agent,
    *COLOCATED_CHECKS,
    *FP8_SERVER_CHECKS,
    mixture,
    pass_rate,
    _mixture_with_replay,
    _own_order,
    _batches,
    *REWARD_CHECKS,
)
