"""Make .venv from a lock. Run by setup.sh with the Python that .venv shall have; needs nothing but that Python.

    python requirements/install.py [cpu|cuda]       # default: what .venv was made for, else cpu
    python requirements/install.py check            # whether .venv has what the lock names; changes nothing

torch comes first, alone, with what its wheel asks for (its CUDA libraries, where pip's index gives a CUDA build); then
the lock, which names every package, without any resolving; then this project, in place. What pip has unpacked is
compiled while it goes on (bytecode.py). A stamp written last says what
.venv holds: with an equal stamp there is nothing to do, and a setup that was interrupted goes on.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "setup.json"
LOG = VENV / "setup.log"
COMMAND = "make setup"
PLATFORMS = ("cpu", "cuda")
OWN = {"pip", "megatron-dapo"}  # in .venv without being in the lock
# Of the user's environment: what puts packages of another Python before ours, versions before the lock's (NVIDIA's
# containers set PIP_CONSTRAINT to their own), or packages elsewhere than into .venv.
NOT_OURS = (
    "PYTHONPATH",
    "PYTHONHOME",
    "PIP_REQUIRE_VIRTUALENV",
    "PIP_CONSTRAINT",
    "PIP_USER",
    "PIP_TARGET",
    "PIP_PREFIX",
)
CURES = (
    ("No space left on device", "Free some disk space (a CPU install takes 3 to 8 GB, a CUDA install about 11)."),
    ("connection broken by", "pip cannot reach its index: `pip config list` shows where it looks."),
    ("No matching distribution", "pip's index does not have this version: `pip config list` shows where pip looks."),
    ("Read timed out", "The network was too slow: PIP_DEFAULT_TIMEOUT=180 make setup waits longer."),
    ("Failed building wheel", "A package has no wheel for this machine: Linux on x86-64 is what the lock is for."),
)


class SetupError(Exception):
    """What failed, and the cure, for the person at the terminal."""


def wanted(platform: str) -> dict[str, str]:
    """What the stamp of an up-to-date .venv says. A moved folder or another Python makes another .venv."""
    inputs = (lock_of(platform).read_bytes(), (ROOT / "pyproject.toml").read_bytes())
    return {
        "platform": platform,
        "python": ".".join(map(str, sys.version_info[:3])),
        "folder": str(ROOT),
        "lock": hashlib.sha256(b"\0".join(inputs)).hexdigest(),
    }


def lock_of(platform: str) -> Path:
    return ROOT / "requirements" / f"{platform}.txt"


def read_stamp() -> dict[str, str]:
    try:
        return json.loads(STAMP.read_text())
    except (FileNotFoundError, ValueError):
        return {}


def pinned(platform: str) -> dict[str, str]:
    """Name -> version in the lock, for whichever Python."""
    lines = (line.split(";")[0].strip() for line in lock_of(platform).read_text().splitlines())
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def start(command: Iterable[str | Path]) -> subprocess.Popen:
    environment = {key: value for key, value in os.environ.items() if key not in NOT_OURS}
    return subprocess.Popen([*map(str, command)], cwd=ROOT, env=environment, text=True, errors="replace",
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def run(title: str, command: Iterable[str | Path]) -> None:
    """One step: a line with its time; output in the log. Raises SetupError with the end of the output and the cure."""
    finish(title, lambda: start(command))


def finish(title: str, process: Callable[[], subprocess.Popen]) -> None:
    """The line, time, log and errors of `run` for a process, whose standard input ends here."""
    print(f"  {title:<44}", end="", flush=True)
    began = time.monotonic()
    done = process()
    output, _ = done.communicate()
    if VENV.is_dir():
        with LOG.open("a") as log:
            log.write(f"\n$ {' '.join(done.args)}\n{output}")
    if done.returncode:
        print("FAILED")
        said = [line for line in output.splitlines() if line.strip() and "is ignored: it is neither" not in line]
        cures = [cure for sign, cure in CURES if sign in output] or ["The last lines above say why."]
        raise SetupError("\n".join([*(f"    {line}" for line in said[-12:]), "", *cures[:1], f"All of it: {LOG}",
                                    f"Then run `{COMMAND}` again; it goes on where it stopped."]))  # fmt: skip
    print(f"{time.monotonic() - began:5.0f} s")


@contextmanager
def in_background(command: Iterable[str | Path]) -> Iterator[subprocess.Popen]:
    """A process beside the steps, which does not outlive them: where one fails, it is ended."""
    process = start(command)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def install(platform: str) -> None:
    packages = pinned(platform)
    stamp, now = read_stamp(), wanted(platform)
    python = VENV / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    if stamp and any(stamp.get(key) != now[key] for key in ("platform", "python", "folder")) or not runs(python):
        run("new .venv", [sys.executable, "-m", "venv", "--clear", VENV])
    STAMP.unlink(missing_ok=True)
    lock = lock_of(platform)
    # Without torch itself: pip reports a torch that it cannot find as a conflict with the constraint. Without triton:
    # a CUDA build of torch insists on the one it was made with; the lock then puts its own in its place.
    others = VENV / "constraints.txt"
    lines = lock.read_text().splitlines(True)
    others.write_text("".join(line for line in lines if not line.startswith(("torch==", "triton=="))))
    pip_alone = [*pip, "--no-compile"]  # pip compiles one file after the other, and installs nothing meanwhile
    with in_background([python, ROOT / "requirements" / "bytecode.py"]) as compiler:
        run(f"torch {packages['torch']}", [*pip_alone, f"torch=={packages['torch']}", "--constraint", others])
        run(f"{len(packages)} packages of {lock.relative_to(ROOT)}", [*pip_alone, "--no-deps", "--requirement", lock])
        finish("the rest of their bytecode, on all cores", lambda: compiler)
    run("this project, in place", [*pip, "--no-deps", "--no-build-isolation", "--editable", ROOT])
    STAMP.write_text(json.dumps(now, indent=1))


def runs(python: Path) -> bool:
    """Whether it is there, of this Python's version, and not a link to a Python that is gone."""
    try:
        answer = subprocess.run([python, "-c", "import pip, sys; print(*sys.version_info[:3])"], capture_output=True)
    except OSError:
        return False
    return answer.returncode == 0 and answer.stdout.split() == [b"%d" % part for part in sys.version_info[:3]]


def strangers(platform: str) -> list[str]:
    """Packages in .venv that the lock does not name: the user's own, or left over from an older lock."""
    listed = subprocess.check_output(
        [VENV / "bin/python", "-m", "pip", "list", "--format=json"], stderr=subprocess.DEVNULL
    )
    names = {item["name"].lower().replace("_", "-") for item in json.loads(listed)}
    return sorted(n for n in names - OWN - pinned(platform).keys() if not n.startswith(("nvidia-", "cuda-")))


def check() -> int:
    """For jobs, which install nothing into a .venv that others may be using."""
    stamp = read_stamp()
    return 0 if stamp and stamp["lock"] == wanted(stamp["platform"])["lock"] else 1


def main(platform: str) -> int:
    if platform == "check":
        return check()
    platform = platform or read_stamp().get("platform", "cpu")
    if platform not in PLATFORMS:
        print(f"setup: PLATFORM={platform} is not one of {', '.join(PLATFORMS)}.", file=sys.stderr)
        return 2
    folder = os.open(ROOT / "requirements", os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)  # two `make` at once: the second waits, then finds nothing to do
    if read_stamp() == wanted(platform) and (VENV / "bin/python").exists():
        print(f"setup: .venv is up to date ({platform}, Python {wanted(platform)['python']})")
        return 0
    task = "bringing .venv up to date" if read_stamp() else "making .venv (some minutes, and some GB)"
    print(f"setup: {task}: {platform}, Python {wanted(platform)['python']}", flush=True)
    if platform == "cuda" and not shutil.which("nvidia-smi"):
        print("  note: no NVIDIA driver here (nvidia-smi is missing); installing for another machine")
    began = time.monotonic()
    try:
        install(platform)
    except SetupError as error:
        print(f"{error}", file=sys.stderr)
        return 1
    others = strangers(platform)
    if others:
        print(f"  note: not from the lock, left alone: {' '.join(others)}")
    print(f"setup: done in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
