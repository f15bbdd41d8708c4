"""A judge behind an OpenAI-compatible endpoint: its questions, the reading of answers,
the cost of a failure."""

import asyncio
import gzip
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.data.samples import Prompt
from megatron_dapo.rewards.judge import Judge
from megatron_dapo.rewards.reward_result import RewardResult
from megatron_dapo.rewards.scorers import Scorers, WeightedScorer
from megatron_dapo.rollout.build_rollout import make_scorers

pytestmark = pytest.mark.unit

SECRET = "sk-very-secret"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "12+34?"}]
PROMPT = Prompt(0, "key", (1,), "", "any", "46", messages=MESSAGES)
RIGHT = RewardResult(1.0, True)


@pytest.fixture(autouse=True)
def one_search_process(monkeypatch):
    """Its start is most of a test's time."""
    monkeypatch.setattr("megatron_dapo.rewards.judge._SEARCH_PROCESSES", 1)


class Endpoint:
    """Answers with the result of `answer` for a question. hold: while it is not set, answers wait.
    statuses: of the next requests, before it answers again."""

    def __init__(self, answer=lambda question: "Score: 5", statuses=()):
        self.answer = answer
        self.statuses = list(statuses)
        self.requests: list[dict] = []
        self.keys: list[str | None] = []
        self.num_open = self.max_open = 0
        self.hold = asyncio.Event()
        self.hold.set()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            await self.hold.wait()
        finally:
            self.num_open -= 1
        if self.statuses:
            status = self.statuses.pop(0)
            return web.json_response({"error": {"message": f"no: {self.keys[-1]}"}}, status=status)
        content = self.answer(self.requests[-1]["messages"][-1]["content"])
        if isinstance(content, web.Response):
            return content
        if content == "drip":
            return await self._drip(request)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return web.json_response(body)

    async def _drip(self, request: web.Request) -> web.StreamResponse:
        """Send a byte now and then, for ever."""
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.02)

    @asynccontextmanager
    async def running(self):
        app = web.Application()
        app.add_routes([web.post("/v1/chat/completions", self._chat)])
        runner = web.AppRunner(app, shutdown_timeout=0.05)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
        finally:
            await runner.cleanup()


def config(url, *keys):
    return load_config(
        None, [f"reward.judge.url={url}", "reward.judge.max_retries=0", "reward.function=math_verify", *keys]
    )


def judged(endpoint, *responses, keys=(), verdict=RIGHT, act=None) -> list[RewardResult]:
    async def scenario():
        async with endpoint.running() as url:
            reward = config(url, *keys).reward
            scorers = Scorers(reward, [WeightedScorer(Judge(reward.judge), reward.judge.weight)])
            await scorers.start(60.0)
            try:
                asking = [asyncio.create_task(scorers.combined(verdict, PROMPT, each)) for each in responses]
                if act is not None:
                    await act(endpoint, asking)
                return await asyncio.gather(*asking)
            finally:
                await scorers.close()

    return asyncio.run(scenario())


def test_the_judge_is_asked_with_question_truth_and_response_and_its_score_is_added():
    endpoint = Endpoint(lambda question: "I think Score: 3\nNo.\nScore: **8**")
    assert judged(endpoint, "{ground_truth} is 46") == [RewardResult(1.0 + 0.1 * 8, True)]
    [request] = endpoint.requests
    [message] = request["messages"]
    assert "Question: 12+34?" in message["content"] and "Reference answer: 46" in message["content"]
    assert message["content"].endswith("Response: {ground_truth} is 46"), "a response's braces stay as they are"
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("default", 0.0, 1024)
    alone = judged(endpoint, "x", verdict=RewardResult(0.0, False), keys=["reward.function=none"])
    assert alone == [RewardResult(0.8, True)]
    assert judged(endpoint, "x", keys=["reward.combine=model", "reward.judge.weight=1"]) == [RewardResult(8.0, True)]


@pytest.mark.parametrize(("text", "score"), [("YES", 1.0), ("no", 0.0), ("-1.5", -1.5)])
def test_a_pattern_of_ones_own_reads_words_and_numbers(text, score):
    keys = [r"reward.judge.pattern=verdict is (\S+)", "reward.judge.weight=1.0"]
    assert judged(Endpoint(lambda question: f"My verdict is {text}"), "x", keys=keys) == [RewardResult(1 + score, True)]


@pytest.mark.parametrize("text", ["", "Score: high", "9 of 10"])
def test_an_answer_without_a_score_costs_the_verdict(text):
    [result] = judged(Endpoint(lambda question: text), "x")
    assert result.error.startswith("exception: the judge gave no score in") and not result.correct


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("text/html", "<html>Welcome</html>"),
        ("application/json", "<html>"),
        ("application/json", "null"),
        ("application/json", "{}"),
        ("application/json", '{"choices": []}'),
        ("application/json", '{"choices": [{}]}'),
        ("application/json", '{"choices": [{"message": null}]}'),
        ("application/json", '{"choices": "none"}'),
    ],
)
def test_an_answer_without_a_chat_completion_costs_the_verdict_and_names_the_url(content_type, body):
    [result] = judged(Endpoint(lambda question: web.Response(text=body, content_type=content_type)), "x")
    assert result.error.startswith("exception: the judge at http://127.0.0.1") and "reward.judge.url" in result.error


HUGE = 30 * 2**20
DEEP = "[" * 200_000 + "]" * 200_000


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (dict(text=DEEP, content_type="application/json"), "no chat completion"),
        (dict(text=f'{{"choices": {DEEP}}}', content_type="application/json"), "no chat completion"),
        (dict(text=DEEP, content_type="application/json", status=400), "[[["),
        (dict(body=bytes(HUGE), content_type="application/json"), "no chat completion"),
        (dict(text="no " * (HUGE // 3), content_type="text/plain", status=400), "no no no"),
        (dict(text="x" * HUGE, content_type="text/html", status=500), "crash: the judge at"),
        (dict(body=b"-abc", headers={"Content-Type": "text/plain; charset=punycode"}, status=400), "-abc"),
        (
            dict(body=gzip.compress(bytes(HUGE)), headers={"Content-Encoding": "gzip", "Content-Type": "text/json"}),
            "no chat completion",
        ),
    ],
)
def test_an_answer_of_any_size_and_depth_costs_one_verdict_and_few_words(answer, words, caplog):
    """Such words go into records, logs and the reason of a stop."""
    [result] = judged(Endpoint(lambda question: web.Response(**answer)), "x")
    assert words in result.error and len(result.error) < 700 and "\n" not in result.error
    assert all(len(record.getMessage()) < 800 for record in caplog.records if record.levelname == "WARNING")


def test_of_an_answer_no_more_than_its_first_bytes_are_read(monkeypatch):
    monkeypatch.setattr("megatron_dapo.rewards.bounded_http.MAX_ANSWER_BYTES", 300)
    assert judged(Endpoint(), "x") == [RewardResult(1.5, True)]
    [result] = judged(Endpoint(lambda question: " " * 300 + "Score: 5"), "x")
    assert "no chat completion" in result.error


@pytest.mark.parametrize("text", ["Score:" + "\n" * 60_000, "Score:" + " *" * 30_000, "score:" * 10_000 + "\t" * 5_000])
def test_the_default_pattern_is_searched_in_linear_time(text):
    """Otherwise the search would be ended, and the error would be another one."""
    [result] = judged(Endpoint(lambda question: text), "x")
    assert result.error.startswith("exception: the judge gave no score in")
    assert judged(Endpoint(lambda question: f"{text}\nScore: **5**"), "x") == [RewardResult(1.5, True)]


def test_the_score_at_the_end_of_a_long_answer_is_read():
    assert judged(Endpoint(lambda question: "x" * 1_000_000 + "Score: 4"), "x") == [RewardResult(1.4, True)]


def test_a_pattern_that_never_ends_costs_its_own_verdict(monkeypatch):
    """While its search holds the event loop, nothing else goes on, and no limit ends it."""
    monkeypatch.setattr("megatron_dapo.rewards.judge._SEARCH_S", 1.0)
    monkeypatch.setattr("megatron_dapo.rewards.judge._SEARCH_PROCESSES", 2)
    endpoint = Endpoint(lambda question: "a" * 64 + "!" if question.endswith("slow") else "a 5")
    keys = [r"reward.judge.pattern=^(?:a+)+\s(\d)$"]
    slow, fast = judged(endpoint, "slow", "fast", keys=keys)
    assert slow.error.startswith("timeout: reward.judge.pattern was searched for longer than 1 s") and not slow.correct
    assert fast == RewardResult(1.5, True)


def test_braces_that_belong_to_a_formula_are_no_placeholder():
    prompt = r"Is \boxed{answer} or \frac{a}{b} in {response}? Answer {" + '"score": 5}.'
    with pytest.raises(UserError) as error:  # other keys are missing
        load_and_validate(None, ["reward.judge.url=http://a:1/v1", f"reward.judge.prompt={json.dumps(prompt)}"])
    assert not any("reward.judge" in sentence for sentence in error.value.sentences), error.value.sentences


def test_a_judge_that_never_ends_its_answer_is_given_up():
    """The client's own limit is of each pause between two parts of an answer."""
    [result] = judged(Endpoint(lambda question: "drip"), "x", keys=["reward.judge.timeout_s=0.3"])
    assert result.error.startswith("timeout: the judge at") and result.error.endswith("no whole answer within 0.3 s")


def test_equal_questions_are_asked_once_and_a_failed_one_again():
    endpoint = Endpoint(statuses=[500])

    async def again(endpoint, asking):
        await asyncio.gather(*asking)

    results = judged(endpoint, "a", "a", "b", act=again)
    assert len(endpoint.requests) == 2 and sum(result.error is not None for result in results) in (1, 2)
    assert judged(Endpoint(statuses=[500, 429]), "a", keys=["reward.judge.max_retries=2"]) == [RewardResult(1.5, True)]


def test_a_slow_judge_holds_up_nobody_and_is_not_asked_more_at_once_than_the_key_allows():
    endpoint = Endpoint()
    endpoint.hold.clear()

    async def act(endpoint, asking):
        while endpoint.num_open < 3:
            await asyncio.sleep(0.005)
        endpoint.hold.set()

    responses = [str(number) for number in range(9)]
    results = judged(endpoint, *responses, act=act, keys=["reward.judge.max_concurrency=3"])
    assert results == [RewardResult(1.5, True)] * 9 and endpoint.max_open == 3


def test_a_question_that_hangs_takes_one_place_and_no_other_questions_time():
    class Partly(Endpoint):
        async def _chat(self, request):
            if "Response: slow" in (await request.text()).replace("\\n", "\n"):
                await asyncio.sleep(600)
            return await super()._chat(request)

    async def act(endpoint, asking):
        slow, *fast = asking
        await asyncio.wait_for(asyncio.gather(*fast), 20.0)
        assert not slow.done()
        slow.cancel()

    fast = [str(number) for number in range(9)]
    with pytest.raises(asyncio.CancelledError):
        judged(Partly(), "slow", *fast, act=act, keys=["reward.judge.max_concurrency=2"])


def test_a_slow_or_absent_judge_costs_the_verdict_with_the_reason():
    slow = Endpoint()
    slow.hold.clear()
    [result] = judged(slow, "x", keys=["reward.judge.timeout_s=0.2"])
    assert result.error.startswith("timeout: the judge at http://127.0.0.1")
    scorers = make_scorers(config("http://127.0.0.1:9/v1"))

    async def ask():
        try:
            return await scorers.combined(RIGHT, PROMPT, "x")
        finally:
            await scorers.close()

    assert asyncio.run(ask()).error.startswith("crash: the judge at http://127.0.0.1:9/v1: Connection error")


def test_a_budget_ends_the_questions():
    results = judged(Endpoint(), "a", "b", "c", keys=["reward.judge.max_requests=2"])
    [error] = [result.error for result in results if result.error]
    assert error == "exception: reward.judge.max_requests = 2 questions were asked"


@pytest.mark.parametrize("where", ["api_key_env", "api_key_file"])
def test_the_key_reaches_the_judge_but_no_file(where, tmp_path, monkeypatch, caplog):
    caplog.set_level("DEBUG")
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    (tmp_path / "key").write_text(f"{SECRET}\n")
    (tmp_path / "key").chmod(0o600)
    value = "JUDGE_KEY" if where == "api_key_env" else str(tmp_path / "key")
    endpoint = Endpoint(statuses=[401])
    results = judged(endpoint, "a", keys=[f"reward.judge.{where}={value}"])
    assert endpoint.keys == [f"Bearer {SECRET}"] and "***" in results[0].error
    written = json.dumps(config("http://a:1/v1", f"reward.judge.{where}={value}").model_dump(mode="json"))
    assert SECRET not in written + repr(results) and SECRET not in caplog.text


def test_the_log_has_no_line_per_question_and_each_failure_once(caplog):
    caplog.set_level("INFO")
    judged(Endpoint(lambda question: "Score: 5" if question.endswith("c") else "no"), "a", "b", "c")
    lines = [record.getMessage() for record in caplog.records if not record.name.startswith("aiohttp")]
    assert lines == ["no verdict: exception: the judge gave no score in 'no'"]


def test_a_missing_key_is_refused_at_the_start(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "two").write_text(f"{SECRET}\nX-Evil: 1")
    (tmp_path / "latin").write_text(f"{SECRET}ä")
    for path in tmp_path.iterdir():
        path.chmod(0o600)
    (tmp_path / "open").write_text(f"{SECRET}\n")
    (tmp_path / "open").chmod(0o644)
    for key, words in (("api_key_env=NO_SUCH_KEY", "NO_SUCH_KEY, which is not in the run"),
                       ("api_key_env=HOME", "HOME, which does not look like a secret"),
                       (f"api_key_file={tmp_path}/none", "cannot be read"),
                       (f"api_key_file={tmp_path}/empty", "does not hold a key"),
                       (f"api_key_file={tmp_path}/two", "does not hold a key"),
                       (f"api_key_file={tmp_path}/latin", "cannot be read"),
                       (f"api_key_file={tmp_path}/open", "reward.judge.api_key_file .*mode 644.*chmod")):  # fmt: skip
        with pytest.raises(UserError, match=words) as error:
            make_scorers(config("http://a:1/v1", f"reward.judge.{key}"))
        assert SECRET not in str(error.value)
