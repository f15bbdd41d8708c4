"""What the keys of the SGLang servers demand of each other; `own_host` asks this machine as well."""

import socket
from collections.abc import Iterator

from megatron_dapo.config.derived import is_server_url, starts_servers
from megatron_dapo.config.mistake import Mistake
from megatron_dapo.config.schema import Config

ROLLOUT = "actor_rollout_ref.rollout"
EXTRA_ARGS = f"{ROLLOUT}.server.extra_args"
_OWN_SERVERS = f"leave it out, or start such servers yourself and name them in {ROLLOUT}.server_urls"
_ONE_SERVER = f"which ranks a server has is {ROLLOUT}.server.tensor_model_parallel_size; more servers are num_servers"
_RUNS_CODE = "with it code or templates that a checkpoint or a request brings would run in the server; leave it out"
# options of `sglang.launch_server` that the launcher sets itself, or that open a server to more than this run -> cure
REFUSED_OPTIONS = {
    "--host": f"set {ROLLOUT}.server.host",
    "--port": "ports are chosen at start, or from `launch.sglang_server --first-port` on",
    "--model": "set actor_rollout_ref.model.path",
    "--model-path": "set actor_rollout_ref.model.path",
    "--tokenizer-path": "set actor_rollout_ref.model.path; the trainer and the servers need the same tokens",
    "--dtype": "set actor_rollout_ref.actor.megatron.dtype",
    "--device": "servers are on the device that the trainer is on; leave it out",
    "--max-total-tokens": f"set {ROLLOUT}.server.max_total_tokens",
    "--max-running-requests": f"set {ROLLOUT}.server.max_running_requests",
    "--mem-fraction-static": f"set {ROLLOUT}.server.mem_fraction_static",
    "--config": "a file of further options is not looked into; give the options themselves",
    **dict.fromkeys(("--tp-size", "--tensor-parallel-size"), f"set {ROLLOUT}.server.tensor_model_parallel_size"),
    **dict.fromkeys(
        ("--dp-size", "--data-parallel-size", "--pp-size", "--pipeline-parallel-size", "--nnodes", "--node-rank",
         "--dist-init-addr", "--nccl-init-addr", "--base-gpu-id", "--gpu-id-step"),
        _ONE_SERVER,
    ),
    **dict.fromkeys(
        ("--trust-remote-code", "--trust-request-chat-template", "--enable-custom-logit-processor",
         "--custom-weight-loader", "--forward-hooks"),
        _RUNS_CODE,
    ),
    **dict.fromkeys(
        ("--api-key", "--admin-api-key"), f"the run has a key of its own; {ROLLOUT}.server_api_key_file names another"
    ),
    **dict.fromkeys(
        ("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-keyfile-password", "--enable-ssl-refresh",
         "--grpc-mode", "--grpc-port", "--smg-grpc-mode", "--encoder-only", "--use-ray", "--tokenizer-worker-num",
         "--enable-http-worker-reuseport", "--fastapi-root-path", "--disaggregation-mode", "--kv-events-config",
         "--load-publish-endpoint", "--weight-cache-socket", "--remote-instance-weight-loader-backend"),
        _OWN_SERVERS,
    ),
}  # fmt: skip


def server_urls(config: Config) -> Iterator[Mistake]:
    rollout = config.actor_rollout_ref.rollout
    urls = rollout.server_urls
    if urls and rollout.server_urls_file:
        yield Mistake(
            (f"{ROLLOUT}.server_urls", f"{ROLLOUT}.server_urls_file"),
            f"{ROLLOUT}.server_urls and {ROLLOUT}.server_urls_file {rollout.server_urls_file!r} both name servers; "
            f"give one of them.",
        )
    for url in dict.fromkeys(urls):
        if not is_server_url(url):
            yield Mistake(
                (f"{ROLLOUT}.server_urls",),
                f"{ROLLOUT}.server_urls holds {url!r}, which is not of the form http://host:port; correct it.",
            )
        elif urls.count(url) > 1:
            yield Mistake(
                (f"{ROLLOUT}.server_urls",), f"{ROLLOUT}.server_urls holds {url} {urls.count(url)} times; keep one."
            )


def server_nodes(config: Config) -> Iterator[Mistake]:
    server = config.actor_rollout_ref.rollout.server
    if server.nnodes and server.num_servers % server.nnodes:
        yield Mistake(
            (f"{ROLLOUT}.server.num_servers", f"{ROLLOUT}.server.nnodes"),
            f"{ROLLOUT}.server.num_servers is {server.num_servers}, not a multiple of {ROLLOUT}.server.nnodes "
            f"{server.nnodes}: every server node starts as many; change one of them.",
        )


def extra_args(config: Config) -> Iterator[Mistake]:
    arguments = config.actor_rollout_ref.rollout.server.extra_args
    options = dict.fromkeys(argument.partition("=")[0] for argument in arguments if argument.startswith("--"))
    for option in options:
        # SGLang takes an option's beginning for the whole of it
        whole = next((name for name in REFUSED_OPTIONS if len(option) > 2 and name.startswith(option)), None)
        if whole is not None:
            said = option if whole == option else f"{option}, which may stand for {whole}"
            yield Mistake((EXTRA_ARGS,), f"{EXTRA_ARGS} has {said}: {REFUSED_OPTIONS[whole]}.")
    if "--quantization" in options and _value_of("--load-format", arguments) != "flash_rl":
        yield Mistake(
            (EXTRA_ARGS,),
            f"{EXTRA_ARGS} has --quantization {_value_of('--quantization', arguments)}, whose parameters cannot take "
            f"the trainer's bfloat16 weights; add --load-format flash_rl (dense Qwen2 and Qwen3), or leave it out.",
        )


def _value_of(option: str, arguments: list[str]) -> str | None:
    """The value that the server would take for an option: the last one given."""
    found = None
    for argument, following in zip(arguments, [*arguments[1:], None], strict=True):
        name, equals, value = argument.partition("=")
        if name == option:
            found = value if equals else following
    return found


def own_host(config: Config) -> Iterator[Mistake]:
    """Where servers are on the trainer's machine, they bind to an address of it."""
    server = config.actor_rollout_ref.rollout.server
    if server.nnodes or not starts_servers(config):
        return
    try:
        family, kind, _, _, address = socket.getaddrinfo(server.host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        yield Mistake(
            (f"{ROLLOUT}.server.host", f"{ROLLOUT}.server.nnodes", f"{ROLLOUT}.server_urls", "trainer.replay"),
            f"{ROLLOUT}.server.host is {server.host!r}, which is no address of this machine "
            f"({getattr(error, 'strerror', None) or error}); give 127.0.0.1, 0.0.0.0 or another address of it, or the "
            f"URLs of servers elsewhere in {ROLLOUT}.server_urls.",
        )


SERVER_CHECKS = (server_urls, server_nodes, extra_args)
