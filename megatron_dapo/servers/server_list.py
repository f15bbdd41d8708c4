"""The list of a run's servers: fixed URLs, or the lines of a file read again and again."""

import logging
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.derived import is_server_url
from megatron_dapo.config.schema.actor_rollout_ref import RolloutConfig

log = logging.getLogger(__name__)

_FILE = "actor_rollout_ref.rollout.server_urls_file"


class ServerList:
    """The present URLs of the servers. The file may change at any time."""

    def __init__(self, urls: Sequence[str] = (), file: str | Path | None = None) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._file = Path(file) if file else None
        self._complaint = ""

    @classmethod
    def of_config(cls, rollout: RolloutConfig) -> "ServerList":
        """Return the list of the config."""
        return cls(rollout.server_urls, rollout.server_urls_file)

    def read(self) -> list[str]:
        """Return the URLs, each once; none if the file is missing or empty.

        Raises UserError naming a malformed line.
        """
        if self._file is not None:
            try:
                self._urls = self._parsed(self._file)
            except FileNotFoundError:
                self._urls = []
        return list(self._urls)

    def read_or_keep(self) -> list[str]:
        """Return the URLs for a run under way.

        If the file is gone, unreadable or malformed, the last good list stays, with one line in the
        log.
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

        Raises FileNotFoundError, and UserError for an unreadable file or a malformed line.
        """
        try:
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{_FILE} {file} cannot be read ({error}); correct it.") from error
        return parse_urls(text, str(file))

    def __str__(self) -> str:
        """Return the URLs and their source."""
        urls = ", ".join(self._urls) or "none"
        return f"{urls} (from {self._file})" if self._file is not None else urls


def parse_urls(text: str, source: str) -> list[str]:
    """Return the URLs of a text, one per line, each once, without empty lines and comments (#)."""
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
