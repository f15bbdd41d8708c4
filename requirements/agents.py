"""Make .cache/agents/NAME from each lock requirements/agents/NAME.txt: an environment for each program of other people.

python requirements/agents.py [NAME ...]        # with .venv's Python; without names: all
"""

import sys

import environment
import install

LOCKS = install.ROOT / "requirements" / "agents"
HOME = install.ROOT / ".cache" / "agents"


def main(names: list[str]) -> int:
    locks = sorted(LOCKS.glob("*.txt"))
    if unknown := set(names) - {lock.stem for lock in locks}:
        print(f"setup-agents: no lock in requirements/agents for {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    return environment.make_all(
        "setup-agents", HOME, {lock: HOME / lock.stem for lock in locks if not names or lock.stem in names}
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
