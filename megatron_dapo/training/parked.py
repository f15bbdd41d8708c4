"""What leaves the GPU while servers use it: the storages of a rank's models and optimizers.

A storage loses its memory and gets it back; tensors and their views stay as they are. So Megatron's
buffers, its views of them and tied weights need no other treatment. To read a parked tensor ends
the process.
"""

import gc
import mmap
import os
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.key_names import MEGATRON
from megatron_dapo.models.build import ModelParts
from megatron_dapo.platform.cpu_ledger import ledger_of
from megatron_dapo.platform.device import free_cached_memory, is_gpu
from megatron_dapo.training.optimizer import TrainingState

_HOLDER = "trainer"
WEIGHTS = "weights"  # trained and frozen ones, and Megatron's buffers of them
_GRADIENTS = "gradients"  # Megatron's buffers of gradients
STATES = "optimizer states"  # main weights, moments, and all its other tensors on the device
_KINDS = (WEIGHTS, _GRADIENTS, STATES)  # in the order of their return
# an optimizer's parts refer to these, which are not its own
_BEYOND_OPTIMIZER = (torch.nn.Module, FunctionType, ModuleType, type)


class Role(Protocol):
    """A policy, critic or reference; a trained one has a `state`, too."""

    @property
    def model(self) -> ModelParts: ...


def holdings(role: Role) -> dict[str, dict[str, Tensor]]:
    """Return the model's present tensors on the GPU: kind -> name for errors -> tensor.

    Several may share a storage. The first optimizer step makes Adam's moments.
    """
    weights = {
        f"{name} of chunk {number}": parameter
        for number, chunk in enumerate(role.model.chunks)
        for name, parameter in chunk.named_parameters()
    }
    state: TrainingState | None = getattr(role, "state", None)
    if state is None:
        return {WEIGHTS: weights}
    gradients = {}
    for number, buffer in enumerate(_buffers(state)):
        gradients[f"gradient buffer {number}"] = buffer.grad_data
        if buffer.param_data is not None:  # only the distributed optimizer has one
            weights[f"weight buffer {number}"] = buffer.param_data
    others = {tensor.untyped_storage() for tensor in (*weights.values(), *gradients.values())}
    device = next(iter(weights.values())).device
    states = {
        f"optimizer tensor {number} of shape {list(tensor.shape)}": tensor
        for number, tensor in enumerate(_reachable_tensors(state.optimizer))
        if tensor.device == device and tensor.untyped_storage() not in others
    }
    return {WEIGHTS: weights, _GRADIENTS: gradients, STATES: states}


def _buffers(state: TrainingState) -> list[Any]:
    """Return Megatron's buffers of weights and gradients, those of experts too."""
    return [buffer for stage in state.stages for buffer in (*stage.buffers, *stage.expert_parallel_buffers)]


def _reachable_tensors(optimizer: object) -> Iterator[Tensor]:
    """Yield all tensors of an optimizer, through any objects of its own.

    So none is forgotten, whatever Megatron's line and kind of optimizer call it.
    """
    seen, waiting = {id(optimizer)}, [optimizer]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, Tensor):
            yield thing
        for referent in gc.get_referents(thing):
            if id(referent) not in seen and not isinstance(referent, _BEYOND_OPTIMIZER):
                seen.add(id(referent))
                waiting.append(referent)


class Parked:
    """Moves a rank's models between its GPU and the host.

    The step's order is `park_states`, `park_weights`, `restore`. A call repeated, or for something
    absent, does nothing.

    params, optimizer: whether weights, and states of the optimizer, leave the GPU at all.
    num_bytes: copied by the last call.
    """

    def __init__(self, roles: Iterable[Role | None], *, params: bool, optimizer: bool) -> None:
        self.num_bytes = 0
        self._roles = [role for role in roles if role is not None]
        self._moves_params = params
        self._moves_optimizer = optimizer
        self._copies: WeakKeyDictionary[UntypedStorage, Tensor] = WeakKeyDictionary()
        self._away: dict[str, dict[UntypedStorage, int]] = {kind: {} for kind in _KINDS}
        self._ledger = None if is_gpu() else ledger_of(int(os.environ.get("LOCAL_RANK", "0")))
        self._booked = dict.fromkeys(_KINDS, 0)
        self._book()

    def park_states(self) -> None:
        """Free the gradients, and move the optimizer's states to the host."""
        self.num_bytes = 0
        for role in self._roles:
            if state := getattr(role, "state", None):
                state.optimizer.zero_grad()  # it holds views of gradients, perhaps copies
        self._park(_GRADIENTS)
        if self._moves_optimizer:
            self._park(STATES)
        free_cached_memory()

    def park_weights(self) -> None:
        """Move the weights to the host."""
        self.num_bytes = 0
        if self._moves_params:
            self._park(WEIGHTS)
        free_cached_memory()

    def restore(self) -> None:
        """Bring everything back; gradients are zero."""
        self.num_bytes = 0
        for kind, away in self._away.items():
            if away and self._ledger is not None:
                self._ledger.take(_HOLDER, sum(away.values()), kind)
                self._booked[kind] += sum(away.values())
            for storage, size in away.items():
                storage.resize_(size)
                if kind == _GRADIENTS:
                    _bytes(storage).zero_()
                else:
                    _bytes(storage).copy_(self._copies[storage], non_blocking=True)
                    self.num_bytes += size
            away.clear()
        _wait_for_copies()

    def needed_bytes(self) -> int:
        """Return the bytes that `restore` takes of the GPU."""
        return sum(sum(away.values()) for away in self._away.values())

    def _park(self, kind: str) -> None:
        resident = {storage: name for storage, name in self._find()[kind].items() if storage.nbytes()}
        for storage, name in resident.items():
            is_shared = not storage.is_cuda and storage.is_shared()  # of CUDA's torch calls all shared
            assert storage.resizable() and not is_shared, f"{name} shares its memory and cannot leave the GPU"
        if kind != _GRADIENTS:
            self._copy_to_host(list(resident))
        for storage in resident:
            self._away[kind][storage] = storage.nbytes()
            storage.resize_(0)
        self._book()

    def _copy_to_host(self, storages: list[UntypedStorage]) -> None:
        new = [storage for storage in storages if storage not in self._copies]
        parts = _host_memory(sum(storage.nbytes() for storage in new)).split([storage.nbytes() for storage in new])
        self._copies.update(zip(new, parts, strict=True))
        for storage in storages:
            self._copies[storage].copy_(_bytes(storage), non_blocking=True)
            self.num_bytes += storage.nbytes()
        _wait_for_copies()

    def _find(self) -> dict[str, dict[UntypedStorage, str]]:
        """Return each kind's storages with a name, each once."""
        by_kind: dict[str, dict[UntypedStorage, str]] = {kind: {} for kind in _KINDS}
        for role in self._roles:
            for kind, tensors in holdings(role).items():
                for name, tensor in tensors.items():
                    by_kind[kind].setdefault(tensor.untyped_storage(), f"{name} ({type(role).__name__})")
        return by_kind

    def _book(self) -> None:
        """Have the CPU's ledger show what is held now, and was made since the last call."""
        if self._ledger is None:
            return
        for kind, storages in self._find().items():
            change = sum(storage.nbytes() for storage in storages) - self._booked[kind]
            if change > 0:
                self._ledger.take(_HOLDER, change, kind)
            elif change < 0:
                self._ledger.give(_HOLDER, -change, kind)
            self._booked[kind] += change


def _bytes(storage: UntypedStorage) -> Tensor:
    """Return a storage's bytes, [n] uint8, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait_for_copies() -> None:
    if is_gpu():
        torch.cuda.synchronize()


def _host_memory(num_bytes: int) -> Tensor:
    """Return host memory, [n] uint8, pinned for a GPU.

    torch's pinned memory has a power of two as its size: up to twice as much.
    """
    if not num_bytes or not is_gpu():
        return torch.empty(num_bytes, dtype=torch.uint8)
    cudart: Any = torch.cuda.cudart()
    try:
        memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
    except (OSError, torch.cuda.CudaError) as error:
        raise UserError(
            f"{MEGATRON}.param_offload and .optimizer_offload need {num_bytes / 1e9:.1f} GB more pinned memory on this "
            f"host, which refuses it ({error}); give the run more host memory, or set one of them to false."
        ) from error
    return memory
