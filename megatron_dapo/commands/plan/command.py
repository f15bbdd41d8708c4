"""`python -m megatron_dapo plan`: memory and time of a run, before anything starts."""

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_dapo.checks.colocated_checks import given_servers
from megatron_dapo.checks.model_checks import published_name, read_model_json, shape_of
from megatron_dapo.checks.run_checks import load_and_validate, validate
from megatron_dapo.commands.plan.cost import JobLimit, limit_seconds
from megatron_dapo.commands.plan.measured import MeasuredRun
from megatron_dapo.commands.plan.plan_text import time_plan
from megatron_dapo.commands.plan.process_plan import memory_lines
from megatron_dapo.commands.plan.search import ConfigSource, search_report
from megatron_dapo.commands.plan.shortage import shortage
from megatron_dapo.commands.plan.step_time import HAND_OVER_S, Assumptions, Factors, run_time
from megatron_dapo.commands.plan.training_time import Efficiency
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.sizes import GB
from megatron_dapo.common.standard_streams import print_line
from megatron_dapo.config.derived import replaces_groups, shares_gpus
from megatron_dapo.config.key_names import MEGATRON, ROLLOUT
from megatron_dapo.config.keys import show_text, value_of
from megatron_dapo.config.recipes import add_config_arguments
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.lengths import MEAN_SHARE, SPREAD, Lengths
from megatron_dapo.estimates.hardware import (
    HARDWARE,
    Hardware,
    hardware_named,
    lack_of_fp8,
    serves_fp8,
)
from megatron_dapo.estimates.model_shapes import MODEL_SHAPES, model_json_named
from megatron_dapo.estimates.recompute import settled
from megatron_dapo.estimates.server_weights import holds_blocks
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.spec_reader import model_spec

HAND_OVER_US = HAND_OVER_S * 1e6
STALENESS = (0, 1, 2)
_EFFICIENCY = Efficiency()


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command. docs/plan.md explains the defaults."""
    add_config_arguments(parser)
    parser.add_argument("--model", metavar="NAME", help="a published model's shape, such as qwen2.5-32b")
    parser.add_argument("--hardware", metavar="NAME", help=f"{', '.join(HARDWARE)}; h100 without it")
    parser.add_argument(
        "--staleness", metavar="K,...", type=_staleness, help="max_staleness to compare; 0,1,2 and the config's own"
    )
    parser.add_argument("--search", action="store_true", help="also the ten fastest layouts and splits of as many GPUs")
    parser.add_argument("--time-limit", metavar="TIME", default="24:00:00", help="of a job, as for sbatch; 24:00:00")
    parser.add_argument(
        "--notice", metavar="S", type=_positive, default=JobLimit().notice_s, help="seconds before it; 7200"
    )
    lengths = parser.add_argument_group("assumptions about the run")
    lengths.add_argument("--mean-length", metavar="TOKENS", type=_positive, help="of responses; 0.3 of the longest")
    lengths.add_argument("--spread", type=_positive, help="deviation of the logarithm of lengths; 0.9")
    lengths.add_argument("--prompt-length", metavar="TOKENS", type=_positive, help="on average; 170")
    lengths.add_argument(
        "--acceptance", metavar="SHARE", type=_share, help="groups with signal; 0.45 if others are replaced, else 1"
    )
    lengths.add_argument("--rows", metavar="R", type=_positive, default=1.0, help="of an agent's trajectory; 1")
    lengths.add_argument("--tools-s", metavar="S", type=_positive, default=0.0, help="outside servers, of each; 0")
    lengths.add_argument(
        "--measured",
        metavar="RUN",
        type=Path,
        help="a run's folder: lengths, prompts, acceptance and speeds from its log, unless another option sets them",
    )
    speeds = parser.add_argument_group("speeds, in place of the estimate's")
    speeds.add_argument(
        "--server-tokens-s", metavar="RATE", type=_positive, help="of one server at full load; a roofline without it"
    )
    speeds.add_argument("--link-gb-s", metavar="RATE", type=_positive, help="between GPUs of a node, one direction")
    speeds.add_argument("--network-gb-s", metavar="RATE", type=_positive, help="of a GPU to other nodes, one direction")
    speeds.add_argument(
        "--hand-over-us",
        metavar="TIME",
        type=_positive,
        default=HAND_OVER_US,
        help=f"per token; {HAND_OVER_US:g}",
    )
    for name, value in vars(_EFFICIENCY).items():
        speeds.add_argument(
            f"--{name}-efficiency", metavar="SHARE", type=_share, default=value, help=f"of the data sheet; {value:g}"
        )


def plan(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Check the config and print memory and time. Raises UserError, also if the GPUs have too
    little memory."""
    if arguments.config is None:
        raise UserError("plan needs a config: give --config FILE, or --config-name NAME.")
    hardware = _hardware_of(arguments)
    limit = JobLimit(limit_seconds(arguments.time_limit), arguments.notice)
    if arguments.hardware:  # the config's own value is of GPUs that it was written for
        overrides = [f"trainer.gpu_memory_gb={hardware.memory / GB:g}", *overrides]
    named = None if arguments.model is None else model_json_named(arguments.model)
    config = load_and_validate(arguments.config, overrides, check_files=False, model_json=named)
    name, model_json = _model_of(config, arguments.model)
    validate(config, model_json, check_files=False)
    if sentences := list(given_servers(config)):
        raise UserError(sentences)
    if config.trainer.replay or config.sft.enable:
        key, value = next((key, value) for key in ("trainer.replay", "sft.enable") if (value := value_of(config, key)))
        raise UserError(
            f"{key} is {show_text(value)}, whose batches come from no server, so there is no sampling to plan; leave "
            f"it out, or see the memory by `python -m launch.local --config ... --dry-run`."
        )
    spec = model_spec(model_json, source=name)
    critic = _critic_of(config)
    config = settled(config, spec, critic)
    megatron = config.actor_rollout_ref.actor.megatron
    if megatron.fp8 != "none" and (lack := lack_of_fp8(hardware.name, hardware.capability, megatron.fp8_recipe)):
        raise UserError(f"{MEGATRON}.fp8 is {megatron.fp8} with fp8_recipe {megatron.fp8_recipe}, {lack}")
    if holds_blocks(config) and hardware.capability > (0, 0) and not serves_fp8(hardware.capability):  # a CPU does
        raise UserError(
            f"{ROLLOUT}.quantization is fp8, which servers have on GPUs of compute capability 8.9 to 9.x, but "
            f"{hardware.name} has {'.'.join(map(str, hardware.capability))} (--hardware); set it to null."
        )
    assumed = _assumptions(config, arguments, hardware)
    print_line("Memory, per GPU\n" + "\n".join(f"  {line}" for line in memory_lines(config, (spec, critic))) + "\n")
    staleness = arguments.staleness or sorted({*STALENESS, config.actor_rollout_ref.rollout.max_staleness})
    run = run_time(config, spec, assumed, [0] if shares_gpus(config) else staleness, critic)
    print_line(time_plan(config, name, assumed, run, limit))
    if arguments.search:
        source = ConfigSource(Path(arguments.config), tuple(overrides), model_json, critic)
        print_line("\n" + search_report(source, config, assumed, staleness))
    if sentences := shortage(config, spec, critic):
        raise UserError(sentences)


def _model_of(config: Config, name: str | None) -> tuple[str, dict[str, Any]]:
    """Return a model's name and its config.json.

    The model is the option's, else the checkpoint's, else the published one named by the
    checkpoint's folder. Raises UserError.
    """
    if name is not None:
        return name.lower(), model_json_named(name)
    path = config.actor_rollout_ref.model.path
    if (content := read_model_json(config)) is not None:
        return published_name(path) or Path(path).name, content
    raise UserError(
        f"actor_rollout_ref.model.path is {path or 'empty'}, without a readable config.json; give --model NAME, one "
        f"of {', '.join(MODEL_SHAPES)}."
    )


def _critic_of(config: Config) -> ModelSpec | None:
    """Return the spec of a critic with a separate checkpoint, or None: the critic then has the
    actor's size."""
    path = config.critic.model.path
    content = shape_of(path) if path else None
    return None if content is None else model_spec(content, source=path or "")


def _hardware_of(arguments: argparse.Namespace) -> Hardware:
    """Return the GPU that the options describe."""
    row = hardware_named(arguments.hardware or "h100")
    changes = {"link_bandwidth": arguments.link_gb_s, "network_bandwidth": arguments.network_gb_s}
    return replace(row, **{name: value * GB for name, value in changes.items() if value is not None})


def _assumptions(config: Config, arguments: argparse.Namespace, hardware: Hardware) -> Assumptions:
    """Return the assumptions from the options or their defaults. Raises UserError."""
    run = MeasuredRun.of(arguments.measured) if arguments.measured else None
    usual = Assumptions.usual(config, hardware)
    acceptance = arguments.acceptance
    if acceptance is None:
        acceptance = run.acceptance() if run and replaces_groups(config) else usual.acceptance
    if acceptance < 1 and not replaces_groups(config):
        raise UserError(f"--acceptance is {acceptance:g}, but the config replaces no groups; leave it out.")
    if acceptance < 1 and config.actor_rollout_ref.rollout.n < 2:
        raise UserError("actor_rollout_ref.rollout.n is 1: no group of one response carries signal; raise it.")
    if arguments.rows < 1:
        raise UserError(f"--rows is {arguments.rows:g}, but a trajectory has at least one row; give 1 or more.")
    efficiency = Efficiency(**{name: getattr(arguments, f"{name}_efficiency") for name in vars(_EFFICIENCY)})
    prompt = arguments.prompt_length or (run.prompt() if run else usual.prompt)
    return Assumptions(
        hardware,
        _lengths(config.data.max_response_length, arguments, run),
        round(min(prompt, config.data.max_prompt_length)),
        acceptance,
        efficiency,
        arguments.server_tokens_s,
        arguments.hand_over_us / 1e6,
        _factors(run, hardware, efficiency),
        arguments.rows,
        arguments.tools_s,
    )


def _lengths(longest: int, arguments: argparse.Namespace, run: MeasuredRun | None) -> Lengths:
    if run and not arguments.mean_length and not arguments.spread:
        return run.lengths(longest)
    mean = arguments.mean_length or (run.lengths(longest).mean if run else MEAN_SHARE * longest)
    if mean >= longest:
        raise UserError(f"--mean-length is {mean:g}, but data.max_response_length is {longest}; give less.")
    return Lengths.with_mean(mean, arguments.spread or SPREAD, longest)


def _factors(run: MeasuredRun | None, hardware: Hardware, efficiency: Efficiency) -> Factors:
    if run is None:
        return Factors()
    name, model_json = _model_of(run.config, None)
    return run.factors(model_spec(model_json, source=name), hardware, efficiency)


def _positive(text: str) -> float:
    if not 0 < (value := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _share(text: str) -> float:
    if not 0 < (value := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a number") from None


def _staleness(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text} is not a list of whole numbers from 0 on, such as 0,1,2")
    return sorted({int(part) for part in parts})
