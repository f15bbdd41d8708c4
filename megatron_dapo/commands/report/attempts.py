"""The attempts of a run: how their configs differ, and the ends of their logs."""

import re
from pathlib import Path

from megatron_dapo.commands.report.run_data import read_config, shown
from megatron_dapo.common.bounded import read_bytes
from megatron_dapo.storage.run_folder import RunFolder

_MOST_ATTEMPTS, _MOST_LOGS = 10, 60  # the newest, and of each
_MAX_LOG = 8 << 10  # bytes of a log's end
_CONTROL = re.compile(r"\x1b\[[\d;?]*[A-Za-z]|[^\S\n]*\r(?=\n)")  # colours, and the other system's ends of lines


def attempts_of(folder: Path) -> list[dict]:
    """Return the attempts of a run in the page's format, newest first.

    A Slurm job has a folder for each; `launch.local` writes on in one.
    """
    logs = RunFolder(folder).logs
    folders = [place for place in (logs, *logs.glob("attempt-*")) if place.is_dir()]
    folders.sort(key=lambda place: [int(number) for number in re.findall(r"\d{1,18}", place.name)])
    attempts: list[dict] = []
    earlier: dict = {}
    for place in folders[-_MOST_ATTEMPTS:]:
        config = read_config(place / "config.yaml")
        keys = sorted(key for key in config.keys() | earlier.keys() if config.get(key) != earlier.get(key))
        changes = [[key, shown(earlier.get(key)), shown(config.get(key))] for key in keys] if config and earlier else []
        texts = [[path.stem, _end_of(path)] for path in sorted(place.glob("*.log"))[:_MOST_LOGS]]
        if config or texts:
            attempts.append({"name": place.name, "changes": changes, "logs": texts})
        earlier = config or earlier
    return attempts[::-1]


def _end_of(log: Path) -> str:
    """Return the last lines of a log as text; "" if it is unreadable."""
    try:
        text = read_bytes(log, _MAX_LOG, of_end=True).decode("utf-8", "replace")
    except OSError:
        return ""
    return _CONTROL.sub("", text)
