"""The names of the launchers' processes in the records of their ends; of the ranks see
`common.ends.rank_name`."""

LAUNCHER = "launcher"
"""`launch.local`."""

WAITING = "wait-servers"
"""The process of a Slurm job that waits for the servers."""


def task_name(role: str, node: str) -> str:
    """Return the name of a role's task on a node of a Slurm job."""
    return f"{role}-{node}"


def trainer_launcher_name(node: str) -> str:
    """Return the name of the process that starts a node's ranks."""
    return f"trainer-launcher-{node}"


def supervisor_name(node: str | None) -> str:
    """Return the name of the process that starts a node's servers; node: of a Slurm job."""
    return f"server-supervisor-{node}" if node else "server-supervisor"


def preflight_name(node: str) -> str:
    """Return the name of the process that checks a node."""
    return f"preflight-check-{node}"
