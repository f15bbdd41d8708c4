"""The checkpoints of a training run, for its loop: the start, the saves, the stop."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dapo.algorithms.kl import FixedKLController
from megatron_dapo.checkpointing.checkpoint_hook import load_hook
from megatron_dapo.checkpointing.config_changes import config_hash, config_to_plain
from megatron_dapo.checkpointing.earlier_run import remove_later_dumps, set_aside
from megatron_dapo.checkpointing.folders import add_controller_state, read_controller_state, remove_leftovers
from megatron_dapo.checkpointing.pending_save import PendingSave
from megatron_dapo.checkpointing.resume import Start, contents_of, find_start, not_kept, report_lines
from megatron_dapo.checkpointing.rollout_state import Rollout, restore_rollout
from megatron_dapo.checkpointing.saver import Saver
from megatron_dapo.checkpointing.stop import StopRequest
from megatron_dapo.checkpointing.torch_dist.loading import load
from megatron_dapo.checkpointing.torch_dist.saving import save
from megatron_dapo.common.standard_streams import print_line
from megatron_dapo.config.schema.config import Config
from megatron_dapo.models.build import ModelParts
from megatron_dapo.models.hf_io import copy_model_files, export_hf
from megatron_dapo.models.peft_folder import export_adapters
from megatron_dapo.platform.agreement import Agreement
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.storage.model_folder import ADAPTER, HF, ModelFolder
from megatron_dapo.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


@dataclass(frozen=True)
class TrainedModel:
    """A model with its optimizer. folder: the name of its part of a checkpoint."""

    folder: str
    model: ModelParts
    optimizer: "MegatronOptimizer"
    lr_schedule: "OptimizerParamScheduler"


@dataclass(frozen=True)
class Trained:
    """The content of a checkpoint."""

    policy: TrainedModel
    critic: TrainedModel | None
    """None without a critic."""
    kl_controller: FixedKLController | None
    """None in a fine-tuning run; every other run has one."""
    rollout: Rollout | None
    """The source of samples or conversations; on rank 0, None elsewhere."""


def choose_start(config: Config, run: RunFolder, agreement: Agreement) -> Start:
    """Return the start of the run, the same on all ranks, before anything is built.

    See `resume.find_start`.

    Removes a killed run's unfinished folders, and sets aside files that would mix with this run.
    Collective over all ranks. Raises UserError on all.
    """
    start = find_start(run.checkpoints, config, agreement)
    agreement.leader(f"tidying {run.checkpoints}", remove_leftovers, run.checkpoints)
    notice = agreement.leader(f"tidying {run.path}", _put_earlier_run_aside, run, start)
    if notice and agreement.rank == 0:
        print_line(notice)
    return start


def _put_earlier_run_aside(run: RunFolder, start: Start) -> str:
    """Move or remove an earlier run's files; return a sentence for the user, or ""."""
    if start.folder is None:
        earlier = set_aside(run)
        return f"{run.path} held an earlier run without a checkpoint; it is now in {earlier}" if earlier else ""
    steps = remove_later_dumps(run, start.step)
    return f"Removed the samples and batches of steps {steps[0]} to {steps[-1]}, after the checkpoint" if steps else ""


class RunCheckpoints:
    """Saves and restores a run. Every method is collective over all ranks.

    Enter it around the loop and `finish`: it then receives requests to stop.
    """

    def __init__(self, config: Config, run: RunFolder, layout: ParallelLayout, trained: Trained, start: Start) -> None:
        self._config = config
        self._run = run
        self._layout = layout
        self._trained = trained
        self._start = start
        hook = load_hook(config.trainer.checkpoint_hook, self._report)
        self._saver = Saver(layout.agreement, self._write_tensors, config.trainer, contents_of(config), hook)
        self._stop = StopRequest(run.stop, layout.agreement)
        self._num_optimizer_steps = start.state.get("num_optimizer_steps", 0)
        self._saved: int | None = None

    def restore(self) -> int:
        """Restore the state of the checkpoint; return the number of finished rollout steps.

        Raises UserError on all ranks, naming the parts that do not fit. Reports to the user which
        parts were restored.
        """
        start = self._start
        if start.folder is None:
            return 0
        restored, not_restored = self._restore_tensors(start.folder)
        not_restored += [f"{part}: this run has none" for part in start.unused] + not_kept(self._config)
        restored.append(f"{self._num_optimizer_steps} optimizer steps")
        if self._trained.kl_controller is not None:
            self._trained.kl_controller.load_state_dict(start.state["kl_controller"])
            restored += [f"weight version {start.step}", "KL controller"]
        if "controller" in start.missing:
            not_restored.append("prompt cursor and groups that waited: not in the checkpoint (accepted)")
        else:
            what = f"restoring the rollout from {start.folder}"
            done, not_done = self._layout.agreement.leader(what, self._restore_rollout, start.folder)
            restored += done
            not_restored += not_done
        if self._layout.rank == 0:
            self._report(report_lines(start, restored, not_restored))
        return start.step

    def after_step(self, step: int, num_optimizer_steps: int) -> bool:
        """Save when due, and return whether the run was asked to stop; then everything is saved.

        Raises JobError on all ranks if the last checkpoint could not be written.
        """
        self._num_optimizer_steps += num_optimizer_steps
        self._saver.poll()
        trainer = self._config.trainer
        is_last = step == trainer.total_training_steps
        asked_by = None if is_last else self._stop.received()
        if asked_by:
            self._halt_rollout()
        if asked_by or (trainer.save_interval > 0 and (is_last or step % trainer.save_interval == 0)):
            self._save(step)
        if is_last:
            self._stop.accept()  # it stops by itself
        if asked_by:
            self._saver.finish()
            self._accept_stop(step, asked_by)
        return bool(asked_by)

    def poll(self) -> None:
        """Continue the checkpoint under way as far as it is ready. Raises JobError like
        `after_step`."""
        self._saver.poll()

    def is_asked_to_stop(self) -> bool:
        """Return whether this rank was. Not collective."""
        return self._stop.local_request() is not None

    def rescue(self, step: int, num_optimizer_steps: int = 0, was_handed: bool = False) -> bool:
        """Save before a run ends in the middle of a step.

        The last finished step is saved or, if its save is done or under way, the samples since
        then.

        Args:
            step: the last finished one.
            num_optimizer_steps: of that step, if `after_step` did not get them.
            was_handed: whether the next step's groups have left the rollout untrained; the run then
                cannot end as asked.

        Returns:
            Whether the run was asked to stop, and so ends as asked.

        Raises:
            JobError: on all ranks.
        """
        asked_by = None if was_handed else self._stop.received()
        if asked_by:
            self._halt_rollout()
        is_saved = step == self._saved or (self._start.folder is not None and step == self._start.step)
        if is_saved:
            self._saver.finish()
            if not was_handed:
                self._layout.agreement.leader(f"adding to {self._run.checkpoint(step)}", self._add_rollout, step)
        elif step > 0 or asked_by:  # else there are only the model's own weights
            self._num_optimizer_steps += num_optimizer_steps
            self._save(step)
            if self._layout.rank == 0 and not asked_by:
                self._report([f"Step {step} is saved in {self._run.checkpoint(step)}: the run fails"])
            self._saver.finish()
        if asked_by:
            self._accept_stop(step, asked_by)
        return asked_by is not None

    def finish(self) -> None:
        """Wait until the checkpoint under way is published. Raises JobError on all ranks."""
        self._saver.finish()

    def __enter__(self) -> "RunCheckpoints":
        self._stop.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.__exit__()

    def _halt_rollout(self) -> None:
        """End sampling, so that unfinished answers are saved too."""
        self._layout.agreement.leader("halting the rollout", lambda: self._rollout.halt())

    def _add_rollout(self, step: int) -> None:
        add_controller_state(self._run.checkpoint(step), self._rollout.state_dict())

    def _accept_stop(self, step: int, asked_by: str) -> None:
        self._stop.accept()
        if self._layout.rank == 0:
            self._report([f"Stopped after step {step} by {asked_by}; saved in {self._run.checkpoint(step)}"])

    def _save(self, step: int) -> None:
        state = {
            "step": step,
            "weight_version": step,
            "num_optimizer_steps": self._num_optimizer_steps,
            **self._kl_state(),
            "layout": {
                size: getattr(self._layout, size)
                for size in ("world_size", "tp", "pp", "vpp", "cp", "dp", "ep", "etp", "sp")
            },
            "config_hash": config_hash(self._config),
            "config": config_to_plain(self._config),
        }
        self._saver.start(self._run.checkpoint(step), state, lambda: self._rollout.state_dict())
        self._saved = step
        if not self._config.trainer.async_save:
            self._saver.finish()

    def _kl_state(self) -> dict:
        controller = self._trained.kl_controller
        return {} if controller is None else {"kl_controller": controller.state_dict()}

    def _write_tensors(self, folder: Path) -> list[PendingSave]:
        """Begin to write all models; see `Saver`."""
        source = ModelFolder.of(self._config.actor_rollout_ref.model.path).hf
        if self._config.trainer.save_hf:
            export_hf(self._trained.policy.model, self._layout, source, folder / HF)
        else:
            self._layout.agreement.leader(f"writing {folder / HF}", _copy_model_files, source, folder / HF)
        model = self._trained.policy.model
        if model.lora is not None:
            export_adapters(model, self._layout, str(source), folder / ADAPTER)
        models = [self._trained.policy]
        if self._trained.critic is not None:
            models.append(self._trained.critic)
        return [self._write_model(part, folder / part.folder) for part in models]

    def _write_model(self, part: TrainedModel, folder: Path) -> PendingSave:
        return save(
            folder,
            part.model,
            self._layout,
            optimizer=part.optimizer,
            lr_schedule=part.lr_schedule,
            background=self._config.trainer.async_save,
        )

    def _restore_tensors(self, folder: Path) -> tuple[list[str], list[str]]:
        """Return (restored, not restored), in words."""
        critic = self._trained.critic
        num_steps = self._start.step - self._config.trainer.critic_warmup
        restored, not_restored = self._restore_model(self._trained.policy, folder, max(0, num_steps))
        if critic is not None and "critic" in self._start.missing:
            not_restored.append("critic: not in the checkpoint (accepted); it starts anew")
        elif critic is not None:
            parts, notes = self._restore_model(critic, folder, self._start.step)
            restored += [f"critic's {part}" for part in parts if part != "rng"]
            not_restored += [f"critic's {note}" for note in notes if not note.startswith("rng")]
        return restored, not_restored

    def _restore_model(self, part: TrainedModel, checkpoint: Path, num_steps: int) -> tuple[list[str], list[str]]:
        """Return (restored, not restored). num_steps: for the learning rate, if the checkpoint has
        none."""
        folder = checkpoint / part.folder
        adapters = part.model.lora is not None
        if "optimizer" in self._start.missing:
            report = load(folder, part.model, self._layout, adapters=adapters)
            part.optimizer.reload_model_params()
            part.lr_schedule.step(increment=num_steps)
            lost = "optimizer and generators: not in the checkpoint (accepted); they start anew"
            return [*report.restored, "learning rate"], [*report.not_restored, lost]
        training = dict(optimizer=part.optimizer, lr_schedule=part.lr_schedule)
        report = load(folder, part.model, self._layout, **training, adapters=adapters)
        return list(report.restored), list(report.not_restored)

    def _restore_rollout(self, checkpoint: Path) -> tuple[list[str], list[str]]:
        may_begin_anew = "controller" in self._config.trainer.accept_missing
        return restore_rollout(self._rollout, read_controller_state(checkpoint), may_begin_anew)

    @property
    def _rollout(self) -> Rollout:
        """Return the rollout. Only rank 0 asks for it."""
        assert self._trained.rollout is not None, "rank 0 has the rollout"
        return self._trained.rollout

    def _report(self, lines: Sequence[str]) -> None:
        print_line("\n".join(lines))
        with suppress(OSError), self._run.log("checkpoints").open("a", encoding="utf-8") as log:
            # said already
            log.write("\n".join(lines) + "\n")


def _copy_model_files(source: Path, out: Path) -> None:
    out.mkdir(exist_ok=True)
    copy_model_files(source, out)
