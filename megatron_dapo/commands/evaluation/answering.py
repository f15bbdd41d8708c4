"""Has servers answer an evaluation's prompts, running ones or its own, until every answer is
there."""

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_dapo.commands.evaluation.answer_file import AnswerFile
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.rollout_errors import NeedsSync, RolloutError
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.samples import Group, Prompt, Sample
from megatron_dapo.data.tokenizer import Tokenizer
from megatron_dapo.rollout.answer_records import answer_record
from megatron_dapo.rollout.build_rollout import (
    make_environments,
    make_reward_pool,
    make_sampler,
    make_scorers,
    make_server_pool,
)
from megatron_dapo.rollout.evaluation import sample_answers
from megatron_dapo.rollout.verdicts import TooFewVerdicts
from megatron_dapo.servers.run_servers import RunServers
from megatron_dapo.servers.server_pool import ServerPool
from megatron_dapo.servers.server_versions import require_deterministic
from megatron_dapo.servers.supervisor import POLL_INTERVAL_S

log = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 10.0  # a healthy server reports its version at once
_END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@dataclass
class Work:
    """The work since this process began: answers' tokens, and the seconds from the first request
    on."""

    num_tokens: int = 0
    seconds: float = 0.0


async def answer(
    config: Config,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    answers: AnswerFile,
    step: int | None,
    on_start: Callable[[int], None],
    on_answer: Callable[[], None],
) -> Work:
    """Add the missing answers to the file.

    Args:
        config: names running servers.
        prompts, tokenizer: of the evaluation.
        answers: the existing ones.
        step: rollout steps of the weights; None: the servers' weight version, if it is one.
        on_start: called with the servers' weight version before the first request; may raise.
        on_answer: called after each answer.

    Raises:
        TooFewVerdicts: answers without a verdict are not kept.
        RolloutError, ServerError: if servers fail.
        WorkerLost: if rewards or environments fail.
        OSError: if an answer cannot be kept.
    """
    environments = make_environments(config)
    rewards = make_reward_pool(config, prompts)
    servers = make_server_pool(config)
    scorers = make_scorers(config)
    work = Work()
    try:
        await rewards.start()
        await scorers.start(config.actor_rollout_ref.rollout.server.startup_timeout_s)
        if environments is not None:
            await environments.start()
        await servers.start(config.actor_rollout_ref.rollout.server.startup_timeout_s)
        if config.actor_rollout_ref.rollout.deterministic:
            await require_deterministic([server.client for server in servers.servers])
        version = await _common_version(servers)
        on_start(version)
        await servers.expect(version)
        learned = step if step is not None else max(version, 0)

        def keep(group: Group, sample: Sample) -> None:
            answers.add(answer_record(learned, group, sample, tokenizer))
            work.num_tokens += sample.num_written_tokens
            on_answer()

        sampler = make_sampler(
            config, servers, rewards, tokenizer, environments, scorers, exact=True, is_validation=True
        )
        began = time.monotonic()
        await sample_answers(sampler, prompts, config, rewards, learned, keep, answers.records)
        work.seconds = time.monotonic() - began
        return work
    except NeedsSync as error:
        raise RolloutError(f"the servers do not hold the weights any more that began to answer: {error}") from error
    except TooFewVerdicts:
        answers.drop_failed()
        raise
    finally:
        await rewards.close()
        await scorers.close()
        if environments is not None:
            await environments.close()
        await servers.close()
        answers.close()


async def _common_version(servers: ServerPool) -> int:
    """Return the weight version that all servers hold. Raises UserError if they differ, ServerError
    if one does not answer."""
    versions = {server.url: await server.client.weight_version(_PROBE_TIMEOUT_S) for server in servers.servers}
    if len(set(versions.values())) > 1:
        held = ", ".join(f"{url}: {version}" for url, version in versions.items())
        raise UserError(f"the servers hold different weight versions ({held}); give servers of one model.")
    return next(iter(versions.values()))


async def beside_servers(config: Config, logs: Path, work: Callable[[list[str]], Coroutine[Any, Any, Work]]) -> Work:
    """Start servers if the config names none; return the result of `work`.

    It gets config overrides with the servers' names. The servers end with the work in any case.
    Raises ServerFailure if they cannot be kept alive.
    """
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, "servers") as owner:  # one thread owns a supervisor
        in_thread = partial(loop.run_in_executor, owner)
        servers = await in_thread(RunServers.of, config, logs)
        try:
            await in_thread(servers.start)
            tasks = [
                asyncio.create_task(work(servers.overrides())),
                asyncio.create_task(_keep_alive(servers, in_thread)),
            ]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                failed = tasks[1].done() and not tasks[0].done()
                return (tasks[1] if failed else tasks[0]).result()  # the former raises
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await in_thread(servers.stop)


async def _keep_alive(servers: RunServers, in_thread: Callable) -> Work:
    while True:
        await in_thread(servers.check)
        await asyncio.sleep(POLL_INTERVAL_S)


async def until_signal(work: Coroutine[Any, Any, Work]) -> Work:
    """Return the work's result; SIGTERM and SIGHUP cancel it, like Ctrl-C."""
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(work)
    for number in _END_SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    return await task
