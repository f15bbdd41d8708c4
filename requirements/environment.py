"""Environments beside .venv, each made from a lock, since their packages contradict .venv's and each other's.

A stamp written last says what an environment holds, as in .venv.
"""

import hashlib
import json
import sys
from pathlib import Path

import install


def make(lock: Path, folder: Path) -> None:
    """Make the environment, unless its stamp says that it is there. Raises SetupError."""
    stamp = folder / "setup.json"
    wanted = {"python": sys.version, "folder": str(folder), "lock": hashlib.sha256(lock.read_bytes()).hexdigest()}
    if stamp.is_file() and json.loads(stamp.read_text()) == wanted:
        return
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    install.run(f"new {folder.relative_to(install.ROOT)}", [sys.executable, "-m", "venv", "--clear", folder])
    install.run(f"{lock.relative_to(install.ROOT)}", [*pip, "install", "--no-deps", "--requirement", lock])
    install.run("whether each package has what it needs", [*pip, "check"])
    stamp.write_text(json.dumps(wanted, indent=1))


def make_all(target: str, home: Path, folders: dict[Path, Path]) -> int:
    """Make a folder from each lock; return the exit code of `make TARGET`. Its log is in `home`."""
    home.mkdir(parents=True, exist_ok=True)
    install.LOG, install.COMMAND = home / "setup.log", f"make {target}"
    try:
        for lock, folder in folders.items():
            make(lock, folder)
    except install.SetupError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{target}: {home.relative_to(install.ROOT)} is up to date")
    return 0
