"""Tensors that a server takes in pairs alone, although they may come one by one."""

from collections.abc import Iterable, Iterator

from torch import Tensor


class PairedTensors:
    """Holds the first of two modules' weights of a layer back until the other one has come, in a later call too.

    modules: the last names of the two.
    """

    def __init__(self, *modules: str) -> None:
        self._other = dict(zip(modules, modules[::-1], strict=True))
        self._waiting: dict[str, Tensor] = {}

    def __call__(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield what has come, both of a pair one after the other. What waits is copied: its buffer is used again."""
        for name, tensor in tensors:
            other = self._other_name(name)
            if other is None:
                yield name, tensor
            elif other in self._waiting:
                yield other, self._waiting.pop(other)
                yield name, tensor
            else:
                self._waiting[name] = tensor.clone()

    def _other_name(self, name: str) -> str | None:
        before, module, kind = ["", "", *name.rsplit(".", 2)][-3:]
        return f"{before}.{self._other[module]}.{kind}" if module in self._other else None
