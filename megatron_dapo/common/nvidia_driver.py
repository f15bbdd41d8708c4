"""NVIDIA's driver on this machine, as the kernel reports it: without torch, even if torch cannot
use it."""

import subprocess
from pathlib import Path

VERSION_FILE = Path("/proc/driver/nvidia/version")
_ANSWER_S = 60.0


def is_loaded() -> bool:
    return VERSION_FILE.exists()


def answer(*options: str) -> str:
    """Return the answer of `nvidia-smi`; empty if it does not run."""
    try:
        return subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=_ANSWER_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
