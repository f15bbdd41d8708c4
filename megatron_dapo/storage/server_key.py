"""The key that clients of a run's servers need, kept only in a file that its owner alone can
read."""

import os
import re
import secrets
import stat
import tempfile
from pathlib import Path

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.schema.config import Config
from megatron_dapo.storage.run_folder import RunFolder, make_folder

KEY = "actor_rollout_ref.rollout.server_api_key_file"
CURE = f"give the file that holds its key as {KEY}"
_NUM_BYTES = 32


class ServerKey(str):
    """A key that a log of arguments, SGLang's among them, does not show."""

    def __repr__(self) -> str:
        return "'***'"


def server_key_file(config: Config) -> Path:
    """Return the path of the key of the servers that this program starts: the file that the config
    names, or the run's own."""
    named = config.actor_rollout_ref.rollout.server_api_key_file
    return Path(named or RunFolder.of(config.trainer).server_key).absolute()


def make_server_key(config: Config) -> Path:
    """Return `server_key_file`, made with a random key if the run has none; an existing key stays.
    Raises UserError if the file cannot be made, or is open to others."""
    path = server_key_file(config)
    if not config.actor_rollout_ref.rollout.server_api_key_file and not path.exists():
        make_folder(path.parent, "trainer.run_dir")
        _make(path)
    read_server_key(path)
    return path


def given_server_key(config: Config) -> ServerKey | None:
    """Return the key that goes with requests to the servers that the config names. Returns None
    without a file, because the servers may be anybody's."""
    path = config.actor_rollout_ref.rollout.server_api_key_file
    return read_server_key(path) if path else None


def read_server_key(path: str | Path, name: str = KEY) -> ServerKey:
    """Return the key in a file.

    Args:
        path: the file.
        name: the config key that names it.

    Raises:
        UserError: if it is missing, accessible to others, or holds no key.
    """
    try:
        with open(path, encoding="ascii") as file:
            mode = os.fstat(file.fileno()).st_mode
            key = file.read(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name} is {path}, which cannot be read ({error}); give the file of a key.") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(
            f"{name} is {path}, readable or writable for others (mode {stat.S_IMODE(mode):o}); chmod 600 "
            f"it, on a file system that keeps modes, and make a new key if others may have read it."
        )
    if not re.fullmatch(r"[!-~]+", key):
        raise UserError(f"{name} is {path}, which does not hold a key: one word of printable ASCII; correct it.")
    return ServerKey(key)


def key_header(key: str | None) -> dict[str, str]:
    """Return the header that carries a key; {} without a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def _make(path: Path) -> None:
    """Make the key file atomically, as a link to a complete file: the first of several processes
    wins."""
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)  # of mode 600
        with open(handle, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(_NUM_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return
        except OSError:  # no links here
            os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path} cannot be made ({error.strerror}); choose another trainer.run_dir.") from error
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
