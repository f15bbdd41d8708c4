"""manifest.json: each file of a checkpoint folder with size and checksum, written last. No
manifest, no checkpoint.

Needs neither torch nor Megatron, so that tools can look at a folder at once.
"""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import flush_to_disk, write_whole

Result = TypeVar("Result")

MANIFEST = "manifest.json"
FORMAT_VERSION = 2
_PACKAGES = ("megatron_dapo", "megatron-core", "torch")
_NUM_THREADS = 8  # sha256 lets go of the interpreter; one thread reads some 1 GB/s


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint. size: bytes. sha256: of the content, in hex."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint folder."""

    files: dict[str, FileRecord]
    """By path inside the folder, without the manifest itself."""
    contents: tuple[str, ...]
    """The parts: "model", "optimizer", "lr_schedule", "rng", "counters", "controller"."""
    versions: dict[str, str]
    """Of the packages that wrote it."""
    format_version: int = FORMAT_VERSION

    @property
    def num_bytes(self) -> int:
        """Return the size of all files, in bytes."""
        return sum(record.size for record in self.files.values())


@dataclass(frozen=True)
class Findings:
    """The result of `verify`."""

    damage: tuple[str, ...]
    """A phrase per fault; empty for a whole checkpoint."""
    extra: tuple[str, ...] = ()
    """Unlisted files, which are harmless."""

    @property
    def is_whole(self) -> bool:
        """Return whether there is no damage."""
        return not self.damage

    def with_damage(self, more: Iterable[str]) -> "Findings":
        """Return these findings with more damage."""
        return Findings((*self.damage, *more), self.extra)


def package_versions() -> dict[str, str]:
    """Return the versions of this program and the packages that decide its results."""
    return {name: importlib.metadata.version(name) for name in _PACKAGES}


def file_names(folder: Path) -> list[str]:
    """Return every file below the folder but the manifest, as paths inside it, sorted."""
    paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    names = [path.relative_to(folder).as_posix() for path in paths]
    return sorted(name for name in names if name != MANIFEST)


def seal(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Return size and checksum of finished files, each flushed to the disk first."""
    return _records(folder, names, flush=True)


def write_manifest(
    folder: Path, contents: Sequence[str], files: dict[str, FileRecord] | None = None, flush: bool = True
) -> Manifest:
    """Write the manifest, which makes the folder a checkpoint. Entries are flushed to the disk
    before and after.

    Args:
        files: the records of all files, if known (see `seal`); None: made here.
    """
    records = _records(folder, file_names(folder), flush) if files is None else dict(sorted(files.items()))
    manifest = Manifest(records, tuple(contents), package_versions())
    for inner in sorted({(folder / name).parent for name in records}):
        flush_to_disk(inner)
    content = asdict(manifest)
    write_whole(folder / MANIFEST, json.dumps({**content, "sha256": _self_check(content)}, indent=1) + "\n")
    flush_to_disk(folder)
    return manifest


def read_manifest(folder: str | Path) -> Manifest:
    """Return the manifest. Raises UserError if it is missing, damaged or of an unknown format."""
    manifest, fault = _read(Path(folder))
    if manifest is None:
        raise UserError(f"{folder} is not a complete checkpoint: {fault}; give another folder, or write it again.")
    return manifest


def verify(
    folder: str | Path, contents: bool = True, advance: Callable[[int], None] = lambda num_bytes: None
) -> Findings:
    """Compare a folder with its manifest.

    contents: read every file and compare checksums too, not only sizes; advance is then called with
    the size of each file that was read.
    """
    findings, same_size = compare_sizes(Path(folder))
    return findings.with_damage(compare_contents(Path(folder), same_size, advance)) if contents else findings


def compare_sizes(folder: Path) -> tuple[Findings, dict[str, FileRecord]]:
    """Return the faults visible in sizes, and the manifest's records of the files with the right
    size."""
    manifest, fault = _read(folder)
    if manifest is None:
        return Findings((fault,)), {}
    names = set(file_names(folder))
    damage = []
    same_size = {}
    for name, record in manifest.files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if name not in names:
            damage.append(f"{name} is missing")
        elif size is None:
            damage.append(f"{name} is not a file")
        elif size != record.size:
            damage.append(f"{name} has {size} bytes instead of {record.size}")
        else:
            same_size[name] = record
    return Findings(tuple(damage), tuple(sorted(names - manifest.files.keys()))), same_size


def compare_contents(
    folder: Path, files: dict[str, FileRecord], advance: Callable[[int], None] = lambda num_bytes: None
) -> list[str]:
    """Read the files; return a phrase for each unreadable one and each difference from a record."""

    def fault(name: str) -> str | None:
        try:
            now = _record(folder / name, flush=False)
        except OSError as error:
            return f"{name} cannot be read on {os.uname().nodename} ({error.strerror})"
        finally:
            advance(files[name].size)
        return None if now == files[name] else f"{name} has another content than was written (its sha256 differs)"

    return [phrase for phrase in _each(fault, files) if phrase is not None]


def _read(folder: Path) -> tuple[Manifest | None, str]:
    """Return the manifest, or None and its fault."""
    if not folder.is_dir():
        return None, "the folder is missing" if not folder.exists() else "it is not a folder"
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        check = content.pop("sha256")
    except FileNotFoundError:
        return None, f"{MANIFEST} is missing"
    except OSError as error:
        return None, f"{MANIFEST} cannot be read ({error.strerror})"
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        # not JSON, not an object
        return None, f"{MANIFEST} is damaged"
    if check != _self_check(content):
        return None, f"{MANIFEST} has another content than was written (its sha256 differs)"
    if content["format_version"] != FORMAT_VERSION:
        return None, f"{MANIFEST} has format version {content['format_version']}, this program reads {FORMAT_VERSION}"
    files = {name: FileRecord(**record) for name, record in content["files"].items()}
    return Manifest(files, tuple(content["contents"]), content["versions"], content["format_version"]), ""


def _self_check(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _records(folder: Path, names: Iterable[str], flush: bool) -> dict[str, FileRecord]:
    names = list(names)
    return dict(zip(names, _each(lambda name: _record(folder / name, flush), names), strict=True))


def _each(work: Callable[[str], Result], names: Collection[str]) -> list[Result]:
    """Return the work's result for every file, by several threads."""
    if not names:
        return []
    with ThreadPoolExecutor(min(_NUM_THREADS, len(names))) as pool:
        return list(pool.map(work, names))


def _record(path: Path, flush: bool) -> FileRecord:
    with path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256")
        return FileRecord(file.tell(), digest.hexdigest())
