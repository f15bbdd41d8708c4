"""Sends a converted model to a repository of the Hugging Face Hub.

Address and token are those of every program of huggingface_hub: HF_ENDPOINT, and HF_TOKEN or the
file of `hf auth login`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_dapo.common.errors import UserError

TIMEOUT_S = 300.0  # of a silent hub; a large commit takes it a minute
# files of an earlier model in the repository, if the new one has none of that name
_REPLACED = ["*.safetensors", "*.safetensors.index.json"]


def open_repository(name: str) -> str:
    """Return the full name of a repository, OWNER/NAME; make it, private, if there is none. Raises
    UserError."""
    cure = "give OWNER/NAME, and in HF_TOKEN a token that may write there"
    return _attempt(name, lambda api: api.create_repo(name, private=True, exist_ok=True).repo_id, cure)


def push(name: str, folder: str | Path) -> str:
    """Send a model's folder to a repository, in place of an earlier model; return the commit's
    address. Raises UserError; the folder stays."""
    files = dict(folder_path=folder, delete_patterns=_REPLACED, commit_message="A model of megatron_dapo")
    cure = f"the folder is whole: `hf upload {name} {folder}` sends it again"
    return _attempt(name, lambda api: api.upload_folder(repo_id=name, **files).commit_url, cure)


def _attempt(name: str, work: Callable[[Any], str], cure: str) -> str:
    """Return the work's result, given the API. Raises UserError, with the cure and without the
    token."""
    import httpx
    import huggingface_hub

    token = huggingface_hub.get_token()
    if not token:
        raise UserError(f"--push-to-hub is {name}, but there is no token; set HF_TOKEN, or run `hf auth login`.")
    # huggingface_hub's own client waits for ever
    huggingface_hub.set_client_factory(lambda: httpx.Client(follow_redirects=True, timeout=TIMEOUT_S))
    api = huggingface_hub.HfApi(token=token)
    try:
        return work(api)
    except Exception as error:  # of any of its libraries
        reason = f"{type(error).__name__}: {error}".replace(token, "***")[:300]
        raise UserError(f"--push-to-hub is {name}, but {api.endpoint} did not take it ({reason}); {cure}.") from None
