"""The client of one SGLang server: token ids in, token ids and log-probs out.

It also pauses a server, updates its weights, and has it continue.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import aiohttp
import h11
import numpy as np
import orjson

from megatron_dapo.common.garbage import collection_paused
from megatron_dapo.data.routed_experts import RouterShape
from megatron_dapo.data.token_arrays import (
    EXPERT,
    LOG_PROB,
    TOKEN,
    VERSION,
    Dtype,
    TokenIds,
    TokenRecord,
    nothing,
    repeated,
    token_array,
)
from megatron_dapo.servers.request_pipeline import RequestPipeline
from megatron_dapo.servers.server_error import BODY_HEAD, KeyRefused, ServerError
from megatron_dapo.servers.server_health import UNAVAILABLE, HealthCheck
from megatron_dapo.servers.speedometer import Load
from megatron_dapo.storage.server_key import key_header

FOREIGN_VERSION = -1
"""Weight version of a server without a push of ours (SGLang names it "default")."""

CALL_TIMEOUT_S = 600.0  # checksums and weights of a large model take minutes
POLL_INTERVAL_S = 0.25
# A server closes a connection after 5 idle seconds (SGLANG_TIMEOUT_KEEP_ALIVE). Ours ends before,
# even if this process hears of it late: else a request meets a connection just closed, and fails.
IDLE_CONNECTION_S = 2.0
_LOADS = "/v1/loads?include=core"


@dataclass(frozen=True)
class SamplingParams:
    """SGLang's sampling parameters of one request, by its names.

    Every field is sent with each request, so that a server's own defaults never act.
    """

    max_new_tokens: int
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = -1  # -1 = off
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # texts that end a response; they stay in its tokens
    # in [-2^63, 2^63); read only by servers with deterministic inference: they take 42 for all
    # requests without a seed
    sampling_seed: int = 0


@dataclass(frozen=True, eq=False)
class Generation(TokenRecord):
    """A server's answer to one request. The arrays are [L], with the stop token."""

    ARRAYS: ClassVar[Mapping[str, Dtype]] = {
        "tokens": TOKEN,
        "log_probs": LOG_PROB,
        "weight_versions": VERSION,
        "routed_experts": EXPERT,
    }

    tokens: np.ndarray
    # at the sampling temperature, before top-p and top-k cut the distribution
    log_probs: np.ndarray
    finish_reason: Literal["stop", "length", "abort"]
    weight_versions: np.ndarray  # of each token; FOREIGN_VERSION if the server's is no integer
    num_retractions: int = 0  # times that a full cache put the request back
    num_cached_tokens: int = 0  # of the prompt, found in the cache
    servers: tuple[str, ...] = ()  # URLs of the writers, the first part's first
    # answer to an `ExpertQuestion`, of another length; empty without one
    routed_experts: np.ndarray = field(default_factory=partial(nothing, EXPERT))


@dataclass(frozen=True)
class ExpertQuestion:
    """Asks a server for its routers' choices, for all tokens from `start` on but the last.

    A token may be read again, after its cache was lost or recomputed. The answer has the choices of
    the last time, in force when the tokens behind it were written.
    """

    shape: RouterShape  # of a token's choices
    start: int = 0  # first token


class SGLangClient:
    """The HTTP interface of one server.

    Use it inside one event loop, as `async with`, or call `close()`. Every call has a deadline in
    seconds. It raises ServerError if the server refuses or the deadline passes.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = key_header(api_key)
        self._session: aiohttp.ClientSession | None = None
        self._updates: RequestPipeline | None = None

    async def __aenter__(self) -> "SGLangClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections to the server. A later call opens new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None
        if self._updates is not None:
            self._updates.close()
            self._updates = None

    # -------------------------------------------------------------------------------- generation

    async def generate(
        self,
        prompt_tokens: TokenIds,
        sampling: SamplingParams,
        timeout_s: float,
        request_id: str | None = None,
        cache_salt: str | None = None,
        experts: ExpertQuestion | None = None,
    ) -> Generation:
        """Return one response to a prompt of token ids.

        request_id: for `abort`. All ids need one length, since SGLang also ends requests with ids
            that only begin with the given one.
        cache_salt: only requests of the same salt share the cache of a common beginning.
        """
        request = {
            "input_ids": token_array(prompt_tokens, TOKEN, "token id"),
            "sampling_params": asdict(sampling),
            "return_logprob": True,
            **({"rid": request_id} if request_id else {}),
            **({"cache_salt": cache_salt} if cache_salt else {}),
            **({"return_routed_experts": True, "routed_experts_start_len": experts.start} if experts else {}),
        }
        answer = await self.post("/generate", request, timeout_s)
        try:
            generation = replace(generation_of(answer), servers=(self.url,))
            if len(generation.tokens) > sampling.max_new_tokens:
                raise ValueError(f"{len(generation.tokens)} tokens where {sampling.max_new_tokens} were allowed")
            text = answer["meta_info"].pop("routed_experts", None)
            if experts is None or text is None or generation.finish_reason == "abort":
                return generation
            num_rows = len(prompt_tokens) + len(generation.tokens) - 1 - experts.start
            return replace(generation, routed_experts=experts.shape.decode(text, num_rows))
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(self.url, "/generate", 200, f"{error!r} in {json.dumps(answer)}") from error

    async def abort(self, request_id: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """End a request: its answer has the tokens so far, none if the server is paused.

        An id unknown to the server changes nothing.
        """
        await self.post("/abort_request", {"rid": request_id}, timeout_s)

    # -------------------------------------------------------------------------------- state

    async def check_health(self, timeout_s: float = 5.0) -> None:
        """Return if the server takes requests, or would without a pause; else raise ServerError."""
        # or it starts, or is ill: then its scheduler does not answer
        if await self.is_paused(timeout_s):
            await self.server_info(timeout_s)

    async def is_paused(self, timeout_s: float = 5.0) -> bool:
        """Return whether it takes no requests now: paused until `continue_`, or ill.

        SGLang has one status for both.
        """
        try:
            await self._request("GET", HealthCheck.TAKES_REQUESTS, None, timeout_s)
        except ServerError as error:
            if error.status != UNAVAILABLE:
                raise
            return True
        return False

    async def resume(self, timeout_s: float = 5.0) -> None:
        """Have a server that `is_paused` take requests again.

        Raises ServerError if it is not paused but ill. SGLang does not tell these apart, but a
        server is paused no more after it was told to continue.
        """
        try:
            await self.end_weight_update(timeout_s)
        except ServerError as error:  # refused: none is open
            if error.status is None:
                raise
        await self.continue_(timeout_s)
        if await self.is_paused(timeout_s):
            await self.check_generation(timeout_s)

    async def check_generation(self, timeout_s: float) -> None:
        """Have the server generate a token; raise ServerError without one.

        Not for a paused server: without an answer SGLang calls a server ill, and well again only
        after an answer.
        """
        await self._request("GET", HealthCheck.GENERATES, None, timeout_s)

    async def wait_healthy(self, timeout_s: float) -> None:
        """Ask until the server is healthy; at the deadline raise ServerError with its
        last answer."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return await self.check_health()
            except KeyRefused:  # waiting changes nothing
                raise
            except ServerError as error:
                if time.monotonic() >= deadline:
                    why = f"not healthy within {timeout_s:g} s; last: {error.body}"
                    raise ServerError(self.url, error.route, error.status, why) from error
            await asyncio.sleep(POLL_INTERVAL_S)

    async def server_info(self, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        """Return the server's resolved arguments and its state."""
        return await self._request("GET", HealthCheck.SCHEDULER_ANSWERS, None, timeout_s)

    async def load(self, timeout_s: float = CALL_TIMEOUT_S) -> Load:
        """Return the use of its memory by requests now, and its work so far."""
        answer = await self._request("GET", _LOADS, None, timeout_s)
        try:
            return Load.of(answer)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ServerError(self.url, _LOADS, 200, f"{error!r} in {json.dumps(answer)}") from error

    async def weight_version(self, timeout_s: float = CALL_TIMEOUT_S) -> int:
        """Return the version of the server's weights; FOREIGN_VERSION if we did not push them."""
        info = await self._request("GET", "/model_info", None, timeout_s)
        if not isinstance(info, dict) or "weight_version" not in info:
            raise ServerError(self.url, "/model_info", 200, f"no weight_version: {info}")
        return _version(info["weight_version"])

    # ---------------------------------------------------------------------------- weight updates

    async def pause(
        self, mode: Literal["abort", "retract", "in_place"] = "retract", timeout_s: float = CALL_TIMEOUT_S
    ) -> None:
        """Stop generating.

        mode:
          retract: running requests go on after `continue_`, their caches recomputed with the
              weights of that time.
          in_place: caches stay.
          abort: running requests end with their present tokens.
        """
        await self.post("/pause_generation", {"mode": mode}, timeout_s)

    async def continue_(self, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Generate again after `pause`."""
        await self.post("/continue_generation", {}, timeout_s)

    async def init_weights_update_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """Join a process group with the trainer; blocks until all its ranks have come."""
        fields = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        await self.post("/init_weights_update_group", fields, timeout_s)

    async def destroy_weights_update_group(self, group_name: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Leave the process group with the trainer."""
        await self.post("/destroy_weights_update_group", {"group_name": group_name}, timeout_s)

    async def begin_weight_update(self, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Open an update session; refused while one is open."""
        await self.post("/begin_weight_update", {}, timeout_s)

    async def end_weight_update(self, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Close the update session; refused if none is open."""
        await self.post("/end_weight_update", {}, timeout_s)

    async def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str,
        weight_version: int,
        flush_cache: bool,
        load_format: str | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """Receive tensors broadcast in this order by the group's rank 0.

        Returns once they are loaded.

        dtypes: torch's names ("float32"). load_format "flattened_bucket": one uint8 broadcast of
        them all.

        Calls may overlap: the server takes up their requests in the order of the calls, each after
        its answer to the one before. A cancelled or late call fails the calls behind it: their
        requests are not taken up.
        """
        fields = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "flush_cache": flush_cache,
            "weight_version": str(weight_version),
            **({"load_format": load_format} if load_format else {}),
        }
        route = "/update_weights_from_distributed"
        if self._updates is None:
            self._updates = RequestPipeline(self.url, self._headers)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._updates.post(route, orjson.dumps(fields))
        except TimeoutError as error:
            raise ServerError(self.url, route, None, f"nothing within {timeout_s:g} s") from error
        except (h11.RemoteProtocolError, OSError) as error:
            raise ServerError(self.url, route, None, f"{type(error).__name__}: {error}") from error
        self._require_success(route, self._content(route, answer.status, answer.content_type, answer.body))

    async def update_weights_from_tensor(
        self,
        serialized: Sequence[str],
        *,
        weight_version: int,
        flush_cache: bool,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """Load a flat bucket that lies on the server's own devices.

        serialized: for each tensor-parallel rank, a handle of its copy; a rank without one ends the
            server.
        """
        fields = {
            "serialized_named_tensors": list(serialized),
            "load_format": "flattened_bucket",
            "flush_cache": flush_cache,
            "weight_version": str(weight_version),
        }
        await self.post("/update_weights_from_tensor", fields, timeout_s)

    async def release_memory(self, tags: Sequence[str], timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Have a paused server free the memory of these tags; a running one would die of it."""
        await self.post("/release_memory_occupation", {"tags": list(tags)}, timeout_s)

    async def resume_memory(self, tags: Sequence[str], timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Have a server take the memory of released tags again; weights are then garbage.

        A tag that was not released ends the server.
        """
        await self.post("/resume_memory_occupation", {"tags": list(tags)}, timeout_s)

    async def checksums(self, timeout_s: float = CALL_TIMEOUT_S) -> tuple[dict[str, str], ...]:
        """Return per tensor-parallel rank: SGLang's tensor name -> checksum of its bytes."""
        answer = await self.post("/weights_checker", {"action": "checksum"}, timeout_s)
        return tuple(rank["checksums"] for rank in answer["ranks"])

    # -------------------------------------------------------------------------------- HTTP

    async def post(self, route: str, fields: dict[str, Any], timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Return the answer to a request, also of a route without a method here.

        Raises ServerError for an answer that reports a failure.
        """
        answer = await self._request("POST", route, fields, timeout_s)
        self._require_success(route, answer)
        return answer

    async def _request(self, method: str, route: str, fields: dict[str, Any] | None, timeout_s: float) -> Any:
        """Return the answer's JSON, None for another content type."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                # the controller bounds the number in flight
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S),
            )
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            # a redirection is not followed: the key is only for this server
            async with self._session.request(
                method, self.url + route, **_as_json(fields), timeout=timeout, allow_redirects=False
            ) as response:
                return self._content(route, response.status, response.content_type, await response.read())
        except TimeoutError as error:
            raise ServerError(self.url, route, None, f"nothing within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(self.url, route, None, f"{type(error).__name__}: {error}") from error

    def _content(self, route: str, status: int, content_type: str, body: bytes) -> Any:
        """Return the JSON of an answer, None for another content type.

        Raises ServerError for another status than 200.
        """
        if status in (401, 403):
            why = "refuses the key that it was sent" if self._headers else "demands a key, and was sent none"
            raise KeyRefused(self.url, route, status, why)
        if status != 200:
            raise ServerError(self.url, route, status, _head(body))
        if "json" not in content_type:
            return None
        try:
            # a list per token, all gone with the answer: not for the collector to go through
            with collection_paused():
                return orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise ServerError(self.url, route, status, f"no JSON: {_head(body)}") from error

    def _require_success(self, route: str, answer: Any) -> None:
        if isinstance(answer, dict) and answer.get("success") is False:
            raise ServerError(self.url, route, 200, json.dumps(answer))


def _as_json(fields: dict[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of a request with the fields; arrays need no conversion to lists."""
    if fields is None:
        return {}
    body = orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
    return {"data": body, "headers": {"Content-Type": "application/json"}}


def _head(content: bytes) -> str:
    """Return the beginning of an answer as text."""
    return content[: 4 * BODY_HEAD].decode(errors="replace")


def _version(name: str | int | None) -> int:
    """Return a weight version as a number, FOREIGN_VERSION for another name."""
    try:
        return FOREIGN_VERSION if name is None else int(name)
    except (TypeError, ValueError):
        return FOREIGN_VERSION


def generation_of(answer: dict[str, Any]) -> Generation:
    """Return the generation of an answer of `/generate`.

    Raises ValueError, KeyError or TypeError for an answer that contradicts itself.
    """
    meta = answer["meta_info"]
    tokens = token_array(answer["output_ids"], TOKEN, "token id")
    scored = meta.get("output_token_logprobs") or []
    finish_reason = meta["finish_reason"]["type"]
    if [entry[1] for entry in scored] != answer["output_ids"]:
        raise ValueError(f"{len(tokens)} output ids, but other {len(scored)} ids have log-probs")
    if finish_reason not in ("stop", "length", "abort"):
        raise ValueError(f"unknown finish reason {finish_reason!r}")
    return Generation(
        tokens=tokens,
        log_probs=token_array([entry[0] for entry in scored], LOG_PROB, "log-prob"),
        finish_reason=finish_reason,
        weight_versions=_versions_per_token(meta, len(tokens)),
        num_retractions=meta.get("num_retractions") or 0,
        num_cached_tokens=meta.get("cached_tokens") or 0,
    )


def _versions_per_token(meta: dict[str, Any], num_tokens: int) -> np.ndarray:
    spans = meta.get("weight_versions") or []  # none of a request aborted before its first token
    end = 0
    for span in spans:
        if span["start"] != end:
            raise ValueError(f"weight version spans have a gap or overlap: {spans}")
        end = max(end, span["end"])
    if end != num_tokens:
        raise ValueError(f"weight version spans cover {end} of {num_tokens} tokens")
    versions = token_array([_version(span["version"]) for span in spans], VERSION, "weight version")
    if len(versions) == 1:
        return repeated(versions[0], num_tokens, VERSION)
    lengths = np.array([span["end"] - span["start"] for span in spans], dtype=np.int64)
    return np.repeat(versions, lengths)
