"""Files and folders that appear whole, by rename, or not at all."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part: temp file,
    fsync, rename."""
    with whole_file(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file to write like `write_whole`, in parts; if the block raises, `path` stays as it
    was. The error of a full disk names the file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.filename is None and error.errno in _FULL:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def flush_to_disk(path: str | Path) -> None:
    """Flush a file's content to the disk, or of a folder its entries: the names of the files in
    it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish_folder(staged: Path, final: Path, old: Path) -> None:
    """Give a finished folder its final name; a kill at any moment leaves a whole folder of that
    name or none.

    Args:
        staged: the folder, already flushed to disk, on the same file system as `final`.
        final: its new name. An existing folder of that name is moved aside.
        old: the name for that folder; the caller removes it, and decides on the meaning of a
            failure. Anything already there is removed first.

    Raises:
        OSError: if a folder cannot be moved or removed.
    """
    remove_folder(old)
    if final.exists():
        final.rename(old)
    staged.rename(final)
    flush_to_disk(final.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder with its content, or a link to one; do nothing if there is none."""
    if folder.is_symlink():  # somebody keeps a folder of this name elsewhere
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
