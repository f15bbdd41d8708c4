"""Make .cache/agents/NAME from each lock requirements/agents/NAME.txt: an environment for each program of other people.

    python requirements/agents.py [NAME ...]        # with .venv's Python; without names: all

Their packages contradict .venv's and each other's. A stamp written last says what an environment holds, as in .venv.
"""

import hashlib
import json
import sys
from pathlib import Path

import install

LOCKS = install.ROOT / "requirements" / "agents"
HOME = install.ROOT / ".cache" / "agents"


def make(lock: Path) -> None:
    folder = HOME / lock.stem
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


def main(names: list[str]) -> int:
    locks = sorted(LOCKS.glob("*.txt"))
    if unknown := set(names) - {lock.stem for lock in locks}:
        print(f"setup-agents: no lock in requirements/agents for {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    HOME.mkdir(parents=True, exist_ok=True)
    install.LOG, install.COMMAND = HOME / "setup.log", "make setup-agents"
    try:
        for lock in locks:
            if not names or lock.stem in names:
                make(lock)
    except install.SetupError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"setup-agents: {HOME.relative_to(install.ROOT)} is up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
