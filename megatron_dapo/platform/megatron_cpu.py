"""Megatron-core on a machine without a GPU: every adaptation, with its reason. Never imported if
CUDA is available.

Megatron-core uses CUDA by name (`torch.cuda.current_device()`, `device="cuda"`) in code that
computes nothing CUDA-specific. `ADAPTATIONS` gives those names a CPU meaning; nothing else of torch
or megatron changes. If a name is gone, `apply` fails with it: then review the row, do not work
around it.

This file lists all differences between a CPU run and a GPU run of the trainer.
"""

import contextlib
import functools
import importlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


class MovedError(RuntimeError):
    """The target of an adaptation no longer exists."""


@dataclass(frozen=True)
class Adaptation:
    target: str  # dotted name to replace
    why: str
    make: Callable  # original -> replacement


def _on_cpu(factory: Callable) -> Callable:
    """Wrap the tensor factory so that it reads device="cuda" as the CPU."""

    @functools.wraps(factory)
    def wrapped(*args, **kwargs):
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return wrapped


def _type_names_cuda(original: Callable) -> Callable:
    def type_(self, *args, **kwargs):
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return type_


def _fork_cpu_generator(original: Callable) -> Callable:
    @contextlib.contextmanager
    def fork(self, name="model-parallel-rng"):
        if name not in self.states_:
            raise RuntimeError(f"rng state {name} was not added")
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)

    return fork


class _HostStream(torch.cpu.Stream):
    """A stream that does its work immediately."""

    def record_event(self) -> torch.cpu.Event:  # type: ignore[override]
        # torch's does nothing, Megatron waits for it
        return torch.cpu.Event()


def _move_to_host(original: Callable) -> Callable:
    def move(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return move


def _nothing_where_alone(original: Callable) -> Callable:
    """Wrap the collective on flat buffers: in place on a group of one rank, it does nothing."""

    def collective(output, input, *args, group=None, async_op=False, **kwargs):
        in_place = output.data_ptr() == input.data_ptr()
        if group is not None and group.size() == 1 and in_place and not async_op:
            return None
        return original(output, input, *args, group=group, async_op=async_op, **kwargs)

    return collective


def _one_group_of_the_same_ranks(original: Callable) -> Callable:
    """Wrap initialize_model_parallel and its some twenty groups: equal groups are made once."""

    @functools.wraps(original)
    def initialize(*args, **kwargs):
        from megatron.core import parallel_state

        create = parallel_state.create_group
        # every rank asks for all of them in the same order, its own or not
        groups: dict[tuple[int, ...], Any] = {}

        def create_once(ranks, **options):
            key = tuple(sorted(ranks))
            if key not in groups:
                groups[key] = create(ranks, **options)
            return groups[key]

        parallel_state.create_group = create_once
        try:
            original(*args, **kwargs)
        finally:
            parallel_state.create_group = create

    return initialize


def _gather_all_lengths(original: Callable) -> Callable:
    """Wrap the gather along the first dimension: ranks with different lengths send theirs to all
    others."""

    @functools.wraps(original)
    def gather(input_, group, output_split_sizes=None, use_global_buffer=False):
        size = group.size()
        if output_split_sizes is None or size == 1:
            return original(input_, group, output_split_sizes, use_global_buffer)
        output = input_.new_empty(sum(output_split_sizes), *input_.shape[1:])
        copies = torch.cat([input_] * size)
        torch.distributed.all_to_all_single(output, copies, output_split_sizes, [len(input_)] * size, group=group)
        return output

    return gather


def _reduce_scatter_all_lengths(original: Callable) -> Callable:
    """Wrap the reduce-scatter along the first dimension: each rank sums the parts that it
    receives."""

    @functools.wraps(original)
    def reduce_scatter(input_, group, input_split_sizes=None, use_global_buffer=False):
        size = group.size()
        if input_split_sizes is None or size == 1:
            return original(input_, group, input_split_sizes, use_global_buffer)
        length = input_split_sizes[group.rank()]
        parts = input_.new_empty(size * length, *input_.shape[1:])
        torch.distributed.all_to_all_single(parts, input_.contiguous(), [length] * size, input_split_sizes, group=group)
        return parts.view(size, length, *input_.shape[1:]).sum(0)

    return reduce_scatter


# fmt: off
ADAPTATIONS = (
    Adaptation("torch.cuda.current_device", "tensor factories: device=torch.cuda.current_device()",
               lambda original: lambda: torch.device("cpu")),
    Adaptation("torch.cuda.synchronize", "after pipeline send/receive and group creation",
               lambda original: lambda device=None: None),
    Adaptation("torch.cuda.current_stream", "gradient reduction asks for the stream it runs on (megatron-core 0.19)",
               lambda original: lambda device=None: torch.cpu.current_stream()),
    Adaptation("torch.cuda.Stream", "the dispatcher of tokens to experts copies their counts on a separate stream",
               lambda original: _HostStream),
    Adaptation("torch.cuda.stream", "the dispatcher enters that stream",
               lambda original: lambda stream: torch.cpu.stream(stream)),
    Adaptation("torch.cuda.manual_seed", "model_parallel_cuda_manual_seed seeds the generator of dropout and init",
               lambda original: lambda seed: torch.manual_seed(seed)),
    Adaptation("torch.cuda.get_rng_state", "activation recompute restores the generator",
               lambda original: lambda device="cuda": torch.get_rng_state()),
    Adaptation("torch.cuda.set_rng_state", "activation recompute restores the generator",
               lambda original: lambda state, device="cuda": torch.set_rng_state(state)),
    Adaptation("torch.zeros", "literal device='cuda' in schedules and gradient clipping", _on_cpu),
    Adaptation("torch.tensor", "literal device='cuda' in gradient clipping and the mixed-precision optimizer", _on_cpu),
    Adaptation("torch.Tensor.cuda", "tied embeddings over pipeline stages: weight.data.cuda() before their all-reduce",
               lambda original: lambda self, *args, **kwargs: self),
    Adaptation("torch.Tensor.type", "optimizers compare param.type() with 'torch.cuda.FloatTensor'", _type_names_cuda),
    Adaptation("megatron.core.tensor_parallel.random._get_cuda_rng_state", "the CPU generator plays the GPU's",
               lambda original: lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()),
    Adaptation("megatron.core.tensor_parallel.random._set_cuda_rng_state", "the CPU generator plays the GPU's",
               lambda original: lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)),
    Adaptation("megatron.core.tensor_parallel.random.CudaRNGStatesTracker.fork",
               "upstream warns on every use that the CPU generator changed: here it should", _fork_cpu_generator),
    Adaptation("megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
               "counts become the numbers that an all-to-all takes only on their way from a GPU", _move_to_host),
    Adaptation("megatron.core.tensor_parallel.mappings._gather_along_first_dim",
               "cut experts gather their ranks' tokens: gloo gathers equal lengths only", _gather_all_lengths),
    Adaptation("megatron.core.tensor_parallel.mappings._reduce_scatter_along_first_dim",
               "and sum up their outputs: gloo scatters equal lengths only", _reduce_scatter_all_lengths),
    Adaptation("megatron.core.distributed.param_and_grad_buffer.dist_reduce_scatter_func",
               "on a group of one rank gloo copies all gradients to and fro; NCCL does nothing", _nothing_where_alone),
    Adaptation("megatron.core.distributed.param_and_grad_buffer.dist_all_gather_func",
               "the same for the weights after each optimizer step", _nothing_where_alone),
    Adaptation("megatron.core.parallel_state.initialize_model_parallel",
               "each group over gloo has threads that wake a hundred times a second", _one_group_of_the_same_ranks),
)
# fmt: on


def _owner(target: str):
    path, _, name = target.rpartition(".")
    owner: Any  # a module, a class, or None
    try:
        owner = importlib.import_module(path)
    except ModuleNotFoundError:  # an attribute of a class
        module, _, cls = path.rpartition(".")
        owner = getattr(importlib.import_module(module), cls, None)
    if owner is None or not hasattr(owner, name):
        raise MovedError(f"CPU adaptation of megatron-core: `{target}` no longer exists; review its row in {__name__}")
    return owner, name


def _import_megatron_without_compiling() -> None:
    # megatron's jit_fuser is torch.compile, applied by decorators while megatron.core is imported:
    # disabling it afterwards is too late. On a CPU it would need a C++ compiler, and costs seconds.
    compile_ = torch.compile

    def compile_nothing(fn: Callable | None = None, **options: Any) -> Callable:
        return fn if fn is not None else (lambda inner: inner)

    # ignored: torch's overloads say the same of both uses
    torch.compile = compile_nothing  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # SGLang's flash_mla is in the CUDA lock. Without libcuda its import raises OSError, but
            # megatron-core tolerates only ImportError; None makes the import raise that.
            sys.modules.setdefault("flash_mla", None)  # type: ignore[arg-type]
            import megatron.core
            import megatron.core.jit
            import megatron.core.tensor_parallel.random  # the generators adapted below
            import megatron.core.transformer.moe.token_dispatcher  # noqa: F401  adapted below
    finally:
        torch.compile = compile_
    megatron.core.jit.disable_jit_fuser()


_applied = False


def apply() -> None:
    """Adapt this process, once, before megatron.core is first imported. Raises MovedError naming a
    missing target."""
    global _applied
    if _applied:
        return
    if torch.cuda.is_available():
        raise RuntimeError("the CPU adaptation of megatron-core was asked for on a machine with a GPU")
    if "megatron.core" in sys.modules:
        raise RuntimeError("prepare_megatron() must run before megatron.core is imported")
    _import_megatron_without_compiling()
    # `with torch.device(...)` lists torch's factories when it is first used: it must see torch's
    # own, or models that others build under it (transformers does) have buffers on the wrong device
    with torch.device("cpu"):
        torch.empty(0)
    for adaptation in ADAPTATIONS:
        owner, name = _owner(adaptation.target)
        setattr(owner, name, adaptation.make(getattr(owner, name)))
    _applied = True
