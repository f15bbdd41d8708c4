"""Builds a rollout from the config: its prompts, servers, rewards, environments or agents, samplers."""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_dapo.agents.agent_pool import AgentPool
from megatron_dapo.agents.gateways import Gateways, GatewaySettings
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.own_function import OwnFunction
from megatron_dapo.config.derived import may_give_own_reward, uses_overlong_shaping
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.prompt_dataset import PromptDataset
from megatron_dapo.data.routed_experts import RouterShape
from megatron_dapo.data.samples import Prompt
from megatron_dapo.data.tokenizer import Tokenizer, load_tokenizer
from megatron_dapo.envs.environment_pool import EnvironmentPool
from megatron_dapo.huggingface.model_families import FAMILIES
from megatron_dapo.huggingface.reward_model import architecture_of
from megatron_dapo.huggingface.spec_reader import read_model_spec, read_vocab_size
from megatron_dapo.rewards.judge import Judge
from megatron_dapo.rewards.reward_pool import RewardPool
from megatron_dapo.rewards.reward_registry import check_ground_truths, check_reward
from megatron_dapo.rewards.scorers import Scorers, WeightedScorer
from megatron_dapo.rewards.shaping import Shaping, shape, unshaped
from megatron_dapo.rollout.agent_play import AgentPlay, Agents
from megatron_dapo.rollout.reward_model_client import RewardModel
from megatron_dapo.rollout.sampling import Sampler
from megatron_dapo.rollout.trajectory import MultiTurn, Play, single_turn
from megatron_dapo.servers.client import SamplingParams, SGLangClient
from megatron_dapo.servers.fleet import LOOK_S
from megatron_dapo.servers.followed_lease import lease_of
from megatron_dapo.servers.server_list import ServerList
from megatron_dapo.servers.server_pool import ServerPool
from megatron_dapo.servers.server_watch import report_unresponsive
from megatron_dapo.storage.model_folder import ModelFolder
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.storage.server_key import given_server_key, read_server_key

log = logging.getLogger(__name__)

PROBE_INTERVAL_S = 1.0  # between two looks at a server


def load_train_prompts(config: Config, tokenizer: Tokenizer, max_rows: int | None = None) -> PromptDataset:
    """Return the prompts to train on, chosen by `data.pass_rate` too; log the dropped ones' counts.

    max_rows: read only the first rows of each file. Raises UserError.
    """
    data = config.data
    difficulty_key = data.difficulty_key if data.curriculum == "column" else None
    numbers = {"pass_rate": data.pass_rate, "pass_rate_key": data.pass_rate_key, "difficulty_key": difficulty_key}
    dataset = load_dataset(data.train_files, config, tokenizer, max_rows=max_rows, **numbers)
    for report in dataset.report:
        log.info("%s", report)
    return dataset


def load_prompts(files: Sequence[str], config: Config, tokenizer: Tokenizer) -> list[Prompt]:
    """Return the prompts of these files; log the dropped ones' counts. Raises UserError."""
    dataset = load_dataset(files, config, tokenizer)
    for report in dataset.report:
        log.info("%s", report)
    return dataset.prompts


def load_dataset(files: Sequence[str], config: Config, tokenizer: Tokenizer, **others: Any) -> PromptDataset:
    """Return the prompts of these files, with counts of the dropped ones. Raises UserError.

    others: further arguments of `PromptDataset.load`.
    """
    data = config.data
    own_reward = may_give_own_reward(config)
    return PromptDataset.load(
        files,
        data.prompt_key,
        tokenizer,
        data.max_prompt_length,
        filter_overlong=data.filter_overlong_prompts,
        truncation=data.truncation,
        dedup=data.dedup,
        conflicting_answers="keep" if own_reward else data.conflicting_answers,
        apply_chat_template=data.apply_chat_template,
        answer_key=data.answer_key,
        prompt_template=data.prompt_template,
        data_source=data.data_source,
        needs_answer=not own_reward and config.reward.function != "none",
        **others,
    )


def make_server_pool(config: Config) -> ServerPool:
    """Return the pool of the config's servers."""
    rollout = config.actor_rollout_ref.rollout
    is_pushed_to_at_work = rollout.max_staleness or config.data.val_files
    return ServerPool(
        ServerList.of_config(rollout),
        max_concurrency=rollout.max_concurrency,
        down_timeout_s=rollout.server.startup_timeout_s,
        probe_interval_s=PROBE_INTERVAL_S,
        connect=partial(SGLangClient, api_key=given_server_key(config)),
        report_unresponsive=partial(report_unresponsive, RunFolder.of(config.trainer)),
        keeps_caches=config.weight_sync.pause_mode == "in_place",
        lease=lease_of(config),
        push_s=config.weight_sync.timeout_s if is_pushed_to_at_work else 0.0,
        look_s=LOOK_S,
        # a server that reads tokens instead of writing them adds up in another order: answers stay
        # where they began, and turns where their prefix is
        may_move=not rollout.deterministic,
    )


def make_reward_pool(config: Config, prompts: Sequence[Prompt]) -> RewardPool:
    """Return the pool of reward processes.

    Raises UserError if the function cannot score these prompts.
    """
    reward = config.reward
    sources = sorted({prompt.data_source for prompt in prompts})
    check_reward(reward.function, reward.kwargs, sources)
    check_ground_truths(reward.function, prompts)
    return RewardPool(
        reward.function,
        reward.kwargs,
        reward.num_workers,
        reward.timeout_s,
        reward.memory_limit_mb,
        reward.pass_env,
        sources,
        reward.allow_unsandboxed,
        reward.max_concurrency,
        reward.batch_size,
        config.trainer.seed,
    )


def make_sampler(
    config: Config,
    servers: ServerPool,
    rewards: RewardPool,
    tokenizer: Tokenizer,
    environments: EnvironmentPool | Agents | None,
    scorers: Scorers,
    shaping: Shaping = unshaped,
    greedy_baseline: bool = False,
    exact: bool = False,
    routers: RouterShape | None = None,
    is_validation: bool = False,
) -> Sampler:
    """Return the sampler of groups.

    See `Sampler` for the arguments after the config. is_validation: told to agents; without the
    shaping of the user's own.
    """
    rollout = config.actor_rollout_ref.rollout
    play: Play = single_turn
    if isinstance(environments, EnvironmentPool):
        play = MultiTurn(environments, tokenizer, config.data, rollout.multi_turn).play
    elif environments is not None:
        play = AgentPlay(environments, servers, tokenizer, config.data, is_validation).play
    shaped_by = None if is_validation else config.reward.shaping
    return Sampler(
        servers,
        rewards,
        tokenizer,
        rollout,
        read_vocab_size(config.actor_rollout_ref.model.path),
        shaping,
        play,
        greedy_baseline,
        exact,
        scorers,
        routers,
        config.trainer.seed,
        OwnFunction.load("reward.shaping", shaped_by) if shaped_by else None,
    )


def router_shape(config: Config) -> RouterShape:
    """Return the shape of the model's router choices. Raises UserError."""
    return RouterShape.of(read_model_spec(config.actor_rollout_ref.model.path))


def make_scorers(config: Config) -> Scorers:
    """Return the scorers of responses beside the reward function. Raises UserError."""
    reward = config.reward
    weighed = []
    if model := make_reward_model(config):
        weighed.append(WeightedScorer(model, reward.model.weight))
    if reward.judge.url:
        weighed.append(WeightedScorer(Judge(reward.judge), reward.judge.weight))
    return Scorers(reward, weighed)


def make_reward_model(config: Config) -> RewardModel | None:
    """Return the scorer of `reward.model`; None without one.

    Raises UserError if its server has no URL, or its folder holds no classifier.
    """
    model = config.reward.model
    if not model.path:
        return None
    if not model.url:
        raise UserError(
            "reward.model.path is given without reward.model.url; give the URL of a running server of it, or use "
            "`python -m launch.local`, which starts one."
        )
    folder = ModelFolder.of(model.path).hf
    architecture_of(str(folder))
    api_key = read_server_key(model.api_key_file, "reward.model.api_key_file") if model.api_key_file else None
    down_timeout_s = config.actor_rollout_ref.rollout.server.startup_timeout_s
    return RewardModel(load_tokenizer(folder), SGLangClient(model.url, api_key), down_timeout_s)


def make_environments(config: Config) -> EnvironmentPool | Agents | None:
    """Return the pool of environments, or the agents; None if responses have one turn."""
    if config.actor_rollout_ref.rollout.agent.enable:
        return make_agents(config)
    keys = config.actor_rollout_ref.rollout.multi_turn
    if not keys.enable:
        return None
    return EnvironmentPool(
        keys.environment,
        keys.environment_kwargs,
        keys.num_workers,
        keys.step_timeout_s,
        keys.memory_limit_mb,
        keys.pass_env,
    )


def make_agents(config: Config) -> Agents:
    """Return the agents with their gateways. Raises UserError."""
    keys = config.actor_rollout_ref.rollout.agent
    path = config.actor_rollout_ref.model.path
    parsers = keys.model_dump(include={"tool_parser", "reasoning_parser"})
    if None in parsers.values():
        family = FAMILIES[read_model_spec(path).family]
        parsers = {name: parser or getattr(family, name) for name, parser in parsers.items()}
    of_keys = {"host", "port", "public_url", "max_request_mb", "history", "template_kwargs"}
    settings = GatewaySettings(
        model=str(ModelFolder.of(path).hf),
        model_name=Path(path).name,
        apply_chat_template=config.data.apply_chat_template,
        **keys.model_dump(include=of_keys),
        **parsers,
    )
    pool = AgentPool(keys, RunFolder.of(config.trainer).logs)
    return Agents(keys, Gateways(settings, keys.num_gateways), pool)


def make_shaping(config: Config) -> Shaping:
    """Return the punishment of over-long responses."""
    if not uses_overlong_shaping(config):
        return unshaped
    keys = config.algorithm.overlong_reward_shaping
    return partial(shape, keys=keys, max_response_length=config.data.max_response_length)


def sampling_params(config: Config) -> SamplingParams:
    """Return the parameters of training's requests."""
    rollout = config.actor_rollout_ref.rollout
    return SamplingParams(
        max_new_tokens=config.data.max_response_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_token_ids=tuple(rollout.stop_token_ids),
    )
