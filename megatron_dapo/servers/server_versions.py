"""Checks of the SGLang versions and settings of servers for a run."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dapo.common.errors import UserError
from megatron_dapo.servers.client import SGLangClient

IN_FLIGHT_UPDATES = (0, 5, 23)
"""The oldest SGLang seen to update weights and flush its cache while requests are retracted.

Older ones count them as waiting: they refuse the flush, or their scheduler ends.
"""


async def require_in_flight_updates(clients: Sequence[SGLangClient]) -> None:
    """Raise UserError naming a server with an SGLang that takes no push while it has requests.

    Raise ServerError for a server without an answer.
    """
    for client in clients:
        version = str((await client.server_info()).get("version"))
        numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
        if numbers < IN_FLIGHT_UPDATES:
            oldest = ".".join(map(str, IN_FLIGHT_UPDATES))
            raise UserError(
                f"actor_rollout_ref.rollout.max_staleness > 0 pushes weights while servers generate, for which the "
                f"SGLang {version} of {client.url} is too old; install {oldest} or newer there, or set the key to 0."
            )


async def require_deterministic(clients: Sequence[SGLangClient]) -> None:
    """Raise UserError naming a server without deterministic inference.

    Raise ServerError for a server without an answer.
    """
    for client in clients:
        if (await client.server_info()).get("enable_deterministic_inference") is not True:
            raise UserError(
                f"actor_rollout_ref.rollout.deterministic is true, but server {client.url} samples at random; start it "
                f"with --enable-deterministic-inference, or set the key to false."
            )


def require_weight_form(url: str, info: Mapping[str, Any], in_blocks: bool) -> None:
    """Raise UserError for a server that would take FP8 blocks for weights, or weights for blocks.

    info: its answer about itself. in_blocks: whether the trainer pushes blocks.
    """
    if ("weight_block_size" in str(info.get("json_model_override_args"))) != in_blocks:
        held, other = ("fp8", "null") if in_blocks else ("null", "fp8")
        raise UserError(
            f"actor_rollout_ref.rollout.quantization is {held}, but server {url} was not started for it; start it by "
            f"`python -m launch.sglang_server` with the run's config, or set the key to {other}."
        )
