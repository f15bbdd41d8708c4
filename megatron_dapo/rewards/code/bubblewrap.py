"""Command lines of bubblewrap: a program in a sandbox of its own.

Its file system has /usr and our interpreter, read-only, and a /tmp. It has no network, no home and
no right, and sees no process outside.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.rewards.code.system_calls import system_call_filter

# plus the caller's process id: limits count per user, and these users own nothing
_FIRST_USER = 1_000_000_000
_DEVICES = ("null", "zero", "random", "urandom")
_SYSTEM_LINKS = ("bin", "sbin", "lib", "lib32", "lib64")
_LINKS = (
    *(("/dev/fd", "/proc/self/fd"), ("/dev/stdin", "/proc/self/fd/0"), ("/dev/stdout", "/proc/self/fd/1")),
    *(("/dev/stderr", "/proc/self/fd/2"), ("/dev/shm", "/tmp")),
)


@dataclass(frozen=True)
class Way:
    """A way to make a sandbox."""

    name: str
    is_sandbox: bool = True
    namespaces: tuple[str, ...] = ("--unshare-all",)
    is_root: bool = False
    """Whether this machine's root makes the mounts, without a user namespace."""


USER_NAMESPACE = Way("a user namespace")
ROOT = Way(
    "namespaces made by root",
    namespaces=(
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"),
    ),
    is_root=True,
)
UNSANDBOXED = Way("none", is_sandbox=False)


def enclose(
    way: Way, program: list[str], paths: Sequence[str] = (), tmp_bytes: int = 64 << 20, is_for_commands: bool = False
) -> tuple[list[str], int, int | None]:
    """Return the command line that starts a program in a sandbox, the system call filter's file, to
    be inherited, and the user and group that must start it (None: this process's).

    Args:
        program: its words.
        paths: further files and folders, read-only, at their own places.
        tmp_bytes: size of /tmp.
        is_for_commands: whether any command runs there: with /proc of its own processes, and
            sockets among them.
    """
    filter_file = os.memfd_create("system calls")
    os.write(filter_file, system_call_filter(allows_sockets=is_for_commands))
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
        *("choom", "-n", "1000", "--", "bwrap", *way.namespaces, "--die-with-parent", "--new-session"),
        *_mounts(paths, tmp_bytes, is_for_commands),
        *("--seccomp", str(filter_file), "--", *program),
    ]
    return command, filter_file, (user if os.geteuid() == 0 and not way.is_root else None)


def _mounts(paths: Sequence[str], tmp_bytes: int, is_for_commands: bool) -> list[str]:
    """Return the options for the file system: the system, the interpreter and `paths`, read-only,
    four devices and a /tmp."""
    words = ["--ro-bind", "/usr", "/usr"]
    for folder in (Path("/") / name for name in _SYSTEM_LINKS):
        if folder.is_symlink():
            words += ["--symlink", os.readlink(folder), str(folder)]
        elif folder.is_dir():
            words += ["--ro-bind", str(folder), str(folder)]
    for path in ("/dev", "/etc"):
        # made for a file in it, bubblewrap's folders are closed to others
        words += ["--perms", "0755", "--dir", path]
    words += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for name in _DEVICES:
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    if is_for_commands:
        words += ["--proc", "/proc", "--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
        words += [word for place, target in _LINKS for word in ("--symlink", target, place)]
    words += ["--size", str(tmp_bytes), "--perms", "1777", "--tmpfs", "/tmp", "--chdir", "/tmp"]
    prefix = os.path.realpath(sys.base_prefix)
    for path in paths if Path(prefix).is_relative_to("/usr") else (prefix, *paths):
        above = [str(parent) for parent in reversed(Path(path).parents) if str(parent) not in ("/", "/tmp")]
        words += [word for parent in above for word in ("--perms", "0711", "--dir", parent)]
        words += ["--ro-bind", path, path]
    return [*words, "--remount-ro", "/"]
