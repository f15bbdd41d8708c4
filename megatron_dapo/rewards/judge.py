"""Scores by a judge: a language model behind an OpenAI-compatible endpoint, prompted in words and
read with a pattern."""

import asyncio
import hashlib
import logging
import math
import os
import re
from typing import Any

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.schema.run import JUDGE_VALUES, JudgeConfig
from megatron_dapo.data.samples import Prompt
from megatron_dapo.data.tokenizer import Messages
from megatron_dapo.rewards.worker_environment import is_secret, worker_environment
from megatron_dapo.rewards.worker_pool import WorkerLost, WorkerPool
from megatron_dapo.storage.server_key import read_server_key

_SHOWN_CHARS = 200
_SHOWN_ERROR_CHARS = 500
_MAX_SEARCHED_CHARS = 1 << 16  # from the end of an answer: the last match counts
_SEARCH_S = 2.0  # then the process is killed: some patterns take longer than the run has
_SEARCH_PROCESSES = 2
_SEARCH_MEMORY_MB = 1024
_MAX_LOGGED_ERRORS = 20
_MAX_REMEMBERED = 1 << 16  # replies
_LONGEST_PAUSE_S = 60.0  # before a retry: the openai package obeys no Retry-After above it
_WORDS = {"yes": 1.0, "true": 1.0, "correct": 1.0, "no": 0.0, "false": 0.0, "incorrect": 0.0}

logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line per question
log = logging.getLogger(__name__)


class Judge:
    """A model that scores responses, many at once; equal questions are sent once."""

    def __init__(self, config: JudgeConfig) -> None:
        """Prepare the requests. Raises UserError without the configured key."""
        import openai  # half a second, only for runs with a judge

        from megatron_dapo.rewards.bounded_http import bounded_client

        self._config = config
        self._key = _api_key(config)
        self._client = openai.AsyncOpenAI(
            base_url=config.url,
            api_key=self._key or "none",  # else it looks for one in the environment
            timeout=config.timeout_s,
            max_retries=config.max_retries,
            http_client=bounded_client(),
        )
        self._failure = openai.OpenAIError
        self._timeout = openai.APITimeoutError
        # the package's own limit is of each pause between two parts of an answer
        self._deadline_s = config.timeout_s + config.max_retries * (config.timeout_s + _LONGEST_PAUSE_S)
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._searches = WorkerPool(
            "megatron_dapo.rewards.pattern_worker",
            {"pattern": config.pattern, "memory_limit_mb": _SEARCH_MEMORY_MB},
            worker_environment(os.environ, (), "reward.pass_env"),
            _SEARCH_PROCESSES,
        )
        self._num_asked = 0
        self._logged: set[str] = set()
        self._replies: dict[bytes, asyncio.Task[dict[str, Any]]] = {}  # by the hash of the question

    async def start(self, timeout_s: float) -> None:
        """Start the processes that search its answers. Sends nothing: a judge that does not answer
        shows at the first responses."""
        await self._searches.start()

    async def close(self) -> None:
        """Cancel running requests and end the processes."""
        for task in self._replies.values():
            task.cancel()
        await asyncio.gather(*self._replies.values(), return_exceptions=True)
        await self._client.close()
        await self._searches.close()

    async def reply(self, prompt: Prompt, response: str) -> dict[str, Any]:
        """Return {"score": ...} or {"error": ...}. Errors are not cached: the next equal question
        is sent again."""
        question = self._question(prompt, response)
        key = hashlib.sha256(question.encode()).digest()
        task = self._replies.get(key)
        if task is None:
            task = self._replies[key] = asyncio.create_task(self._ask(question))
            if len(self._replies) > _MAX_REMEMBERED:
                oldest = next(iter(self._replies))
                if self._replies[oldest].done():
                    del self._replies[oldest]
        reply = await asyncio.shield(task)
        if "error" in reply and self._replies.get(key) is task:
            del self._replies[key]
            self._log_error(reply["error"])
        return reply

    def _log_error(self, error: str) -> None:
        """Log an error, each once, and not many: the counts of the step have them all."""
        if error not in self._logged and len(self._logged) < _MAX_LOGGED_ERRORS:
            self._logged.add(error)
            log.warning("no verdict: %s", error)

    def _question(self, prompt: Prompt, response: str) -> str:
        values = dict(zip(JUDGE_VALUES, (_text(prompt.messages), prompt.ground_truth, response), strict=True))
        # one pass: a response may hold braces
        pattern = "|".join(map(re.escape, (f"{{{name}}}" for name in values)))
        return re.sub(pattern, lambda match: values[match.group()[1:-1]], self._config.prompt)

    async def _ask(self, question: str) -> dict[str, Any]:
        limit = self._config.max_requests
        if limit is not None and self._num_asked >= limit:
            return {"error": f"exception: reward.judge.max_requests = {limit} questions were asked"}
        self._num_asked += 1
        judge = f"the judge at {self._config.url}"
        try:
            async with self._slots, asyncio.timeout(self._deadline_s):
                answer = await self._client.chat.completions.create(
                    model=self._config.model,
                    messages=[{"role": "user", "content": question}],
                    temperature=self._config.temperature,
                    max_tokens=self._config.max_tokens,
                )
            text = str(answer.choices[0].message.content or "")
        except TimeoutError:
            return {"error": f"timeout: {judge}: no whole answer within {self._deadline_s:g} s"}
        except self._failure as error:
            kind = "timeout" if isinstance(error, self._timeout) else "crash"
            return {"error": f"{kind}: {self._shown(f'{judge}: {error}')}"}
        except (AttributeError, IndexError, TypeError, ValueError, RecursionError):
            # the package checks no answer
            return {"error": f"exception: {judge} answered no chat completion; look at reward.judge.url"}
        return await self._read(text[-_MAX_SEARCHED_CHARS:])

    async def _read(self, text: str) -> dict[str, Any]:
        """Return the score that the last match of the pattern names: a number, or yes or no."""
        try:
            async with self._searches.worker() as worker:
                reply = await worker.ask({"text": text}, _SEARCH_S)
        except TimeoutError:
            return {
                "error": f"timeout: reward.judge.pattern was searched for longer than {_SEARCH_S:g} s in one answer of "
                f"the judge; write one without repeats in repeats"
            }
        except WorkerLost as error:
            return {"error": f"crash: {error}"}
        if "error" in reply:
            return {"error": str(reply["error"])}
        word = str(reply["match"] or "").strip().lower()
        try:
            score = _WORDS[word] if word in _WORDS else float(word)
            if not math.isfinite(score):
                raise ValueError
        except ValueError:
            return {"error": f"exception: the judge gave no score in {self._without_key(text)[-_SHOWN_CHARS:]!r}"}
        return {"score": score}

    def _shown(self, text: str) -> str:
        """Return the beginning of a text, on one line."""
        return " ".join(self._without_key(text).split())[:_SHOWN_ERROR_CHARS]

    def _without_key(self, text: str) -> str:
        """Return a text for logs and files: some services repeat the key that they refuse."""
        return text.replace(self._key, "***") if self._key else text


def _text(messages: str | Messages) -> str:
    """Return the question: the last message, the user's."""
    if isinstance(messages, str):
        return messages
    return str(messages[-1]["content"])


def _api_key(config: JudgeConfig) -> str | None:
    if config.api_key_env:
        named = f"reward.judge.api_key_env names {config.api_key_env}"
        if not (key := os.environ.get(config.api_key_env, "").strip()):
            raise UserError(f"{named}, which is not in the run's environment; set it for the process of rank 0.")
        if not is_secret(config.api_key_env, ""):
            raise UserError(
                f"{named}, which does not look like a secret's name, so that reward processes would get the key; give "
                f"the variable a name such as JUDGE_API_KEY."
            )
        if not re.fullmatch(r"[!-~]+", key):  # its value is never shown
            raise UserError(f"{named}, which does not hold a key: one word of printable ASCII; correct it.")
        return key
    return read_server_key(config.api_key_file, "reward.judge.api_key_file") if config.api_key_file else None
