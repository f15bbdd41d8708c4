"""The one place that knows the file names of a run folder."""

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.schema.run import TrainerConfig
from megatron_dapo.storage.model_folder import ADAPTER


@dataclass(frozen=True)
class RunFolder:
    """runs/NAME/{config.yaml, metrics.jsonl, tensorboard/, rollouts/, validation/, batches/,
    checkpoints/, model/, logs/}, and the files with which the processes and the report communicate.
    """

    path: Path
    log_dir: Path | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    @classmethod
    def of(cls, trainer: TrainerConfig) -> "RunFolder":
        """Return the folder `trainer.run_dir`, by default runs/EXPERIMENT_NAME, with
        `trainer.log_dir`."""
        return cls(
            Path(trainer.run_dir or Path("runs") / trainer.experiment_name),
            Path(trainer.log_dir) if trainer.log_dir else None,
        )

    @classmethod
    def holding(cls, model: str | Path) -> "RunFolder | None":
        """Return the run folder of a trained model or checkpoint, or None."""
        path = Path(model).resolve()
        for run in (cls(path.parent), cls(path.parents[1])):
            if path in (run.model, run.checkpoints / path.name) and run.config.is_file():
                return run
        return None

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def machine(self) -> Path:
        """Return the path of the run's hardware; see `telemetry.machine`."""
        return self.path / "machine.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def batches(self) -> Path:
        """Return the folder of finished batches (`trainer.dump_batches`); see `batch_file`."""
        return self.path / "batches"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """Return the folder of the trained model, a Hugging Face checkpoint."""
        return self.path / "model"

    @property
    def adapter(self) -> Path:
        """Return the folder of the trained adapters (LoRA), as PEFT writes it."""
        return self.path / ADAPTER

    @property
    def written(self) -> tuple[Path, ...]:
        """Return the folders whose content a run replaces, moves or deletes."""
        parts = (self.tensorboard, self.rollouts, self.batches, self.validation(0).parent, self.checkpoints)
        return (*parts, self.model, self.adapter, self.ends, self.path / "logs")

    @property
    def logs(self) -> Path:
        return self.log_dir or self.path / "logs"

    @property
    def report(self) -> Path:
        """Return the path of the page about the run that a demo makes."""
        return self.path / "report.html"

    @property
    def stop(self) -> Path:
        """Return the path of the file that a user makes to have the run saved and stopped, at the
        latest when its step ends."""
        return self.path / "stop"

    @property
    def ends(self) -> Path:
        """Return the folder of the records of how each process of the run ended; see
        `common.ends`."""
        return self.path / "ends"

    @property
    def server_key(self) -> Path:
        """Return the path of the key of the run's own servers. Only its owner may read it; it is
        kept as long as the run."""
        return self.path / ".server_key"

    @property
    def lock(self) -> Path:
        """Return the path of the lock of the active run."""
        return self.path / ".lock"

    @property
    def lease(self) -> Path:
        """Return the folder that says who has the GPUs of a run with `hybrid_engine`; see
        `storage.lease`."""
        return self.path / "lease"

    @property
    def ledger(self) -> Path:
        """Return the folder of the accounts of imagined GPUs, in a run with `hybrid_engine` on a
        CPU."""
        return self.path / "ledger"

    @property
    def server_starts(self) -> Path:
        """Return the folder in which the nodes of servers over several nodes agree on starts, one
        folder per server; see `servers.several_nodes.start_orders`."""
        return self.path / "server_starts"

    def logger_id(self, logger: str) -> Path:
        """Return the path of the run's id at a service of `trainer.logger`."""
        return self.path / f"{logger}_id"

    def unresponsive(self, url: str) -> Path:
        """Return the path of the note that tells a server's supervisor that the server did not
        answer."""
        return self.path / "unresponsive_servers" / re.sub(r"[^\w.-]+", "_", url.partition("://")[2])

    def rollout(self, step: int) -> Path:
        """Return the path of the sample responses of one rollout step."""
        return self.rollouts / f"step_{step:06d}.jsonl"

    def rollout_tokens(self, step: int) -> Path:
        """Return the path of the responses' token data; see `data.token_dump`."""
        return self.rollouts / f"step_{step:06d}.npz"

    def validation(self, step: int) -> Path:
        """Return the path of all answers to the held-out prompts by the weights after `step`
        rollout steps."""
        return self.path / "validation" / f"step_{step:06d}.jsonl"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def log(self, process: str) -> Path:
        """Return the path of the output of one process, e.g. `log("server-0")`."""
        return self.logs / f"{process}.log"

    def create(self) -> "RunFolder":
        """Make the folder and its subfolders; existing ones stay. Raises UserError if they are not
        writable."""
        for folder in (self.path, self.tensorboard, self.rollouts, self.checkpoints):
            make_folder(folder, "trainer.run_dir")
        make_folder(self.logs, "trainer.log_dir" if self.log_dir else "trainer.run_dir")
        return self


def make_folder(folder: Path, key: str) -> Path:
    """Return the folder, made if it is missing. Raises UserError, naming the key to change, if that
    fails or the folder is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UserError(f"{folder} cannot be made or written ({error.strerror}); choose another {key}.") from error
    return folder


def batch_file(batches: str | Path, step: int) -> Path:
    """Return the path of a rollout step's batch in a folder of finished batches."""
    return Path(batches) / f"step_{step:06d}.json.gz"


def rollout_steps(rollouts: str | Path) -> list[int]:
    """Return the rollout steps with sample responses in a folder, ascending."""
    names = (re.fullmatch(r"step_(\d{6,})\.jsonl", path.name) for path in Path(rollouts).glob("step_*.jsonl"))
    return sorted(int(name[1]) for name in names if name)


def batch_steps(batches: str | Path) -> list[int]:
    """Return the rollout steps with a batch in a folder, ascending; [] without the folder."""
    names = (re.fullmatch(r"step_(\d{6,})\.json\.gz", path.name) for path in Path(batches).glob("step_*.json.gz"))
    return sorted(int(name[1]) for name in names if name)
