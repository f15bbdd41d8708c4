"""Answers that come event by event, as SGLang sends them with `stream: true` and
`--incremental-streaming-output`: server and client, for what such answers would cost.

The program does not stream. The client does the least that it could: it keeps what came, and reads
the whole answer once, as the program does.
"""

import asyncio
import json
from collections.abc import Sequence

import aiohttp
import orjson
from aiohttp import web

from megatron_dapo.data.token_arrays import TOKEN, TokenIds, token_array
from megatron_dapo.servers.client import ExpertQuestion, Generation, SamplingParams, SGLangClient, generation_of
from tests.fake_rollout import FakeServer, Script

_END = b"data: [DONE]"


class StreamedServer(FakeServer):
    """Answers with events of `num_tokens` tokens, each after the time of its tokens."""

    def __init__(self, answers: Sequence[bytes], token_s: float, num_tokens: int) -> None:
        super().__init__(Script(), version=0)
        self._answers = [json.loads(answer)["meta_info"]["output_token_logprobs"] for answer in answers]
        self._token_s = token_s
        self._num_tokens = num_tokens
        self._num_begun = 0

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        fields = await request.json()
        self._num_begun += 1
        scored = self._answers[self._num_begun * 37 % len(self._answers)]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        began = asyncio.get_running_loop().time()
        for start in range(0, len(scored), self._num_tokens):
            end = min(start + self._num_tokens, len(scored))
            await asyncio.sleep(began + end * self._token_s - asyncio.get_running_loop().time())
            await response.write(self._event(fields["rid"], scored[start:end], end, end == len(scored)))
        await response.write(_END + b"\n\n")
        return response

    def _event(self, request_id: str, scored: list, num_written: int, is_last: bool) -> bytes:
        """Return an event with SGLang's fields of an answer."""
        meta = {
            "id": request_id,
            "finish_reason": {"type": "stop"} if is_last else None,
            "prompt_tokens": 1,
            "weight_version": str(self.version),
            "num_retractions": 0,
            "completion_tokens": num_written,
            "cached_tokens": 0,
            "output_token_logprobs": scored,
            "output_token_logprobs_length": num_written,
            "weight_versions": [{"version": str(self.version), "start": 0, "end": num_written}],
        }
        event = {"text": "", "output_ids": [token for _, token, _ in scored], "meta_info": meta}
        return b"data: " + orjson.dumps(event) + b"\n\n"


class StreamedClient(SGLangClient):
    """Asks for events, and returns their joined answer."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        super().__init__(url, api_key)
        self._streams: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._streams is not None:
            await self._streams.close()
        await super().close()

    async def generate(
        self,
        prompt_tokens: TokenIds,
        sampling: SamplingParams,
        timeout_s: float,
        request_id: str | None = None,
        cache_salt: str | None = None,
        experts: ExpertQuestion | None = None,
    ) -> Generation:
        if self._streams is None:
            self._streams = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        request = {"input_ids": token_array(prompt_tokens, TOKEN), "rid": request_id, "stream": True}
        body = orjson.dumps(request, option=orjson.OPT_SERIALIZE_NUMPY)
        tokens: list[int] = []
        scored: list[list] = []
        async with self._streams.post(f"{self.url}/generate", data=body) as response:
            rest = b""
            while not response.content.at_eof():
                *events, rest = (rest + await response.content.readany()).split(b"\n\n")
                for event in events:
                    if event != _END:
                        part = orjson.loads(event.removeprefix(b"data: "))
                        tokens += part["output_ids"]
                        scored += part["meta_info"]["output_token_logprobs"]
        meta = part["meta_info"] | {"output_token_logprobs": scored}
        return generation_of({"output_ids": tokens, "meta_info": meta})
