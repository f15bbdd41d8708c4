"""The folder of the demos' models and downloads, made once."""

import os
from pathlib import Path

from megatron_dapo.storage.run_folder import make_folder

ROOT = Path(__file__).parents[1]


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/megatron_dapo, or .cache/ in the repository without that variable.

    Make it if it is missing. Raise UserError if it is not writable.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    return make_folder(Path(home) / "megatron_dapo" if home else ROOT / ".cache", "XDG_CACHE_HOME")
