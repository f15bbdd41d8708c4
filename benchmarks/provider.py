"""An implementation to be measured: ours, torch's, or a package that may be installed."""

import atexit
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType

import torch


class UnavailableError(Exception):
    """The reason for an implementation's absence from the measurement."""


@dataclass(frozen=True)
class Provider:
    """An implementation to be measured, and its limits."""

    name: str
    # imports its needs, returns the measured function; raises UnavailableError
    make: Callable[[], Callable]
    entropy: bool = True  # gives the entropy, with gradient
    backward: bool = True  # has a backward pass
    slow_start: bool = False  # compiles for seconds at each new shape, left out of --quick
    devices: tuple[str, ...] = ("cpu", "cuda")
    ours: bool = False  # an error in it ends the benchmark; others' are reported


def need(module: str) -> ModuleType:
    """Return the module. Raises UnavailableError with the reason, also for a broken package."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # others' packages fail in many ways on machines they do not know
        first_line = (str(error).splitlines() or [""])[0]
        raise UnavailableError(f"cannot import {module}: {first_line[:80]}") from error


def select(
    providers: Iterable[Provider], names: str | None, device: torch.device, quick: bool
) -> tuple[dict[str, tuple[Provider, Callable]], list[dict[str, str]]]:
    """Return (name -> (provider, its function), [{provider, reason} of the others]).

    names: comma-separated or None.
    """
    providers = list(providers)
    wanted = names.split(",") if names else [p.name for p in providers if not (quick and p.slow_start)]
    if unknown := set(wanted) - {p.name for p in providers}:
        raise SystemExit(f"no provider {sorted(unknown)}; there are: {', '.join(p.name for p in providers)}")
    chosen, skipped = {}, []
    for provider in providers:
        if provider.name not in wanted:
            continue
        try:
            if device.type not in provider.devices:
                raise UnavailableError(f"needs {' or '.join(provider.devices)}")
            chosen[provider.name] = (provider, provider.make())
        except UnavailableError as reason:
            skipped.append({"provider": provider.name, "reason": str(reason)})
    return chosen, skipped


def one_rank_group():
    """Return Megatron's tensor-parallel group of one process, made at the first call."""
    global _group
    if _group is None:
        try:
            _group = importlib.import_module("megatron_dapo.platform.parallel").ParallelLayout.initialize().tp_group
        except ImportError as error:
            raise UnavailableError(f"cannot import megatron.core: {error}") from error
        atexit.register(torch.distributed.destroy_process_group)
    return _group


_group = None
