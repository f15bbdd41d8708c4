"""The system calls refused to a program in the sandbox, as a filter for the kernel.

The filter is of seccomp, in classic BPF. Namespaces and limits hold without it. It closes their
gaps: memory beyond all limits of a process, sockets to the machine's own host, looks into other
processes. It also closes parts of the kernel visited only by attackers.
"""

import errno
import platform
import struct

# call -> its number on x86_64 and aarch64 (the kernel's syscall tables; from 424 on they are the
# same)
_REFUSED = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
_SOCKET = (41, 198)
_LOCAL_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: within the sandbox's own network
_CLONE = (56, 220)
_CLONE3 = (435, 435)
# CLONE_NEW...: of time, mounts, cgroups, names, IPC, users, processes, network
_NEW_NAMESPACES = 0x7E020080
_X32_CALLS = 0x40000000  # the same calls under other numbers, on x86_64
# column of the table, AUDIT_ARCH
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # places in struct seccomp_data
_KILL, _ERROR, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000


def system_call_filter(machine: str = platform.machine(), allows_sockets: bool = False) -> bytes:
    """Return the filter: a refused call fails with EPERM. Raises KeyError for a machine with
    unknown numbers.

    allows_sockets: of families that stay in the sandbox, if it has a network of its own.
    """
    column, architecture = _MACHINES[machine]
    rules = [
        _rule(_LOAD, _ARCHITECTURE),
        *_unless(_IF_EQUAL, architecture, _KILL),
        _rule(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        rules += _where(_IF_AT_LEAST, _X32_CALLS, _KILL)
    for numbers in _REFUSED.values():
        rules += _where(_IF_EQUAL, numbers[column], _ERROR | errno.EPERM)
    refuse = _rule(_RETURN, _ERROR | errno.EPERM)
    families = [rule for family in _LOCAL_FAMILIES if allows_sockets for rule in _where(_IF_EQUAL, family, _ALLOW)]
    rules += [
        _rule(_IF_EQUAL, _SOCKET[column], jump_unless=len(families) + 2),
        _rule(_LOAD, _FIRST_ARGUMENT),
        *families,
        refuse,
    ]
    # its flags are in memory, unreadable for a filter; libraries then make the older call
    rules += _where(_IF_EQUAL, _CLONE3[column], _ERROR | errno.ENOSYS)
    rules += [
        _rule(_IF_EQUAL, _CLONE[column], jump_if=1),
        _rule(_RETURN, _ALLOW),
        _rule(_LOAD, _FIRST_ARGUMENT),
        *_where(_IF_ANY_BIT, _NEW_NAMESPACES, _ERROR | errno.EPERM),
        _rule(_RETURN, _ALLOW),
    ]
    return b"".join(rules)


def _where(condition: int, value: int, verdict: int) -> list[bytes]:
    return [_rule(condition, value, jump_unless=1), _rule(_RETURN, verdict)]


def _unless(condition: int, value: int, verdict: int) -> list[bytes]:
    return [_rule(condition, value, jump_if=1), _rule(_RETURN, verdict)]


def _rule(operation: int, value: int, jump_if: int = 0, jump_unless: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, jump_if, jump_unless, value)
