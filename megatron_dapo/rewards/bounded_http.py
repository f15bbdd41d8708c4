"""An HTTP client for an untrusted service: it takes the first bytes of an answer, and unpacks
nothing."""

from collections.abc import AsyncIterator

import httpx
from openai import DefaultAsyncHttpxClient

MAX_ANSWER_BYTES = 2**21


def bounded_client() -> httpx.AsyncClient:
    """Return a client for the openai package."""
    return DefaultAsyncHttpxClient(headers={"Accept-Encoding": "identity"}, event_hooks={"response": [_bound]})


async def _bound(response: httpx.Response) -> None:
    """Bound an answer of which only the head was read yet."""
    response.headers.pop("Content-Encoding", None)  # 2 MB may unpack to 2 GB
    response.encoding = "utf-8"  # Python has codecs that take time by the square of the length
    assert isinstance(response.stream, httpx.AsyncByteStream), "of an asynchronous client"
    response.stream = _FirstBytes(response.stream)


class _FirstBytes(httpx.AsyncByteStream):
    """The beginning of a stream, as if it ended there."""

    def __init__(self, stream: httpx.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = MAX_ANSWER_BYTES
        async for part in self._stream:
            yield part[:left]
            left -= len(part)
            if left <= 0:
                return

    async def aclose(self) -> None:
        await self._stream.aclose()
