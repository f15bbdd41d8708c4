"""Checks of the SGLang versions and settings of servers for a run."""

import re
from collections.abc import Sequence

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


async def require_fp8_weights(clients: Sequence[SGLangClient]) -> None:
    """Raise UserError naming a server that was not started for FP8 blocks: it would take them for
    weights.

    Raise ServerError for a server without an answer.
    """
    for client in clients:
        if "weight_block_size" not in str((await client.server_info()).get("json_model_override_args")):
            raise UserError(
                f"actor_rollout_ref.rollout.quantization is fp8, but server {client.url} was not started for it; start "
                f"it by `python -m launch.sglang_server` with the run's config, or set the key to null."
            )
