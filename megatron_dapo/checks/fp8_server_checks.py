"""Demands of servers with FP8 weights (`rollout.quantization`) on the other keys, the model and the
servers' GPUs."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron_dapo.checks.algorithm_checks import is_corrected
from megatron_dapo.checks.known_mistakes import known_mistakes
from megatron_dapo.checks.rollout_checks import EXTRA_ARGS, given_options
from megatron_dapo.common import nvidia_driver
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.derived import has_given_servers, server_expert_parts, shares_gpus
from megatron_dapo.config.key_names import CORRECTION, ROLLOUT
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.hardware import serves_fp8
from megatron_dapo.huggingface.fp8_form import BLOCK, has_expert_blocks, odd_widths
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.spec_reader import model_spec

QUANTIZATION = f"{ROLLOUT}.quantization"
_TP = f"{ROLLOUT}.server.tensor_model_parallel_size"
_OWN_OPTIONS = ("--quantization", "--json-model-override-args", "--load-format")


def _correction(config: Config) -> Iterator[str]:
    if not is_corrected(config):
        yield (
            f"{QUANTIZATION} is fp8, so that servers sample by other weights than the trainer's, but "
            f"{CORRECTION}.rollout_is is none; set rollout_is to token, or rollout_rs, or bypass_mode, or quantization "
            f"to null."
        )


def _shared_gpus(config: Config) -> Iterator[str]:
    if shares_gpus(config):
        yield (
            f"{QUANTIZATION} is fp8, but with actor_rollout_ref.hybrid_engine true servers sleep, which blocks have "
            f"not been seen to survive; set quantization to null, or hybrid_engine to false."
        )


def _deterministic(config: Config) -> Iterator[str]:
    if config.actor_rollout_ref.rollout.deterministic:
        yield (
            f"{QUANTIZATION} is fp8, but {ROLLOUT}.deterministic is true, and the results of kernels for blocks depend "
            f"on what else is in the batch; set quantization to null, or deterministic to false."
        )


def _server_options(config: Config) -> Iterator[str]:
    for option, _ in given_options(config, _OWN_OPTIONS):
        yield (
            f"{EXTRA_ARGS} has {option}, but {QUANTIZATION} fp8 chooses how servers hold weights; leave it out, or set "
            f"quantization to null."
        )


def _of_fp8_servers(config: Config) -> Iterator[str]:
    if config.actor_rollout_ref.rollout.quantization is not None:
        yield from known_mistakes((_correction, _shared_gpus, _deterministic, _server_options), config)


def fp8_servers(config: Config, model: dict[str, Any]) -> Iterator[str]:
    """Yield the mistakes of a model that servers cannot hold in blocks."""
    if config.actor_rollout_ref.rollout.quantization is None:
        return
    try:
        spec = model_spec(model)
    except (UserError, ValueError):  # another check reports it
        return
    if spec.moe is None:
        yield f"{QUANTIZATION} is fp8, but {spec.family} has no experts, which it is for; set it to null."
    elif not has_expert_blocks(spec):
        yield f"{QUANTIZATION} is fp8, but servers take no blocks of the experts of {spec.family}; set it to null."
    elif not has_given_servers(config):
        yield from _odd_widths(config, spec)


def _odd_widths(config: Config, spec: ModelSpec) -> Iterator[str]:
    tp = config.actor_rollout_ref.rollout.server.tensor_model_parallel_size
    ep = server_expert_parts(config, tp)
    if not (odd := odd_widths(spec, tp, tp // ep if tp % ep == 0 else tp)):
        return
    module, width = odd[0]
    divisors = [number for number in range(1, tp + 1) if tp % number == 0]
    cures = [f"add --ep-size {n} to {EXTRA_ARGS}" for n in divisors if not odd_widths(spec, tp, tp // n)][:1]
    cures += [f"set {_TP} to {n}" for n in reversed(divisors) if not odd_widths(spec, n, n)][:1]
    yield (
        f"{QUANTIZATION} is fp8, in blocks of {BLOCK} x {BLOCK}, but {module} is {width} wide on each of "
        f"a server's {tp} ranks ({_TP}), which is no multiple; {', or '.join([*cures, 'set quantization to null'])}."
    )


def gpu_faults(gpus: Sequence[str]) -> Iterator[str]:
    """Yield a mistake for a GPU of this machine that holds no blocks. gpus: their names in
    CUDA_VISIBLE_DEVICES."""
    listing = nvidia_driver.answer(f"--id={','.join(gpus)}", "--query-gpu=name,compute_cap", "--format=csv,noheader")
    for name, _, text in (line.rpartition(",") for line in dict.fromkeys(listing.splitlines())):
        major, _, minor = text.strip().partition(".")
        if not (major.isdecimal() and minor.isdecimal()):  # the driver does not say
            continue
        if not serves_fp8((int(major), int(minor))):
            yield (
                f"{QUANTIZATION} is fp8, which servers run here on GPUs of compute capability 8.9 to 9.x, but {name} "
                f"has {major}.{minor}; set it to null, or use such GPUs."
            )


FP8_SERVER_CHECKS = (_of_fp8_servers,)
