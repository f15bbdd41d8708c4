"""Command lines of bubblewrap: a program in a sandbox of its own.

Its file system has /usr and our interpreter, read-only, and a /tmp. It has no network, no home and
no right, and sees no process outside.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.rewards.code.system_calls import system_call_filter

# plus the caller's process id: limits count per user, and these users own nothing
_FIRST_USER = 1_000_000_000
_DEVICES = ("null", "zero", "random", "urandom")
_SYSTEM_LINKS = ("bin", "sbin", "lib", "lib32", "lib64")
_COMMAND_LINKS = (
    *(("/dev/fd", "/proc/self/fd"), ("/dev/stdin", "/proc/self/fd/0"), ("/dev/stdout", "/proc/self/fd/1")),
    *(("/dev/stderr", "/proc/self/fd/2"), ("/dev/shm", "/tmp")),
)


@dataclass(frozen=True)
class Way:
    """A way to make a sandbox."""

    name: str
    is_sandbox: bool = True
    is_root: bool = False
    """Whether this machine's root makes the mounts, without a user namespace."""


USER_NAMESPACE = Way("a user namespace")
ROOT = Way("namespaces made by root", is_root=True)
UNSANDBOXED = Way("none", is_sandbox=False)
WAYS = {way.name: way for way in (USER_NAMESPACE, ROOT)}


@dataclass(frozen=True)
class Contents:
    """The contents of a sandbox besides the system and our interpreter."""

    paths: tuple[str, ...] = ()
    """Files and folders, read-only, at their own places."""
    links: tuple[tuple[str, str], ...] = ()
    """Symbolic links: path and target."""
    tmp_bytes: int = 64 << 20
    is_for_commands: bool = False
    """Whether any command runs there: with /proc of its own processes, and sockets among them."""


@dataclass(frozen=True)
class Enclosed:
    """A command line that starts a program in a sandbox."""

    command: list[str]
    filter_file: int
    """To be inherited, under its number."""
    user: int | None
    """The user and group that must start the command; None: this process's."""


def enclose(way: Way, contents: Contents, program: list[str]) -> Enclosed:
    """Return the command line for a program. Raises OSError."""
    filter_file = os.memfd_create("system calls")
    os.write(filter_file, system_call_filter(allows_sockets=contents.is_for_commands))
    os.lseek(filter_file, 0, os.SEEK_SET)
    user = _FIRST_USER + os.getpid()
    if way.is_root:
        # the mounts are root's, the program is nobody's: without any right, and without a way back
        # to one
        program = [
            *("/usr/bin/setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--inh-caps=-all"),
            *("--ambient-caps=-all", "--bounding-set=-all", "--", *program),
        ]
    command = [
        *("choom", "-n", "1000", "--", "bwrap", *_namespaces(way), "--die-with-parent", "--new-session"),
        *_mounts(contents),
        *("--seccomp", str(filter_file), "--", *program),
    ]
    return Enclosed(command, filter_file, user if os.geteuid() == 0 and not way.is_root else None)


def _namespaces(way: Way) -> list[str]:
    if not way.is_root:
        return ["--unshare-all"]
    capabilities = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
    return [
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *(word for name in capabilities for word in ("--cap-add", name)),
    ]


def _mounts(contents: Contents) -> list[str]:
    """Return the options for the file system: the system and the interpreter, read-only, four
    devices, a /tmp, and the contents."""
    words = ["--ro-bind", "/usr", "/usr"]
    for folder in (Path("/") / name for name in _SYSTEM_LINKS):
        if folder.is_symlink():
            words += ["--symlink", os.readlink(folder), str(folder)]
        elif folder.is_dir():
            words += ["--ro-bind", str(folder), str(folder)]
    words += _open_folders(["/dev", "/etc"])
    words += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    prefix = Path(sys.base_prefix).resolve()
    if not prefix.is_relative_to("/usr"):
        words += ["--ro-bind", str(prefix), str(prefix)]
    for name in _DEVICES:
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    links = contents.links
    if contents.is_for_commands:
        words += ["--proc", "/proc", "--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
        links += _COMMAND_LINKS
    words += ["--size", str(contents.tmp_bytes), "--perms", "1777", "--tmpfs", "/tmp", "--chdir", "/tmp"]
    for path in contents.paths:
        words += [*_open_folders(_parents(path)), "--ro-bind", path, path]
    for place, target in links:
        words += [*_open_folders(_parents(place)), "--symlink", target, place]
    return [*words, "--remount-ro", "/"]


def _parents(path: str) -> Iterator[str]:
    """Yield the folders above a path, from the root on, without it and /tmp."""
    return (str(parent) for parent in reversed(Path(path).parents) if str(parent) not in ("/", "/tmp"))


def _open_folders(paths: Iterable[str]) -> list[str]:
    """Return the options that make folders; made for a file in them, bubblewrap's are closed to
    others."""
    return [word for path in paths for word in ("--perms", "0755", "--dir", path)]
