"""The list of a run's servers: URLs that never change, or the lines of a file that is read again and again."""

import logging
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.derived import is_server_url
from megatron_dapo.config.schema.actor_rollout_ref import RolloutConfig

log = logging.getLogger(__name__)

_FILE = "actor_rollout_ref.rollout.server_urls_file"


class ServerList:
    """The URLs of the servers at any time. Whoever writes the file may do so at any time."""

    def __init__(self, urls: Sequence[str] = (), file: str | Path | None = None) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._file = Path(file) if file else None
        self._complaint = ""

    @classmethod
    def of_config(cls, rollout: RolloutConfig) -> "ServerList":
        """Return the list that the config names."""
        return cls(rollout.server_urls, rollout.server_urls_file)

    def read(self) -> list[str]:
        """Return the URLs, each once; none where the file is missing or empty.

        Raises UserError naming a malformed line.
        """
        if self._file is not None:
            try:
                self._urls = self._parsed(self._file)
            except FileNotFoundError:
                self._urls = []
        return list(self._urls)

    def read_or_keep(self) -> list[str]:
        """Return the URLs in a run that goes on.

        Of a file that is gone, cannot be read or has a malformed line the log complains, once, and the last good list
        stays.
        """
        complaint = ""
        if self._file is not None:
            try:
                self._urls = self._parsed(self._file)
            except FileNotFoundError:
                complaint = f"{_FILE} {self._file} is not there."
            except UserError as error:
                complaint = str(error)
        if complaint and complaint != self._complaint:
            log.warning("%s The servers stay as they were.", complaint)
        self._complaint = complaint
        return list(self._urls)

    def _parsed(self, file: Path) -> list[str]:
        """Return the file's URLs.

        Raises FileNotFoundError, or UserError for a file that cannot be read or has a malformed line.
        """
        try:
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{_FILE} {file} cannot be read ({error}); correct it.") from error
        return parse_urls(text, str(file))

    def __str__(self) -> str:
        """Return what the list holds, and where it comes from."""
        urls = ", ".join(self._urls) or "none"
        return f"{urls} (from {self._file})" if self._file is not None else urls


def parse_urls(text: str, source: str) -> list[str]:
    """Return the URLs of a text, one per line; empty lines and what follows # do not count, nor does a repetition."""
    urls: dict[str, None] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        url = line.partition("#")[0].strip()
        if url and not is_server_url(url):
            raise UserError(
                f"{_FILE} {source}, line {number}: {url!r} is not of the form http://host:port; correct it."
            )
        if url:
            urls[url.rstrip("/")] = None
    return list(urls)
