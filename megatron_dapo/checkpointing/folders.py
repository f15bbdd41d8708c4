"""The folders of checkpoints: their content, how one appears (by rename, complete), and how old
ones go.

step_000012/            a checkpoint: it got this name after its manifest
.staging_step_000012/   one being written, or left by a killed process
.retired_step_000012/   one being deleted: a partial folder never has a checkpoint's name
"""

import json
import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron_dapo.checkpointing.manifest import MANIFEST, file_names, read_manifest, seal, write_manifest
from megatron_dapo.checkpointing.state_file import SUFFIX, read_state, write_state
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import publish_folder, remove_folder, write_whole

log = logging.getLogger(__name__)

TRAINER_STATE = "trainer.json"
CONTROLLER_STATE = f"controller{SUFFIX}"
_LATER_STATE = re.compile(rf"controller\.(\d+){re.escape(SUFFIX)}")

_STEP = re.compile(r"step_(\d{6,})")
_STAGING = ".staging_"
_RETIRED = ".retired_"


def step_of(folder: Path) -> int | None:
    """Return the rollout step in a checkpoint's name; none for other names."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def newest_first(root: Path) -> list[Path]:
    """Return the checkpoints of a run, by name only; the manifest tells whether one is whole."""
    steps = _steps(root)
    return sorted(steps, key=lambda path: steps[path], reverse=True)


def _steps(root: Path) -> dict[Path, int]:
    """Return the step of every checkpoint in `root`."""
    steps = {}
    for path in root.iterdir() if root.is_dir() else ():
        step = step_of(path)
        if step is not None and path.is_dir():
            steps[path] = step
    return steps


def staging(final: Path) -> Path:
    """Make an empty hidden folder beside `final`, to write into; leftovers of an earlier attempt
    are removed."""
    staged = final.with_name(_STAGING + final.name)
    remove_folder(staged)
    staged.mkdir(parents=True)
    return staged


def publish(staged: Path, final: Path) -> None:
    """Give a complete folder with a manifest its final name. An existing folder of that name is
    moved aside, and deleted after the new one is in place."""
    assert (staged / MANIFEST).is_file(), f"{staged} has no manifest"
    old = final.with_name(_RETIRED + final.name)
    publish_folder(staged, final, old)
    _could(remove_folder, old)


def discard(folder: Path) -> None:
    """Delete a folder, never leaving part of it under a checkpoint's name. Does nothing without a
    folder."""
    if not folder.exists():
        return
    if step_of(folder) is not None:
        retired = folder.with_name(_RETIRED + folder.name)
        remove_folder(retired)
        folder = folder.rename(retired)
    remove_folder(folder)


def remove_leftovers(root: Path) -> list[str]:
    """Delete folders that a killed process left half written or half deleted, and return their
    names.

    Failures are logged.
    """
    left = [path for path in root.iterdir() if path.name.startswith((_STAGING, _RETIRED))] if root.is_dir() else []
    return sorted(path.name for path in left if _could(remove_folder, path))


def retire(newest: Path, keep_last: int | None, keep_every: int | None) -> list[Path]:
    """Delete old checkpoints before `newest`, which is whole, and return them.

    Kept are the last `keep_last` with it (None: all), and all of steps that are multiples of
    `keep_every`. Later checkpoints were skipped as damaged when the run was resumed: they count for
    nothing, and the run replaces them. A folder that cannot be deleted, for example on network
    storage, is logged and left; no run fails because of it.
    """
    if keep_last is None:
        return []
    assert keep_last > 0, keep_last
    steps = _steps(newest.parent)
    up_to = [path for path in newest_first(newest.parent) if steps[path] <= steps[newest]]
    old = []
    for path in up_to[keep_last:]:
        is_kept = keep_every and steps[path] > 0 and steps[path] % keep_every == 0
        if not is_kept:
            old.append(path)
    return [path for path in old if _could(discard, path)]


def write_trainer_state(folder: Path, state: dict[str, Any]) -> None:
    write_whole(folder / TRAINER_STATE, json.dumps(state, indent=1) + "\n")


def read_trainer_state(folder: Path) -> dict[str, Any]:
    """Return the trainer's state. Raises UserError if it is absent, as in the output of a
    converter, or damaged."""
    try:
        return json.loads((folder / TRAINER_STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no {TRAINER_STATE}: it holds a model, but no state of a run; give a training checkpoint."
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{folder / TRAINER_STATE} is damaged ({type(error).__name__}: {error}); use another checkpoint."
        ) from error


def write_controller_state(folder: Path, state: dict[str, Any], name: str = CONTROLLER_STATE) -> None:
    """Write plain data with arrays; see `write_state`."""
    write_state(folder / name, state)


def add_controller_state(folder: Path, state: dict[str, Any]) -> None:
    """Add a later state of the rollout to a checkpoint, with the samples since then. A kill at any
    moment leaves a whole checkpoint: the new state's file counts from the moment that the manifest
    names it."""
    manifest = read_manifest(folder)
    names = file_names(folder)
    name = f"controller.{max(map(_number_of, names), default=0) + 1}{SUFFIX}"
    write_controller_state(folder, state, name)
    before = [each for each in names if _number_of(each)]
    files = {each: record for each, record in manifest.files.items() if each not in before}
    write_manifest(folder, manifest.contents, files | seal(folder, [name]))
    for each in before:
        (folder / each).unlink()


def read_controller_state(folder: Path) -> dict[str, Any]:
    """Return the latest state; see `read_state`."""
    names: Iterable[str] = read_manifest(folder).files if (folder / MANIFEST).exists() else ()
    later = max(names, key=_number_of, default="")
    return read_state(folder / (later if _number_of(later) else CONTROLLER_STATE))


def _number_of(name: str) -> int:
    """Return the number of a file with a later state of the rollout; 0 for other files."""
    match = _LATER_STATE.fullmatch(name)
    return int(match[1]) if match else 0


def _could(delete: Callable[[Path], None], folder: Path) -> bool:
    """Delete an unneeded folder, and return whether it worked."""
    try:
        delete(folder)
    except OSError as error:
        log.warning("%s, which is not needed, cannot be deleted (%s); it is left", folder, error.strerror or error)
        return False
    return True
