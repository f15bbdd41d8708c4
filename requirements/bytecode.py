"""Compile the packages of this Python's environment while pip is still installing. install.py starts it.

    .venv/bin/python requirements/bytecode.py       # until standard input ends; then what is left, and the end

A package is taken when pip has unpacked all of it: then, and not before, pip writes INSTALLER beside the package's
metadata. It runs on all cores, behind pip, which needs one and has the longest way.
"""

import compileall
import csv
import multiprocessing
import os
import select
import signal
import site
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

NICE = 10
POLL_S = 0.3
# What a package tests itself with, and the hundreds of models of which a run imports one: Python compiles these when
# they are first imported, if they are. They are a third of all the source there is.
LEFT_OUT = ("/tests/", "/test/", "/transformers/models/", "/sglang/srt/models/", "/sglang/multimodal_gen/")


def worth_compiling(file: str) -> bool:
    """Whether a source file, named from site-packages on, may well be imported."""
    return file.endswith(".py") and not any(part in f"/{file}" for part in LEFT_OUT)


def unpacked(packages: Path, seen: set[Path]) -> Iterator[str]:
    """The files of packages that pip has unpacked since the last call."""
    for installer in packages.glob("*.dist-info/INSTALLER"):
        record = installer.with_name("RECORD")
        if installer in seen or not record.exists():
            continue
        seen.add(installer)
        with record.open(newline="", encoding="utf-8") as rows:
            yield from (row[0] for row in csv.reader(rows) if row)


def everything(packages: Path) -> Iterator[str]:
    for folder, _, files in os.walk(packages):
        yield from (os.path.relpath(os.path.join(folder, file), packages) for file in files)


def compile_file(file: Path) -> None:
    # some files are for other Pythons, and no failure; those compiled already are passed over
    compileall.compile_file(file, quiet=2)


def become_worker() -> None:
    # with our handler it could miss the signal in the moment before it waits for work
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    warnings.simplefilter("ignore")  # of other people's source, into a pipe that is read at the end


def main() -> None:
    os.nice(NICE)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaving the pool ends its processes
    packages = Path(site.getsitepackages()[0])
    seen: set[Path] = set()
    with multiprocessing.Pool(len(os.sched_getaffinity(0)), initializer=become_worker) as pool:
        batches = []
        ended = False
        while not ended:
            ended = bool(select.select([sys.stdin], [], [], POLL_S)[0])
            files = everything(packages) if ended else unpacked(packages, seen)
            chosen = [packages / file for file in files if worth_compiling(file)]
            batches.append(pool.map_async(compile_file, chosen, chunksize=20))
        for batch in batches:
            batch.get()
        pool.close()
        pool.join()


if __name__ == "__main__":
    main()
