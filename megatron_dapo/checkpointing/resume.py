"""Chooses the checkpoint to resume from: the newest whole one; checks whether this config may
resume it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dapo.checkpointing.config_changes import check_changes, config_changes, matters
from megatron_dapo.checkpointing.folders import TRAINER_STATE, newest_first, read_trainer_state
from megatron_dapo.checkpointing.manifest import Findings, compare_contents, compare_sizes, read_manifest
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.derived import uses_critic
from megatron_dapo.config.schema.config import Config

if TYPE_CHECKING:  # it imports torch; `likely_start` runs before a run starts
    from megatron_dapo.platform.agreement import Agreement

# parts of a training checkpoint, by their names in the manifest
CONTENTS = ("model", "optimizer", "lr_schedule", "rng", "counters", "controller")
# allowed by `trainer.accept_missing`: without the optimizer's state its schedule and generators
# mean nothing
_ALLOWS = {"optimizer": ("optimizer", "lr_schedule", "rng"), "controller": ("controller",), "critic": ("critic",)}
_NAMED_FAULTS = 3


def contents_of(config: Config) -> tuple[str, ...]:
    """Return the parts of this run's checkpoints. critic: its model, optimizer and schedule."""
    return (*CONTENTS, "critic") if uses_critic(config) else CONTENTS


@dataclass(frozen=True)
class Start:
    """The start of a run."""

    folder: Path | None = None
    """The checkpoint; None: step 0, from the model's own weights."""
    step: int = 0
    """Finished rollout steps."""
    state: dict[str, Any] = field(default_factory=dict)
    """Its trainer.json."""
    missing: tuple[str, ...] = ()
    """Parts that the checkpoint lacks, as `trainer.accept_missing` allows."""
    unused: tuple[str, ...] = ()
    """Parts of the checkpoint that this run does not have."""
    notes: tuple[str, ...] = ()
    """Lines for the report: skipped checkpoints, differences."""


def find_start(root: Path, config: Config, agreement: "Agreement") -> Start:
    """Choose among the checkpoints in root by `trainer.resume`, the same on all ranks. Collective:
    all files of the chosen checkpoint are read, each by one rank.

    - auto: the newest whole one; without any checkpoint, the beginning. If there are some and none
      is whole, the run does not begin anew: UserError names each with its fault.
    - required: UserError if there is none.
    - never: the beginning; UserError if there are some, since two runs' checkpoints would mix.

    UserError too if an important config key changed, or a part is missing that was not allowed.
    Each on all ranks.
    """
    what = f"choosing a checkpoint in {root}"
    skipped: list[str] = []
    for folder in agreement.leader(what, _candidates, root, config):
        findings = verify_on_all_ranks(folder, agreement)
        if findings.is_whole:
            return agreement.leader(what, _checked, folder, findings, skipped, config)
        skipped.append(f"{folder.name}: {_faults(findings)}")
    return _beginning(root, skipped)


def likely_start(root: Path, config: Config) -> Start:
    """Return a run's start, judged quickly by file sizes; raise UserError like `find_start`. One
    process may call it before the run."""
    skipped: list[str] = []
    for folder in _candidates(root, config):
        findings, files = compare_sizes(folder)
        state = {name: record for name, record in files.items() if name == TRAINER_STATE}
        findings = findings.with_damage(compare_contents(folder, state))
        if findings.is_whole:
            return _checked(folder, findings, skipped, config)
        skipped.append(f"{folder.name}: {_faults(findings)}")
    return _beginning(root, skipped)


def _beginning(root: Path, skipped: list[str]) -> Start:
    """Return the start at step 0. Raises UserError if there are checkpoints, none of them whole."""
    if skipped:
        raise UserError(
            [
                f"{root} holds no whole checkpoint, and the run does not start anew by itself; bring one of "
                f"these back from a copy, or move them away to start at step 0:",
                *skipped,
            ]
        )
    return Start()


def verify_on_all_ranks(folder: Path, agreement: "Agreement") -> Findings:
    """Return the result of `verify` on all ranks: each reads its share of the bytes. Collective."""
    what = f"reading {folder}"
    findings, files = agreement.leader(what, compare_sizes, folder)
    largest_first = sorted(files, key=lambda name: files[name].size, reverse=True)
    share = {name: files[name] for name in largest_first[agreement.rank :: agreement.size]}
    parts = agreement.all(what, compare_contents, folder, share)
    return findings.with_damage(sorted(phrase for part in parts for phrase in part))


def _candidates(root: Path, config: Config) -> list[Path]:
    """Return the checkpoints that may be taken, the newest first."""
    resume = config.trainer.resume
    folders = newest_first(root)
    if resume == "never" and folders:
        raise UserError(
            f"trainer.resume is never, but {root} holds checkpoints (the newest is {folders[0].name}), and a new run's "
            f"would mix with them; choose another trainer.run_dir, move them away, or set resume to auto."
        )
    if resume == "required" and not folders:
        raise UserError(
            f"trainer.resume is required, but {root} holds no checkpoint; correct trainer.run_dir, or set it to auto."
        )
    return folders


def _checked(folder: Path, findings: Findings, skipped: list[str], config: Config) -> Start:
    """Return the start from a whole checkpoint. Raises UserError if this config may not resume
    it."""
    trainer = config.trainer
    contents = read_manifest(folder).contents
    wanted = contents_of(config)
    missing = tuple(part for part in wanted if part not in contents)
    unused = tuple(part for part in contents if part not in wanted)
    allowed = {part for name in trainer.accept_missing for part in _ALLOWS[name]}
    not_allowed = [part for part in missing if part not in allowed]
    if not_allowed:
        raise UserError(
            f"{folder} has no {', '.join(not_allowed)} (it holds {', '.join(contents)}); resume from a training "
            f"checkpoint{_cure(not_allowed)}."
        )
    state = read_trainer_state(folder)
    changes = config_changes(state["config"], config)
    check_changes(changes, config, trainer.accept_changes, folder.name)
    notes = [f"skipped {text}" for text in skipped]
    notes += [f"changed {change}{' (accepted)' if matters(change, config) else ''}" for change in changes]
    notes += [f"not in its manifest: {name}" for name in findings.extra]
    return Start(folder, state["step"], state, missing, unused, tuple(notes))


def _cure(parts: list[str]) -> str:
    """Return the cure for the missing parts as the end of a sentence, or "" if no key allows it."""
    names = [name for name, allowed in _ALLOWS.items() if set(allowed) & set(parts)]
    if not set(parts) <= {part for name in names for part in _ALLOWS[name]}:
        return ""
    return f", or allow it with trainer.accept_missing=[{', '.join(names)}]"


def _faults(findings: Findings) -> str:
    more = len(findings.damage) - _NAMED_FAULTS
    return "; ".join(findings.damage[:_NAMED_FAULTS]) + (f"; and {more} more" if more > 0 else "")


def not_kept(config: Config) -> list[str]:
    """Return the run's state that no checkpoint holds; a line each for the report."""
    megatron = config.actor_rollout_ref.actor.megatron
    if megatron.fp8 == "none" or megatron.fp8_recipe != "delayed":
        return []
    return [
        "FP8 scaling history: no checkpoint holds it; delayed scaling starts anew, and the next steps round differently"
    ]


def report_lines(start: Start, restored: list[str], not_restored: list[str]) -> list[str]:
    """Return the user's report of a resume: one line each, the folder first."""
    lines = [f"Resumed after step {start.step} from {start.folder}"]
    lines += [f"  restored: {', '.join(restored)}"]
    lines += [f"  not restored: {text}" for text in not_restored] or ["  not restored: nothing is missing"]
    return lines + [f"  {note}" for note in start.notes]
