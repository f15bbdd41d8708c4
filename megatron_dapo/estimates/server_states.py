"""States of gated delta nets on a server: their bytes, and their number for a request.

As SGLang 0.5.23 decides (mem_cache/kv_cache_configurator.py, configs/mamba_utils.py) by options in
`server.extra_args` and config.json; variables of the environment are not read.
"""

import math

from megatron_dapo.config.derived import server_option
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.memory import dtype_bytes
from megatron_dapo.huggingface.model_spec import ModelSpec

RATIO_OPTION = "--mamba-full-memory-ratio"
_RATIO = 0.9
"""SGLang's own ratio of the bytes of states to those of keys and values."""

_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a state's number. SGLang takes float32 in the place of another type."""

_PER_REQUEST = {"no_buffer": 3, "extra_buffer_lazy": 4, "extra_buffer": 5}
"""Strategy -> states of a request at work: three for it and the cache of prefixes, and buffers."""


def states_per_request(config: Config) -> int:
    """Return the states of a request at work; without another word GPUs take `extra_buffer`."""
    if "--disable-radix-cache" in config.actor_rollout_ref.rollout.server.extra_args:
        return 1
    strategy = server_option(config, "--mamba-radix-cache-strategy")
    return _PER_REQUEST.get(strategy or "", _PER_REQUEST["extra_buffer"])


def given_states(config: Config) -> int | None:
    """Return the number of states that options fix; None if it follows from the memory."""
    server = config.actor_rollout_ref.rollout.server
    number = server_option(config, "--max-mamba-cache-size") or ""
    if number.isdecimal():
        return int(number)
    return server.max_running_requests if states_per_request(config) == 1 else None


def states_ratio(config: Config) -> float | None:
    """Return the ratio of the bytes of states to those of keys and values; None for a text that is
    no number above 0."""
    text = server_option(config, RATIO_OPTION)
    if text is None:
        return _RATIO
    try:
        ratio = float(text)
    except ValueError:
        return None
    return ratio if 0 < ratio < math.inf else None


def states_share(config: Config) -> float:
    """Return the part of a hybrid's cache for states, unless their number is given."""
    ratio = states_ratio(config) or _RATIO  # a check refuses other texts
    return ratio / (1 + ratio)


def state_bytes(config: Config, spec: ModelSpec) -> int:
    """Return the bytes of a state in all delta nets: keys x values of each value head, and the tokens
    before the next under the convolution. A float32 run's are float32."""
    if (net := spec.delta_net) is None:
        return 0
    of_run = "float32" if dtype_bytes(config) == 4 else net.state_dtype
    width = _WIDTHS.get(server_option(config, "--mamba-ssm-dtype") or of_run, 4)
    heads = net.num_value_heads * net.key_dim * net.value_dim * width
    conv = net.conv_channels * (net.conv_size - 1) * dtype_bytes(config)
    return (spec.num_layers - spec.num_attention_layers) * (heads + conv)
