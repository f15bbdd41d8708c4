"""NVIDIA's driver on this machine, as the kernel reports it: without torch, even if torch cannot
use it."""

from pathlib import Path

VERSION_FILE = Path("/proc/driver/nvidia/version")


def is_loaded() -> bool:
    return VERSION_FILE.exists()
