"""The SGLang client against answers of a scripted server."""

import asyncio
import pickle
import re
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.servers import client as client_module
from megatron_dapo.servers.client import FOREIGN_VERSION, SamplingParams, SGLangClient, generation_of
from megatron_dapo.servers.server_error import ServerError
from megatron_dapo.servers.speedometer import Load

pytestmark = pytest.mark.unit

SAMPLING = SamplingParams(max_new_tokens=4, temperature=0.7, stop_token_ids=(5,))


def ask(routes: dict[str, Callable | dict], question: Callable, **client_options):
    """The result of `question(client)` on a server with these routes: JSON answers,
    or functions of the request."""

    async def run():
        application = web.Application()
        for route, answer in routes.items():
            method, path = route.split()
            application.router.add_route(method, path, answer if callable(answer) else always(answer))
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            async with SGLangClient(f"http://127.0.0.1:{port}/", **client_options) as client:
                return await question(client)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


async def json_answer(content: dict, status: int = 200) -> web.Response:
    return web.json_response(content, status=status)


def always(content: dict, status: int = 200):
    async def handler(request: web.Request) -> web.Response:
        return await json_answer(content, status)

    return handler


def answer(tokens=(7, 8, 5), spans=(("3", 0, 3),), reason="stop", **meta) -> dict:
    return {
        "output_ids": list(tokens),
        "meta_info": {
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "finish_reason": {"type": reason},
            "weight_version": spans[-1][0] if spans else "3",
            "weight_versions": [{"version": version, "start": start, "end": end} for version, start, end in spans],
            **meta,
        },
    }


def generate(content: dict):
    return ask({"POST /generate": content}, lambda client: client.generate([1, 2], SAMPLING, 5.0))


def test_a_response_is_token_ids_with_their_log_probs_and_weight_versions():
    generation = generate(answer(spans=(("3", 0, 1), ("4", 1, 3)), num_retractions=1, cached_tokens=2))
    assert generation.tokens.tolist() == [7, 8, 5]
    assert generation.log_probs.tolist() == [-0.5, -0.5, -0.5]
    assert generation.finish_reason == "stop"
    assert generation.weight_versions.tolist() == [3, 4, 4]
    assert (generation.num_retractions, generation.num_cached_tokens) == (1, 2)


def test_every_sampling_parameter_is_sent_so_that_no_default_of_the_server_acts():
    seen = {}

    async def handler(request: web.Request) -> web.Response:
        seen.update(await request.json())
        return await json_answer(answer())

    ask({"POST /generate": handler}, lambda client: client.generate((1, 2), SAMPLING, 5.0))
    assert seen["input_ids"] == [1, 2] and seen["return_logprob"] is True
    assert seen["sampling_params"] == {
        "max_new_tokens": 4,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "stop_token_ids": [5],
        "stop": [],
        "sampling_seed": 0,
    }
    assert "text" not in seen


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"text": "no tokens"}, "meta_info"),
        (answer((7, 8, 9, 9, 5), (("3", 0, 5),)), "5 tokens where 4 were allowed"),
        (answer() | {"output_ids": [7, 8]}, "log-probs"),
        (answer() | {"output_ids": [7, 8, 6]}, "log-probs"),
        (answer(output_token_logprobs=None), "log-probs"),
        (answer(output_token_logprobs=[[None, 7, None], [-1, 8, None], [-1, 5, None]]), "log-prob None, no number"),
        (answer(spans=(("3", 0, 2),)), "cover 2 of 3"),
        (answer(weight_versions=None), "cover 0 of 3"),
        (answer(spans=(("3", 0, 1), ("4", 2, 3))), "gap"),
        (answer(reason="exploded"), "exploded"),
    ],
)
def test_an_answer_that_contradicts_itself_is_an_error_that_names_url_and_route(content, complaint):
    with pytest.raises(ServerError, match=complaint) as error:
        generate(content)
    assert "http://127.0.0.1:" in str(error.value) and "/generate" in str(error.value)


def test_the_use_of_a_cache_and_of_places_for_requests_is_that_of_all_its_ranks():
    def load(answer: dict) -> Load:
        return ask({"GET /v1/loads": answer}, lambda client: client.load(5.0))

    names = ("num_used_tokens", "max_total_num_tokens", "num_running_reqs", "max_running_requests")
    loads = [dict(zip(names, numbers, strict=True)) for numbers in ((10, 100, 3, 8), (200, 300, 1, 8))]
    assert load({"loads": loads}) == Load(210 / 400, 4 / 16, None)
    for nonsense in ({"loads": []}, {"loads": [{"num_used_tokens": 1}]}, {}):
        with pytest.raises(ServerError, match="/v1/loads"):
            load(nonsense)


def test_an_abort_returns_what_there_is():
    generation = generate(answer(tokens=(), spans=(("3", 0, 0),), reason="abort"))
    assert generation.finish_reason == "abort" and len(generation.tokens) == len(generation.weight_versions) == 0
    # it never ran
    assert generate(answer(tokens=(), reason="abort", weight_versions=None)).weight_versions.size == 0


def test_a_version_we_did_not_set_is_foreign():
    assert generate(answer(spans=(("default", 0, 3),))).weight_versions.tolist() == [FOREIGN_VERSION] * 3
    info = {"GET /model_info": {"weight_version": "default"}}
    assert ask(info, lambda client: client.weight_version()) == FOREIGN_VERSION
    assert ask({"GET /model_info": {"weight_version": "12"}}, lambda client: client.weight_version()) == 12


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=6))
def test_spans_give_each_token_its_version(runs):
    versions = [version for version, length in runs for _ in range(length)]
    spans, start = [], 0
    for version, length in runs:
        spans.append((str(version), start, start + length))
        start += length
    assert generation_of(answer(tokens=range(start), spans=spans)).weight_versions.tolist() == versions


def test_a_refusal_carries_status_and_body():
    refuse = always({"error": {"message": "too long"}}, status=400)
    with pytest.raises(ServerError, match="HTTP 400.*too long") as error:
        ask({"POST /generate": refuse}, lambda client: client.generate([1], SAMPLING, 5.0))
    assert error.value.status == 400
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_success_false_is_a_refusal_whatever_the_status():
    with pytest.raises(ServerError, match="no session"):
        ask(
            {"POST /end_weight_update": {"success": False, "message": "no session"}},
            lambda client: client.end_weight_update(),
        )


def test_a_server_that_does_not_answer_in_time_is_named():
    async def sleep(request: web.Request) -> web.Response:
        await asyncio.sleep(0.5)
        return web.Response()

    with pytest.raises(ServerError, match=r"/flush_cache: no answer: nothing within 0.1 s") as error:
        ask({"POST /flush_cache": sleep}, lambda client: client.post("/flush_cache", {}, timeout_s=0.1))
    assert error.value.status is None


def test_a_server_that_is_not_there_is_named_after_the_deadline():
    async def run():
        async with SGLangClient("http://127.0.0.1:9") as client:
            await client.wait_healthy(0.3)

    with pytest.raises(ServerError, match="127.0.0.1:9.*not healthy within 0.3 s"):
        asyncio.run(run())


def test_health_waits_while_the_server_starts():
    answers = iter([503, 503, 200])

    async def ready(request: web.Request) -> web.Response:
        return web.Response(status=next(answers))

    ask({"GET /ready": ready}, lambda client: client.wait_healthy(5.0))
    assert next(answers, None) is None


def test_a_paused_server_is_healthy():
    routes = {"GET /ready": always({}, status=503), "GET /server_info": {"version": "0.5.23"}}
    ask(routes, lambda client: client.check_health())
    assert ask(routes, lambda client: client.is_paused())
    with pytest.raises(ServerError, match="/server_info"):
        ask({"GET /ready": always({}, status=503)}, lambda client: client.check_health())


def test_a_server_that_does_not_say_that_it_is_paused_is_not():
    assert not ask({"GET /ready": {}}, lambda client: client.is_paused())
    with pytest.raises(ServerError, match="HTTP 500"):
        ask({"GET /ready": always({}, status=500)}, lambda client: client.is_paused())


@pytest.mark.parametrize("session", [200, 400])  # a push left one open, or not
def test_what_takes_no_requests_when_told_to_continue_is_ill_and_not_paused(session):
    """SGLang tells both by one status."""
    paused = {"it is": True}

    async def continue_(request: web.Request) -> web.Response:
        paused["it is"] = False
        return web.json_response({})

    async def ready(request: web.Request) -> web.Response:
        return web.Response(status=503 if paused["it is"] else 200)

    routes = {"POST /end_weight_update": always({}, status=session), "POST /continue_generation": continue_}
    ask(routes | {"GET /ready": ready}, lambda client: client.resume())
    assert not paused["it is"]
    ill = routes | {"GET /ready": always({}, status=503)}
    with pytest.raises(ServerError, match="/health: HTTP 503"):
        ask(ill | {"GET /health": always({}, status=503)}, lambda client: client.resume())
    # with the token it is well again
    ask(ill | {"GET /health": {}}, lambda client: client.resume())


def test_a_scheduler_that_hangs_is_not_resumed():
    async def nothing(request: web.Request) -> web.Response:
        await asyncio.sleep(0.5)
        return web.Response()

    with pytest.raises(ServerError, match="/end_weight_update: no answer"):
        ask({"POST /end_weight_update": nothing}, lambda client: client.resume(timeout_s=0.1))


def test_the_api_key_goes_into_the_header():
    async def check(request: web.Request) -> web.Response:
        return web.Response(status=200 if request.headers.get("Authorization") == "Bearer secret" else 401)

    ask({"GET /ready": check}, lambda client: client.check_health(), api_key="secret")
    with pytest.raises(ServerError, match="HTTP 401"):
        ask({"GET /ready": check}, lambda client: client.check_health())


def test_a_weight_update_names_its_tensors_and_its_version_as_text():
    seen = {}

    async def handler(request: web.Request) -> web.Response:
        seen.update(await request.json())
        return await json_answer({"success": True})

    ask(
        {"POST /update_weights_from_distributed": handler},
        lambda client: client.update_weights_from_distributed(
            ["w"], ["float32"], [(2, 3)], group_name="g", weight_version=7, flush_cache=True
        ),
    )
    assert seen == {
        "names": ["w"],
        "dtypes": ["float32"],
        "shapes": [[2, 3]],
        "group_name": "g",
        "flush_cache": True,
        "weight_version": "7",
    }


def test_a_connection_that_was_idle_is_used_no_more_before_a_server_closes_it(monkeypatch):
    monkeypatch.setattr(client_module, "IDLE_CONNECTION_S", 0.1)
    ports = []

    async def info(request: web.Request) -> web.Response:
        ports.append(request.transport.get_extra_info("peername")[1])
        return await json_answer({"weight_version": "3"})

    async def ask_with_pauses(client: SGLangClient) -> None:
        for pause_s in (0.0, 0.0, 0.3):
            await asyncio.sleep(pause_s)
            await client.weight_version()

    ask({"GET /model_info": info}, ask_with_pauses)
    assert ports[0] == ports[1] != ports[2]


def test_a_server_keeps_idle_connections_for_longer_than_a_client():
    # to import it takes 5 s
    settings = Path(distribution("sglang").locate_file("sglang/srt/environ.py")).read_text()
    (of_server_s,) = re.findall(r"SGLANG_TIMEOUT_KEEP_ALIVE = EnvInt\((\d+)\)", settings)
    assert client_module.IDLE_CONNECTION_S < float(of_server_s) / 2
