"""The environment variables of worker processes: the run's, without its secrets."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from megatron_dapo.common.child_environment import COMMON, ONE_THREAD
from megatron_dapo.common.errors import UserError

_SECRETS = (
    *("*KEY", "*KEYS", "*KEY_*", "*TOKEN", "*TOKENS", "*TOKEN_*", "*SECRET*", "*PASSW*", "*PASSPHRASE*", "*_PASS"),
    *("*CREDENTIAL*", "*_PWD", "*_PAT", "*_AUTH", "*_AUTH_*", "*COOKIE*", "*_DSN", "*WEBHOOK*", "*JWT*", "KRB5CCNAME"),
    *("AWS_*", "AZURE_*", "GOOGLE_*", "GCLOUD_*", "CLOUDSDK_*", "S3_*", "MINIO_*", "OCI_*"),
)
"""Patterns of names, in capitals. SSH_AUTH_SOCK is one: it signs with the user's keys."""
_PASSWORD_IN_URL = re.compile(r"://[^/?#\s]*:[^/?#\s]*@")


def worker_environment(environment: Mapping[str, str], pass_env: Sequence[str], key: str) -> dict[str, str]:
    """Return the environment without secrets, except those in `pass_env`; one thread; our import
    paths.

    Raises UserError for an unset name of `pass_env`, the value of the config's `key`.
    """
    missing = [name for name in pass_env if name not in environment]
    if missing:
        raise UserError(
            f"{key} names {', '.join(missing)}, which the run does not have in its environment; set it for the process "
            f"of rank 0, or take the name out."
        )
    kept = {name: value for name, value in environment.items() if name in pass_env or not is_secret(name, value)}
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return kept | COMMON | ONE_THREAD | {"PYTHONPATH": paths}


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable looks like a secret: by its name, or as a URL with a password."""
    return any(fnmatchcase(name.upper(), pattern) for pattern in _SECRETS) or bool(_PASSWORD_IN_URL.search(value))
