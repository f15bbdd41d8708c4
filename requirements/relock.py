"""Turn requirements/NAME.in into the lock requirements/NAME.txt: every package pinned, for each Python of ours.

    python requirements/relock.py cpu python3.11 python3.12     # interpreters that really run

pip resolves and downloads nothing but metadata where the index offers it. Pins on which the interpreters differ get a
marker. NVIDIA's packages stay out of the CPU lock: the torch wheel that pip finds names its own.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NVIDIA = ("nvidia-", "cuda-")


def read_inputs(name: str) -> tuple[list[str], list[str]]:
    """Requirements of NAME.in: those to resolve, and those to take without their dependencies."""
    lines = [line.split(" #")[0].strip() for line in (FOLDER / f"{name}.in").read_text().splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    alone = [line.removeprefix("--no-deps ") for line in lines if line.startswith("--no-deps ")]
    return [line for line in lines if not line.startswith("--no-deps ")], alone


def resolve(python: str, requirements: list[str], *options: str) -> dict[str, str]:
    """Name -> version of everything that pip would install into an empty environment of this interpreter."""
    with tempfile.TemporaryDirectory() as work:
        subprocess.run([python, "-m", "venv", f"{work}/venv"], check=True)
        report = Path(work) / "report.json"
        command = [f"{work}/venv/bin/python", "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*command, *options, "--report", str(report), *requirements], check=True)
        packages = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {item["name"].lower().replace("_", "-"): item["version"].split("+")[0] for item in packages}


def merge(pins: dict[str, dict[str, str]]) -> list[str]:
    """Pins per Python version -> lines of the lock: torch first, the rest by name."""
    lines = []
    for name in sorted({name for pinned in pins.values() for name in pinned}, key=lambda name: (name != "torch", name)):
        versions = {python: pinned.get(name) for python, pinned in pins.items()}
        if len(set(versions.values())) == 1:
            lines.append(f"{name}=={next(iter(versions.values()))}")
            continue
        lines += [
            f'{name}=={version} ; python_version == "{python}"' for python, version in versions.items() if version
        ]
    return lines


def main(name: str, interpreters: list[str]) -> None:
    resolved, alone = read_inputs(name)
    pins = {}
    for python in interpreters:
        version = subprocess.check_output(
            [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], text=True
        )
        pins[version.strip()] = {**resolve(python, resolved), **(resolve(python, alone, "--no-deps") if alone else {})}
    if name == "cpu":
        pins = {
            python: {n: v for n, v in pinned.items() if not n.startswith(NVIDIA)} for python, pinned in pins.items()
        }
    header = f"# Made from {name}.in by requirements/relock.py for Python {' and '.join(pins)}. Not for editing."
    (FOLDER / f"{name}.txt").write_text("\n".join([header, *merge(pins), ""]))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python requirements/relock.py cpu|cuda PYTHON [PYTHON ...]")
    main(sys.argv[1], sys.argv[2:])
