"""The command line and the variables of an SGLang server, and its GPUs."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.checks.fp8_server_checks import gpu_faults
from megatron_dapo.checks.model_checks import has_stacked_experts, model_json_of, read_model_specs
from megatron_dapo.common.child_environment import COMMON, places_to_write
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.derived import replays_servers_experts, shares_gpus
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.server_memory import server_share
from megatron_dapo.huggingface.fp8_form import quantization_config
from megatron_dapo.huggingface.spec_reader import model_spec
from megatron_dapo.storage.model_folder import ModelFolder
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.storage.server_key import server_key_file

FLOAT32_STATES = {"SGLANG_MAMBA_CONV_DTYPE": "float32", "SGLANG_MAMBA_SSM_DTYPE": "float32"}
"""Else the states of gated delta nets have a type of their own."""


@dataclass(frozen=True)
class ServerCommand:
    """The command line of a server and all its variables; the same for its restarts."""

    command: tuple[str, ...]
    environment: dict[str, str]


ServerCommandMaker = Callable[[Config, str, int, list[str]], ServerCommand]


def sglang_command(config: Config, host: str, port: int, gpus: list[str]) -> ServerCommand:
    """Return the command of an SGLang server.

    gpus: the value of CUDA_VISIBLE_DEVICES; see `assign_gpus`.
    """
    from megatron_dapo.platform import nccl

    # not at the top: it imports torch, and the controller works without torch
    from megatron_dapo.platform.device import is_gpu, model_dtype

    rollout = config.actor_rollout_ref.rollout
    model = ModelFolder.of(config.actor_rollout_ref.model.path)
    settings = rollout.server
    dtype = str(model_dtype(config.actor_rollout_ref.actor.megatron.dtype)).removeprefix("torch.")
    arguments = [
        *("--model-path", str(model.hf)),
        *("--host", host),
        *("--port", str(port)),
        *("--tp-size", str(settings.tensor_model_parallel_size)),
        *("--dtype", dtype),
        *("--log-level-http", "warning"),  # else one line per request
    ]
    if replays_servers_experts(config):
        arguments.append("--enable-return-routed-experts")
    if rollout.deterministic:
        arguments.append("--enable-deterministic-inference")
    if shares_gpus(config):
        arguments.append("--enable-memory-saver")
    model_json = model_json_of(config.actor_rollout_ref.model.path) or {}
    if model_json.get("n_shared_experts") or model_json.get("shared_expert_intermediate_size"):
        # else a GPU server keeps the shared expert as one more of the others, under names outside
        # the comparison
        arguments.append("--disable-shared-experts-fusion")
    if rollout.quantization == "fp8":
        override = {"quantization_config": quantization_config(model_spec(model_json))}
        arguments += ("--json-model-override-args", json.dumps(override))
    # only the trainer reads or quantizes such weights; its first push comes before the first sample
    if model.megatron or rollout.quantization:
        arguments += ("--load-format", "dummy")
    if is_gpu():
        if rollout.quantization == "fp8" and (faults := list(gpu_faults(gpus))):
            raise UserError(faults)
        environment = nccl.ENVIRONMENT | dict(os.environ) | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        # else logits are rounded to bfloat16 before the softmax: 7e-3 off on average, 5e-2 at most,
        # per log-prob
        arguments.append("--enable-fp32-lm-head")
        if has_stacked_experts(model_json):
            # else SGLang takes its backend triton_kernel: it holds experts transposed, so that they
            # cannot be compared, and answers zeros in place of the experts chosen by its routers
            arguments += ("--moe-runner-backend", "triton")
        if shares_gpus(config):
            # captured graphs go to sleep too; those of prompts cannot, and stop the server's start
            environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
            # what the trainer keeps may differ between a server's GPUs when it starts again
            environment.setdefault("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "false")
            arguments += ("--cuda-graph-backend-prefill", "disabled")
        arguments += _words_of_options(
            ("--max-total-tokens", settings.max_total_tokens),
            ("--max-running-requests", settings.max_running_requests),
            ("--mem-fraction-static", _memory_share(config)),
        )
    else:
        from megatron_dapo.platform.sglang_cpu import cpu_server  # never imported on a GPU machine

        environment = cpu_server.server_environment(tensor_model_parallel_size=settings.tensor_model_parallel_size)
        arguments += cpu_server.server_arguments(settings.max_total_tokens, settings.max_running_requests)
        environment |= ledger_variables(config, gpus)
        if rollout.deterministic:
            arguments += cpu_server.WHOLE_PROMPTS
    if dtype == "float32":
        environment = FLOAT32_STATES | environment
    program = ("-m", "megatron_dapo.servers.keyed_sglang", str(server_key_file(config)))
    command = (sys.executable, *program, *arguments, *settings.extra_args)
    environment |= COMMON | places_to_write(environment) | _own_tools(environment) | _no_proxy(environment, host)
    return ServerCommand(command, environment)


def _memory_share(config: Config) -> float | None:
    """Return the share of a GPU that a server takes; None: SGLang's choice."""
    specs = read_model_specs(config) if shares_gpus(config) else None
    return server_share(config, *specs) if specs else config.actor_rollout_ref.rollout.server.mem_fraction_static


def ledger_variables(config: Config, gpus: Sequence[str]) -> dict[str, str]:
    """Return variables for a process that shares imagined GPUs: the ledger of their memory, and the
    process's GPUs. None without shared GPUs, or with several nodes, which number them alike."""
    if not shares_gpus(config) or config.trainer.nnodes > 1:
        return {}
    folder = RunFolder.of(config.trainer).ledger.absolute()
    return {"MEGATRON_DAPO_LEDGER": str(folder), "MEGATRON_DAPO_LEDGER_GPUS": ",".join(gpus)}


def _own_tools(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a PATH with our Python's programs first, as in its activated environment.

    A GPU server compiles kernels at its start, and runs `ninja` for that.
    """
    return {"PATH": os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])}


def _no_proxy(environment: Mapping[str, str], host: str) -> dict[str, str]:
    """Return variables that keep a server's requests to itself away from the cluster's proxy.

    A server asks itself for its first answer, and ends if none comes.
    """
    hosts = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    if hosts.strip() == "*":  # only a lone * means all hosts
        return {}
    return {"no_proxy": ",".join([*filter(None, [hosts]), *dict.fromkeys(["127.0.0.1", "localhost", "::1", host])])}


def _words_of_options(*options: tuple[str, object]) -> list[str]:
    """Return the command-line words of the options that have a value."""
    return [word for name, value in options if value is not None for word in (name, str(value))]


def assign_gpus(num_servers: int, gpus_per_server: int, first_gpu: int) -> list[list[str]]:
    """Return each server's GPUs, numbered as in this process's CUDA_VISIBLE_DEVICES. On a CPU they
    are imagined, for the accounts of a run with shared GPUs.

    Raises UserError if there are too few, or none usable by torch.
    """
    from megatron_dapo.platform.device import is_gpu, require_usable_gpus

    require_usable_gpus()
    needed = first_gpu + num_servers * gpus_per_server
    visible = visible_gpus() if is_gpu() else [str(number) for number in range(needed)]
    if needed > len(visible):
        raise UserError(
            f"{num_servers} servers x {gpus_per_server} GPUs (actor_rollout_ref.rollout.server) after {first_gpu} GPUs "
            f"of other processes need {needed} GPUs, this machine offers {len(visible)}; use fewer servers or ranks."
        )
    starts = range(first_gpu, needed, gpus_per_server)
    return [visible[start : start + gpus_per_server] for start in starts]


def visible_gpus() -> list[str]:
    """Return this machine's GPUs by their names in CUDA_VISIBLE_DEVICES."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
