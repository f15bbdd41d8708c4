"""One rank's files of a checkpoint, and the completion of the folder."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_dapo.common.files import flush_to_disk

FILE_BYTES = 2**28  # about; a tensor is never cut

# Megatron's mark of a complete checkpoint
MARK = "metadata.json"
TORCH_DIST = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class RankFilesWriter(FileSystemWriter):
    """Writes this rank's slices into several files: torch keeps copies of a file's tensors until
    the file ends."""

    def __init__(self, folder: Path, rank: int, num_ranks: int) -> None:
        # no copying ahead on another stream: a forked process must not touch the GPU
        super().__init__(folder, per_thread_copy_ahead=0)
        self._folder = folder
        self._first_file = rank
        self._num_ranks = num_ranks

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write files of about FILE_BYTES each, flushed to the disk.

        A file's name is its number: the rank plus a multiple of the number of ranks.
        """
        parts = list(_parts(plan.items))
        numbered = self.prepare_global_plan([plan] * (len(parts) * self._num_ranks))
        results: list[WriteResult] = []
        for file, items in zip(numbered[self._first_file :: self._num_ranks], parts, strict=True):
            results += super().write_data(replace(file, items=items), planner).wait()
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index of all ranks' tensors, then Megatron's mark. results: of every rank's
        `write_data`."""
        super().finish(metadata, results)
        (self._folder / MARK).write_text(json.dumps(TORCH_DIST), encoding="utf-8")
        small_files = [path for path in self._folder.iterdir() if path.suffix != ".distcp"]
        for path in (*small_files, self._folder):
            flush_to_disk(path)


def _parts(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    """Yield each file's items; at least one file, which may be empty."""
    part: list[WriteItem] = []
    size = 0
    for item in items:
        if size > FILE_BYTES:
            yield part
            part = []
            size = 0
        part.append(item)
        size += _num_bytes(item)
    yield part


def _num_bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
