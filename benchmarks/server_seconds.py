"""The time of a demo's server for its requests, by their number and length.

These seconds hide behind no kernel on a CPU; they are for `megatron_dapo/estimates/hardware.py`.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.arithmetic.problems import split
from examples.character_model import VOCABULARY
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.recipes import recipe
from megatron_dapo.servers.client import SGLangClient
from megatron_dapo.servers.supervisor import ServerSupervisor
from megatron_dapo.storage.server_key import read_server_key

NUM_REQUESTS = (8, 16, 32, 64, 128)
LENGTHS = (8, 16, 32)
GROUP = 8  # requests of one prompt, as in the demo


def measured(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Start a server of the demo; return the least seconds of `rounds` per batch of requests."""
    config = load_config(recipe("demo"), [f"trainer.run_dir={folder / 'run'}"])
    supervisor = ServerSupervisor(config, folder)
    supervisor.start()
    try:
        supervisor.wait_healthy()
        return asyncio.run(_batches(supervisor.urls[0], read_server_key(supervisor.key_file), rounds))
    finally:
        supervisor.stop()


async def _batches(url: str, key: str | None, rounds: int) -> list[dict[str, Any]]:
    rows = []
    async with SGLangClient(url, key) as client:
        await _batch(client, max(NUM_REQUESTS), max(LENGTHS))  # once before
        for number in NUM_REQUESTS:
            for length in LENGTHS:
                seconds = min([await _batch(client, number, length) for _ in range(rounds)])
                rows.append({"num_requests": number, "length": length, "seconds": seconds})
    return rows


async def _batch(client: SGLangClient, number: int, length: int) -> float:
    """Return the seconds until all of these requests are answered, each with `length` tokens."""
    prompts = [[VOCABULARY[letter] for letter in problem.prompt] for problem in split()[0][: number // GROUP]]
    sampling = {"max_new_tokens": length, "ignore_eos": True, "temperature": 1.0}
    start = time.perf_counter()
    await asyncio.gather(
        *(
            client.post(
                "/generate",
                {"input_ids": prompts[place // GROUP], "sampling_params": sampling, "return_logprob": True},
            )
            for place in range(number)
        )
    )
    return time.perf_counter() - start


def fitted(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return a, b and c of seconds = (a + b r) L + c r, and the largest relative error.

    r requests have L tokens each. The fit is by least squares of relative errors.
    """
    seconds = np.array([row["seconds"] for row in rows])
    shapes = np.array([(row["length"], row["length"] * row["num_requests"], row["num_requests"]) for row in rows])
    (token, request_token, request), *_ = np.linalg.lstsq(shapes / seconds[:, None], np.ones(len(rows)), rcond=None)
    errors = shapes @ (token, request_token, request) / seconds - 1
    return {
        "token_s": float(token),
        "request_token_s": float(request_token),
        "request_s": float(request),
        "largest_error": float(abs(errors).max()),
    }
