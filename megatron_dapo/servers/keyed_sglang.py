"""An SGLang server that answers nobody without the run's key.

python -m megatron_dapo.servers.keyed_sglang KEY_FILE [argument of sglang.launch_server ...]

SGLang's own way, --api-key, shows the key in the list of processes and in its log. It also leaves
routes open: /health*, which generates a token, /ready*, /metrics*, and OPTIONS. Here the key comes
from a file, and every route demands it. SGLang gets it too, because it asks itself for a first
answer.
"""

import os
import secrets
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.exit_codes import USER_ERROR_EXIT_CODE
from megatron_dapo.common.large_imports import large_imports
from megatron_dapo.storage.server_key import read_server_key

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable, Callable], Awaitable[None]]


SERVED_MODELS = "megatron_dapo.servers.served_models"


class KeyGuard:
    """ASGI middleware: a request without the key gets 401; a websocket without it is closed."""

    def __init__(self, app: App, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Callable, send: Callable) -> None:
        sent = dict(scope.get("headers") or []).get(b"authorization", b"")
        if scope["type"] == "lifespan" or secrets.compare_digest(sent, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b"This server demands the key of its run."})
        else:
            await send({"type": "websocket.close", "code": 1008})


def main() -> int:
    """Run the server until it ends; return the exit code."""
    key_file, *arguments = sys.argv[1:]
    # read at SGLang's import, by forks too
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", SERVED_MODELS)
    with large_imports():
        from sglang.launch_server import run_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args
        from sglang.srt.utils import kill_process_tree

    try:
        key = read_server_key(key_file)
        load_plugins()
        settings = prepare_server_args(arguments)
        _check_reach(settings)
    except UserError as error:
        print(error.report(), file=sys.stderr, flush=True)
        return USER_ERROR_EXIT_CODE
    settings.api_key = key  # a `ServerKey`, which a log of all arguments does not show
    with large_imports():
        from sglang.srt.entrypoints.http_server import app

    app.add_middleware(KeyGuard, key=key)
    try:
        run_server(settings)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


def _check_reach(settings: Any) -> None:
    """Raise UserError for arguments with a key of their own, or a listener outside our guard."""
    wrong = {
        "--api-key": settings.api_key,
        "--admin-api-key": settings.admin_api_key,
        "--tokenizer-worker-num": settings.tokenizer_worker_num > 1,
        "--grpc-port": settings.grpc_port,
        "--grpc-mode": settings.grpc_mode,
        "--smg-grpc-mode": settings.smg_grpc_mode,
        "--encoder-only": settings.encoder_only,
        "--use-ray": settings.use_ray,
        "SGLANG_RUST_SERVER (in the environment)": os.environ.get("SGLANG_RUST_SERVER"),
    }
    options = ", ".join(option for option, value in wrong.items() if value)
    if options:
        raise UserError(
            f"The server is given {options} (actor_rollout_ref.rollout.server.extra_args), with which not every "
            f"request to it would have to bring the run's key; leave it out, or start such servers yourself, and give "
            f"URLs."
        )


if __name__ == "__main__":
    sys.exit(main())
