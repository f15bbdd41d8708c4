"""A run reduced to its checkpoints: a real process that resumes, counts,
and writes them as the trainer does."""

import hashlib
import os
import threading
import time
from pathlib import Path

from megatron_dapo.checkpointing.config_changes import config_to_plain
from megatron_dapo.checkpointing.folders import remove_leftovers
from megatron_dapo.checkpointing.resume import find_start
from megatron_dapo.checkpointing.saver import Saver
from megatron_dapo.config.schema.config import Config
from megatron_dapo.config.schema.run import TrainerConfig
from megatron_dapo.platform.agreement import SingleRank

NUM_FILES, FILE_BYTES = 5, 40_000


def weights_after(step: int) -> bytes:
    """The model of this run: each step's depends on the one before."""
    state = b"start"
    for number in range(1, step + 1):
        state = hashlib.sha256(state + str(number).encode()).digest()
    return state


class SlowWrite:
    """Tensors that a thread writes, piece by piece, while the run goes on."""

    def __init__(self, folder: Path, state: bytes, pause_s: float = 0.0005, fails: bool = False) -> None:
        (folder / "megatron").mkdir()
        self._state, self._pause_s, self._fails = state, pause_s, fails
        self._thread = threading.Thread(target=self._write, args=(folder / "megatron",), daemon=True)
        self._thread.start()

    def _write(self, folder: Path) -> None:
        for number in range(NUM_FILES):
            with (folder / f"__{number}_0.distcp").open("wb") as file:
                for _ in range(4):
                    file.write(self._state * (FILE_BYTES // 4 // len(self._state)))
                    time.sleep(self._pause_s)

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> None:
        self._thread.join()
        if self._fails:
            raise OSError("no space left on device")


def read_weights(folder: Path) -> bytes:
    parts = {path.read_bytes()[:32] for path in (folder / "megatron").iterdir()}
    assert len(parts) == 1, "files of several steps"
    return parts.pop()


def run(root: Path, log: Path, num_steps: int = 10**9) -> None:
    """Append "resumed STEP" and "saved STEP" to the log;
    a step has about a millisecond of other work."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    start = find_start(root, Config(), SingleRank())
    remove_leftovers(root)
    state = read_weights(start.folder) if start.folder else weights_after(0)
    assert state == weights_after(start.step), "the weights are not those of their step"
    os.write(output, f"resumed {start.step}\n".encode())
    saver = Saver(SingleRank(), lambda folder: [SlowWrite(folder, state)], TrainerConfig(keep_last=2, keep_every=50))
    for step in range(start.step + 1, num_steps + 1):
        state = hashlib.sha256(state + str(step).encode()).digest()
        time.sleep(0.001)
        saver.start(root / f"step_{step:06d}", trainer_state(step), lambda: {"queue": ["group"] * 50})
        if step > start.step + 1:
            # a new one is begun when the last is in its place
            os.write(output, f"saved {step - 1}\n".encode())
        saver.poll()
    saver.finish()
    os.write(output, f"saved {num_steps}\n".encode())


def trainer_state(step: int) -> dict:
    return {"step": step, "config": config_to_plain(Config())}
