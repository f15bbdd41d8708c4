"""Demands of trainer and servers on the same GPUs (`hybrid_engine`) on the other keys, and on this
machine's GPUs."""

import os
import re
from collections.abc import Iterator

from megatron_dapo.checks.known_mistakes import known_mistakes
from megatron_dapo.checks.rollout_checks import EXTRA_ARGS
from megatron_dapo.common import nvidia_driver
from megatron_dapo.config.derived import has_given_servers, shares_gpus, starts_reward_model, world_size
from megatron_dapo.config.key_names import ROLLOUT
from megatron_dapo.config.schema.config import Config

HYBRID_ENGINE = "actor_rollout_ref.hybrid_engine"
_NO_DRAFT = "a sleeping server with a draft model hangs when it wakes"
_GRAPHS = "which graphs a server captures decides whether it can sleep, and is chosen for it"
_OWN_START = "the servers' sleep is set up for them"
# beginnings of options of `sglang.launch_server` -> why a server that sleeps cannot have them
REFUSED_ASLEEP = {
    "--enable-memory-saver": _OWN_START,
    "--enable-weights-cpu-backup": "each push brings all weights, and a copy of them would fill the machine's memory",
    "--speculative-": _NO_DRAFT,
    "--enable-draft-weights-cpu-backup": _NO_DRAFT,
    "--cuda-graph-config": _GRAPHS,
    "--cuda-graph-backend-": _GRAPHS,
    "--debug-cuda-graph": _GRAPHS,
    "--cpu-offload-gb": "weights in the machine's memory do not go to sleep",
    "--weight-cache-mode": "weights of a cache in other processes do not go to sleep",
}


def given_servers(config: Config) -> Iterator[str]:
    """Yield a mistake for servers given to a run that puts its own to sleep. This holds for the
    user's own config, as `starts_servers`."""
    if shares_gpus(config) and has_given_servers(config):
        rollout = config.actor_rollout_ref.rollout
        key = "server_urls" if rollout.server_urls else "server_urls_file"
        value = ", ".join(rollout.server_urls) or rollout.server_urls_file
        yield _refusal(f"{ROLLOUT}.{key}", value, f"the run starts its own, on the trainer's GPUs; remove {key}")


def _refusal(key: str, value: object, reason_and_cure: str) -> str:
    return f"{key} is {value}, but with {HYBRID_ENGINE} true {reason_and_cure}, or set hybrid_engine to false."


def _staleness(config: Config) -> Iterator[str]:
    if staleness := config.actor_rollout_ref.rollout.max_staleness:
        rest = "no server samples while the trainer trains; set max_staleness to 0"
        yield _refusal(f"{ROLLOUT}.max_staleness", staleness, rest)


def _server_nodes(config: Config) -> Iterator[str]:
    if nodes := config.actor_rollout_ref.rollout.server.nnodes:
        yield _refusal(f"{ROLLOUT}.server.nnodes", nodes, "servers are on the trainer's nodes; set nnodes to 0")


def _nodes_per_server(config: Config) -> Iterator[str]:
    if (nodes := config.actor_rollout_ref.rollout.server.nodes_per_server) > 1:
        rest = "a server is on one node; set nodes_per_server to 1"
        yield _refusal(f"{ROLLOUT}.server.nodes_per_server", nodes, rest)


def _server_gpus(config: Config) -> Iterator[str]:
    """Yield a mistake unless the servers fill the ranks' GPUs, each within a node."""
    server, trainer = config.actor_rollout_ref.rollout.server, config.trainer
    tp, world = server.tensor_model_parallel_size, world_size(config)
    per_node = f"trainer.n_procs_per_node {trainer.n_procs_per_node}"
    if trainer.n_procs_per_node % tp:
        rest = f"it must divide {per_node}: a server does not span nodes; set it to a divisor"
        yield _refusal(f"{ROLLOUT}.server.tensor_model_parallel_size", tp, rest)
    elif server.num_servers * tp != world:
        product = f"{ROLLOUT}.server.num_servers {server.num_servers} x tensor_model_parallel_size {tp}"
        rest = f"it must be the trainer's {world} GPUs (trainer.nnodes {trainer.nnodes} x {per_node})"
        yield _refusal(product, server.num_servers * tp, f"{rest}; set num_servers to {world // tp}")


def _reward_model(config: Config) -> Iterator[str]:
    if starts_reward_model(config):
        rest = (
            "no GPU is left for its server; start it elsewhere (`python -m launch.sglang_server --serve reward-model`) "
            "and give reward.model.url"
        )
        yield _refusal("reward.model.path", config.reward.model.path, rest)


def _server_options(config: Config) -> Iterator[str]:
    arguments = config.actor_rollout_ref.rollout.server.extra_args
    for option in dict.fromkeys(argument.partition("=")[0] for argument in arguments if argument.startswith("--")):
        # SGLang takes an option's beginning for the whole of it
        beginnings = (name for name in REFUSED_ASLEEP if option.startswith(name) or name.startswith(option))
        if len(option) > 2 and (name := next(beginnings, None)):
            yield _refusal(f"An option of {EXTRA_ARGS}", option, f"{REFUSED_ASLEEP[name]}; leave it out")
    if re.search(r"--load-format[ =]flash_rl\b", " ".join(arguments)):
        rest = "quantized weights would have to survive a sleep, which is untested; leave it and --quantization out"
        yield _refusal(f"An option of {EXTRA_ARGS}", "--load-format flash_rl", rest)


_SHARED_CHECKS = (_staleness, _server_nodes, _nodes_per_server, _server_gpus, _reward_model, _server_options)


def _of_shared_gpus(config: Config) -> Iterator[str]:
    if shares_gpus(config):
        yield from known_mistakes(_SHARED_CHECKS, config)


def _machine_of_shared_gpus(config: Config) -> Iterator[str]:
    """Look at the GPUs and their allocator, on machines with GPUs only."""
    if shares_gpus(config) and nvidia_driver.is_loaded():
        yield from _expandable_segments()
        yield from _gpu_instances()


def _expandable_segments() -> Iterator[str]:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = os.environ.get(name, "")
        if re.search(r"expandable_segments\s*:\s*true|backend\s*:\s*cudaMallocAsync", value, re.IGNORECASE):
            rest = "weights are handed to the servers, and memory of this kind cannot be; take it out of the variable"
            yield _refusal(name, value, rest)


def _gpu_instances() -> Iterator[str]:
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if all(name.isdigit() for name in names):  # numbers, or all of the machine's
        # a line per GPU, and one below it per instance of MIG
        names = [line.strip() for line in nvidia_driver.answer("-L").splitlines()]
    if instance := next((name for name in names if name.startswith("MIG")), None):
        yield _refusal("A GPU here", f"a part of one ({instance})", "only whole ones can be shared; use such ones")


COLOCATED_CHECKS = (_of_shared_gpus,)
SHARED_GPU_CHECKS = (_machine_of_shared_gpus,)
