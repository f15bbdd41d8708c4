"""Checks across the rollout's keys: sampling, SGLang servers, several turns.

`own_host` asks this machine too, so it runs with the checks of files.
"""

import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from megatron_dapo.checks.known_mistakes import known_mistakes
from megatron_dapo.config.built_ins import BUILT_IN_ENVIRONMENTS, IMPORT_PATH
from megatron_dapo.config.derived import (
    is_server_url,
    may_give_own_reward,
    server_expert_parts,
    server_option,
    starts_servers,
)
from megatron_dapo.config.key_names import AGENT, MULTI_TURN, ROLLOUT
from megatron_dapo.config.keys import value_of
from megatron_dapo.config.loader import nearest
from megatron_dapo.config.schema.config import Config
from megatron_dapo.estimates.server_states import RATIO_OPTION, states_ratio

_VARIABLE = re.compile(r"[A-Za-z_]\w*")
EXTRA_ARGS = f"{ROLLOUT}.server.extra_args"
_OWN_SERVERS = f"leave it out, or start such servers yourself and name them in {ROLLOUT}.server_urls"
_ONE_SERVER = (
    f"which ranks a server has is {ROLLOUT}.server.tensor_model_parallel_size, on nodes_per_server nodes; more servers "
    f"are num_servers"
)
_RUNS_CODE = "with it code or templates that a checkpoint or a request brings would run in the server; leave it out"
# options of `sglang.launch_server` set by the launcher, or opening a server to others -> cure
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
    **dict.fromkeys(
        ("--enable-deterministic-inference", "--rl-on-policy-target"), f"set {ROLLOUT}.deterministic"
    ),
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
# options of DP attention: with several nodes its sockets (zmq) take pickles of everybody
DP_ATTENTION = ("--enable-dp-attention", "--attn-dp-size", "--attention-data-parallel-size", "--dwdp-size")


def top_k(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.top_k != -1 and rollout.top_k < 1:
        yield f"{ROLLOUT}.top_k is {rollout.top_k}, but must be 1 or more, or -1 for off."


def _held_out_answers(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.val_temperature == 0.0 and rollout.val_n > 1:
        yield (
            f"{ROLLOUT}.val_n is {rollout.val_n}, but at val_temperature 0 all answers to a prompt are the same; "
            f"set val_n to 1, or raise val_temperature."
        )


def _request_timeout(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.request_timeout_s > rollout.step_timeout_s:
        yield (
            f"{ROLLOUT}.request_timeout_s is {rollout.request_timeout_s:g}, longer than the whole step's "
            f"{ROLLOUT}.step_timeout_s {rollout.step_timeout_s:g}; lower the first or raise the second."
        )


def deterministic(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.deterministic and rollout.max_staleness:
        yield (
            f"{ROLLOUT}.deterministic is true, but with {ROLLOUT}.max_staleness {rollout.max_staleness} it depends on "
            f"timing which weights write a token; set max_staleness to 0, or deterministic to false."
        )


def _environment_reward(config: Config) -> Iterator[str]:
    if config.reward.function == "environment" and not may_give_own_reward(config):
        yield (
            f"reward.function is environment, which leaves the reward to one, or to an agent outside a sandbox, but "
            f"there is neither; set {MULTI_TURN}.enable or {AGENT}.enable to true, or name another reward.function."
        )


def multi_turn(config: Config) -> Iterator[str]:
    if config.actor_rollout_ref.rollout.multi_turn.enable:
        yield from known_mistakes(_TURN_CHECKS, config)


def _environment(config: Config) -> Iterator[str]:
    name = config.actor_rollout_ref.rollout.multi_turn.environment
    if name not in BUILT_IN_ENVIRONMENTS and not IMPORT_PATH.fullmatch(name):
        near = nearest(name, BUILT_IN_ENVIRONMENTS)
        yield (
            f"{MULTI_TURN}.environment is {name!r}, which is neither {', '.join(BUILT_IN_ENVIRONMENTS)} nor of the "
            f"form package.module:Class{f'; the nearest is {near}' if near else ''}."
        )


def secret_names(section: str, config: Config) -> Iterator[str]:
    """Yield mistakes in the `pass_env` of multi_turn or agent."""
    yield from variable_names(f"{section}.pass_env", value_of(config, f"{section}.pass_env"))


def turn_length(section: str, config: Config) -> Iterator[str]:
    """Yield a mistake if multi_turn or agent allow a turn the whole length of a response."""
    cap = value_of(config, f"{section}.max_tokens_per_turn")
    limit = config.data.max_response_length
    if cap is not None and cap >= limit:
        yield (
            f"{section}.max_tokens_per_turn is {cap}, but must be below data.max_response_length {limit}, which is of "
            f"all turns of a response; lower it, or set it to null."
        )


def _turn_timeout(config: Config) -> Iterator[str]:
    keys = config.actor_rollout_ref.rollout.multi_turn
    if keys.step_timeout_s > keys.timeout_s:
        yield (
            f"{MULTI_TURN}.step_timeout_s is {keys.step_timeout_s:g}, longer than the whole trajectory's timeout_s "
            f"{keys.timeout_s:g}; lower the first or raise the second."
        )


def _trajectory_timeout(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.multi_turn.timeout_s > rollout.step_timeout_s:
        yield (
            f"{MULTI_TURN}.timeout_s is {rollout.multi_turn.timeout_s:g}, longer than the whole step's "
            f"{ROLLOUT}.step_timeout_s {rollout.step_timeout_s:g}; lower the first or raise the second."
        )


_TURN_CHECKS = (
    partial(secret_names, MULTI_TURN),
    _environment,
    partial(turn_length, MULTI_TURN),
    _turn_timeout,
    _trajectory_timeout,
)


def variable_names(key: str, names: Sequence[str]) -> Iterator[str]:
    """Yield a mistake for each entry unfit as the name of an environment variable. The entry is not
    shown: it may be a value."""
    for number, name in enumerate(names):
        if not is_variable_name(name):
            yield (
                f"{key}[{number}] is no name of an environment variable; give its name alone, the value stays in the "
                f"environment."
            )


def is_variable_name(text: str) -> bool:
    """Return whether a text may be the name of an environment variable."""
    return bool(_VARIABLE.fullmatch(text))


def _server_lists(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.server_urls and rollout.server_urls_file:
        yield (
            f"{ROLLOUT}.server_urls and {ROLLOUT}.server_urls_file {rollout.server_urls_file!r} both name servers; "
            f"give one of them."
        )


def server_urls(config: Config) -> Iterator[str]:
    urls = config.actor_rollout_ref.rollout.server_urls
    for url in dict.fromkeys(urls):
        if not is_server_url(url):
            yield f"{ROLLOUT}.server_urls holds {url!r}, which is not of the form http://host:port; correct it."
        elif urls.count(url) > 1:
            yield f"{ROLLOUT}.server_urls holds {url} {urls.count(url)} times; keep one."


def _server_nodes(config: Config) -> Iterator[str]:
    server = config.actor_rollout_ref.rollout.server
    key, groups = f"{ROLLOUT}.server.nnodes", server.nnodes // server.nodes_per_server
    if server.nnodes % server.nodes_per_server:
        yield (
            f"{key} is {server.nnodes}, not a multiple of {ROLLOUT}.server.nodes_per_server {server.nodes_per_server}: "
            f"neighbouring nodes make a server; change one of them."
        )
    elif server.nnodes and server.num_servers % groups:
        over = f" / nodes_per_server {server.nodes_per_server}" if server.nodes_per_server > 1 else ""
        yield (
            f"{ROLLOUT}.server.num_servers is {server.num_servers}, not a multiple of {key} {server.nnodes}{over}: "
            f"every server node starts as many; change one of them."
        )


def _gpus_of_server_nodes(config: Config) -> Iterator[str]:
    server = config.actor_rollout_ref.rollout.server
    if server.tensor_model_parallel_size % server.nodes_per_server:
        yield (
            f"{ROLLOUT}.server.tensor_model_parallel_size is {server.tensor_model_parallel_size}, not a multiple of "
            f"{ROLLOUT}.server.nodes_per_server {server.nodes_per_server}: each node of a server gives as many GPUs; "
            f"change one of them."
        )


def _dp_attention(config: Config) -> Iterator[str]:
    nodes = config.actor_rollout_ref.rollout.server.nodes_per_server
    for option, _ in given_options(config, DP_ATTENTION) if nodes > 1 else ():
        yield (
            f"{EXTRA_ARGS} has {option}, but with {ROLLOUT}.server.nodes_per_server {nodes} DP attention opens "
            f"ports that run what anybody sends, without the run's key; leave it out, or set nodes_per_server to 1."
        )


def given_options(config: Config, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (option of `extra_args`, one of these names that it stands for): SGLang takes an
    option's beginning for the whole of it."""
    arguments = config.actor_rollout_ref.rollout.server.extra_args
    for option in dict.fromkeys(argument.partition("=")[0] for argument in arguments if argument.startswith("--")):
        whole = next((name for name in names if len(option) > 2 and name.startswith(option)), None)
        if whole is not None:
            yield option, whole


def extra_args(config: Config) -> Iterator[str]:
    for option, whole in given_options(config, REFUSED_OPTIONS):
        said = option if whole == option else f"{option}, which may stand for {whole}"
        yield f"{EXTRA_ARGS} has {said}: {REFUSED_OPTIONS[whole]}."
    quantization = server_option(config, "--quantization")
    is_own = config.actor_rollout_ref.rollout.quantization is not None  # checks/fp8_server_checks.py
    if quantization is not None and not is_own and server_option(config, "--load-format") != "flash_rl":
        yield (
            f"{EXTRA_ARGS} has --quantization {quantization}, whose parameters cannot take the trainer's bfloat16 "
            f"weights; add --load-format flash_rl (dense Qwen2 and Qwen3), set {ROLLOUT}.quantization to fp8 in its "
            f"place (mixtures), or leave it out."
        )


def _verify(config: Config) -> Iterator[str]:
    parts = server_expert_parts(config, config.actor_rollout_ref.rollout.server.tensor_model_parallel_size)
    if config.weight_sync.verify and parts > 1:
        yield (
            f"weight_sync.verify is true, but {EXTRA_ARGS} gives each of a server's GPUs one of {parts} parts of the "
            f"experts, and the comparison is of all of them: the first push would end the run; set verify to false."
        )


def _states_ratio(config: Config) -> Iterator[str]:
    if states_ratio(config) is None:
        yield (
            f"{EXTRA_ARGS} has {RATIO_OPTION} {server_option(config, RATIO_OPTION)}, but the bytes of states per byte "
            f"of keys and values must be a number above 0; correct it."
        )


def own_host(config: Config) -> Iterator[str]:
    """Yield a mistake for servers of the trainer's machine unable to bind to their host as one of
    its addresses."""
    server = config.actor_rollout_ref.rollout.server
    if server.nnodes or not starts_servers(config):
        return
    try:
        family, kind, _, _, address = socket.getaddrinfo(server.host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        yield (
            f"{ROLLOUT}.server.host is {server.host!r}, which is no address of this machine "
            f"({getattr(error, 'strerror', None) or error}); give 127.0.0.1, 0.0.0.0 or another address of it, or the "
            f"URLs of servers elsewhere in {ROLLOUT}.server_urls."
        )


ROLLOUT_CHECKS = (
    top_k,
    _held_out_answers,
    _request_timeout,
    deterministic,
    _environment_reward,
    multi_turn,
    _server_lists,
    server_urls,
    _server_nodes,
    _gpus_of_server_nodes,
    extra_args,
    _dp_attention,
    _states_ratio,
    _verify,
)
