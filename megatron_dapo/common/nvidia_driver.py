"""NVIDIA's driver on this machine, as the kernel tells it: without torch, and where torch cannot use it."""

from pathlib import Path

VERSION_FILE = Path("/proc/driver/nvidia/version")


def is_loaded() -> bool:
    return VERSION_FILE.exists()
