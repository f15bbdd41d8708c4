"""Reward functions as coroutines, for all responses to a prompt together, or for any batch."""

import asyncio
import inspect
import os
import textwrap

import pytest

from examples.reward_forms import forms
from megatron_dapo.common.errors import UserError
from megatron_dapo.rewards.forms import RewardForm, RewardRequest, Scored, arguments_of, form_of, results_of
from megatron_dapo.rewards.reward_pool import RewardPool
from megatron_dapo.rewards.reward_result import RewardResult

pytestmark = pytest.mark.unit

MODULE = """
import asyncio, os, time

started = 0

async def patient(data_source, response, ground_truth, extra_info):
    # waits until `extra_info["needs"]` calls are under way in this process
    global started
    started += 1
    while started < extra_info.get("needs", 0) and not os.path.exists(extra_info.get("or_file", "")):
        await asyncio.sleep(0.001)
    if response == "sleep":
        await asyncio.sleep(600)
    if response in ("block", "exit") and "or_file" in extra_info:
        open(extra_info["or_file"], "w").close()
    if response == "block":
        time.sleep(600)
    if response == "exit":
        os._exit(3)
    if response == "raise":
        raise ValueError("no such answer")
    return response == ground_truth

def rank(data_source, responses, ground_truth, extra_info, *, reverse=False):
    if "hang" in responses:
        time.sleep(600)
    if "few" in responses:
        return [1.0]
    order = sorted(responses, key=len, reverse=reverse)
    return [{"score": order.index(text) / len(order), "correct": text == ground_truth} for text in responses]

async def rank_async(data_source, responses, ground_truth, extra_info):
    await asyncio.sleep(0)
    return [float(len(response)) for response in responses]

sizes = []

def batched(data_sources, responses, ground_truths, extra_infos):
    sizes.append(len(responses))
    if any(response == "raise" for response in responses):
        raise ValueError("no such answer")
    return [{"score": float(max(sizes)), "correct": r == t} for r, t in zip(responses, ground_truths)]

class Object:
    async def __call__(self, data_source, response, ground_truth, extra_info):
        return response == ground_truth

with_call = Object()

def wrapper(data_source, response, ground_truth, extra_info):
    return with_call(data_source, response, ground_truth, extra_info)
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "reward_forms_module.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def with_pool(function, scenario, *, num_workers=1, timeout_s=20.0, kwargs=None, **options):
    async def run():
        name = f"reward_forms_module:{function}"
        pool = RewardPool(name, kwargs or {}, num_workers, timeout_s, 2048, **options)
        await pool.start()
        try:
            return await scenario(pool), pool.stats()
        finally:
            await pool.close()

    return asyncio.run(run())


def test_the_parameters_say_the_form():
    def one(data_source, solution_str, ground_truth, extra_info=None): ...
    def group(data_source, responses, ground_truth, extra_info): ...
    def batch(data_sources, responses, ground_truths, extra_infos, **more): ...
    async def coroutine(data_source, responses, ground_truth, extra_info): ...
    async def nameless(*anything): ...

    expected = [(Scored.ONE, False), (Scored.GROUP, False), (Scored.BATCH, False), (Scored.GROUP, True)]
    forms = [form_of(function) for function in (one, group, batch, coroutine)]
    assert forms == [RewardForm(*each) for each in expected] and form_of(nameless) == RewardForm(Scored.ONE, True)
    requests = [RewardRequest("s", "a", "t", {"x": 1}), RewardRequest("s", "b", "t", {"x": 1})]
    assert arguments_of(Scored.GROUP, requests) == ("s", ["a", "b"], "t", {"x": 1})
    assert arguments_of(Scored.BATCH, requests) == (["s", "s"], ["a", "b"], ["t", "t"], [{"x": 1}] * 2)
    assert arguments_of(Scored.ONE, requests[:1]) == ("s", "a", "t", {"x": 1})
    for form, function in ((Scored.ONE, one), (Scored.GROUP, group), (Scored.BATCH, batch)):
        parameters = list(inspect.signature(function).parameters)[:4]
        assert form.value.split(", ")[2:] == parameters[2:], "what messages show is what form_of reads"


@pytest.mark.parametrize(
    ("returned", "words"),
    [([1.0], "1 verdicts on 2 responses"), (1.0, "not a list"), ({"score": 1.0}, "not a list"),
     ([1.0, None], "not a finite score"), ([1.0, float("nan")], "not a finite score")],
)  # fmt: skip
def test_what_are_no_verdicts_is_an_error(returned, words):
    with pytest.raises(ValueError, match=words):
        results_of(Scored.GROUP, returned, ["a", "b"])


def test_a_hundred_calls_of_a_coroutine_are_under_way_at_once_in_one_process():
    """Each waits for all others: one after the other would never end."""

    async def scenario(pool):
        calls = [pool.score("any", str(i % 2), "1", {"needs": 100}) for i in range(100)]
        return await asyncio.gather(*calls)

    results, stats = with_pool("patient", scenario)
    assert sum(result.correct for result in results) == 50 and stats["num_scored"] == 100
    assert not any(result.error for result in results)


def test_no_more_calls_are_under_way_than_the_key_allows():
    async def scenario(pool):
        return await asyncio.gather(*(pool.score("any", "1", "1", {"needs": 3}) for _ in range(2)))

    results, _ = with_pool("patient", scenario, max_concurrency=2, timeout_s=0.3)
    assert [result.error for result in results] == ["timeout"] * 2, "the third never came"


def test_a_coroutine_that_sleeps_or_raises_costs_only_its_own_response():
    async def scenario(pool):
        return await asyncio.gather(*(pool.score("any", text, "1") for text in ("1", "sleep", "raise", "1", "0")))

    results, stats = with_pool("patient", scenario, timeout_s=1.0)
    assert [result.correct for result in results] == [True, False, False, True, False]
    assert [result.error for result in results] == [
        None,
        "timeout",
        "exception: ValueError: no such answer",
        None,
        None,
    ]
    assert stats == {"num_scored": 5, "num_timeouts": 1, "num_crashes": 0, "num_exceptions": 1}


def test_requests_lost_with_a_process_are_repeated_and_only_the_cause_is_lost(tmp_path):
    async def scenario(pool):
        extra_info = {"needs": 3, "or_file": str(tmp_path / "ended")}
        return await asyncio.gather(*(pool.score("any", text, "1", extra_info) for text in ("1", "1", "exit")))

    results, _ = with_pool("patient", scenario)
    assert [result.error for result in results] == [None, None, "crash"] and results[0].correct


def test_a_coroutine_that_blocks_its_process_is_killed_and_the_next_response_is_scored(monkeypatch):
    monkeypatch.setattr("megatron_dapo.rewards.shared_workers._CANCEL_S", 0.2)

    async def scenario(pool):
        return await pool.score("any", "block", "1"), await pool.score("any", "1", "1")

    (blocked, later), _ = with_pool("patient", scenario, timeout_s=0.5)
    assert blocked.error == "timeout" and later == RewardResult(1.0, True)


def test_one_that_blocks_the_process_costs_the_others_there_nothing(tmp_path, monkeypatch):
    """Their time is over too, while they could not go on."""
    monkeypatch.setattr("megatron_dapo.rewards.shared_workers._CANCEL_S", 0.2)

    async def scenario(pool):
        extra_info = {"needs": 3, "or_file": str(tmp_path / "blocked")}
        return await asyncio.gather(*(pool.score("any", text, "1", extra_info) for text in ("1", "block", "1")))

    results, stats = with_pool("patient", scenario, timeout_s=1.0)
    assert [result.error for result in results] == [None, "timeout", None] and stats["num_timeouts"] == 1


def test_an_object_with_a_coroutine_call_is_awaited_and_returning_one_is_refused_with_the_cure():
    result, _ = with_pool("with_call", lambda pool: pool.score("any", "1", "1"))
    assert result.correct
    result, _ = with_pool("wrapper", lambda pool: pool.score("any", "1", "1"))
    assert result.error and result.error.endswith("returned a coroutine, but is none; write it with async def")


def test_all_responses_to_a_prompt_are_scored_in_one_call():
    async def scenario(pool):
        assert pool.scores_groups
        good = await pool.score_group("any", ["ccc", "a", "bb"], "a")
        bad = await pool.score_group("any", ["few", "x"], "a")
        return good, bad

    (good, bad), stats = with_pool("rank", scenario)
    assert good == [RewardResult(2 / 3, False), RewardResult(0.0, True), RewardResult(1 / 3, False)]
    assert {each.error for each in bad} == {
        "exception: ValueError: the reward function returned 1 verdicts on 2 responses"
    }
    assert stats["num_exceptions"] == 2

    async def of_two(pool):
        return await pool.score_group("any", ["ccc", "a"], "a")

    reversed_order, _ = with_pool("rank", of_two, kwargs={"reverse": True})
    assert [each.score for each in reversed_order] == [0.0, 0.5]
    hanging, _ = with_pool("rank", lambda pool: pool.score_group("any", ["hang", "a"], "a"), timeout_s=0.5)
    assert [each.error for each in hanging] == ["timeout", "timeout"]
    in_loop, _ = with_pool("rank_async", of_two)
    assert [each.score for each in in_loop] == [3.0, 1.0]


def test_waiting_responses_are_one_batch_and_a_bad_one_costs_only_itself():
    async def scenario(pool):
        texts = ["1", "raise", *"10" * 3]
        return await asyncio.gather(*(pool.score("any", text, "1") for text in texts)), await pool.score(
            "any", "1", "1"
        )

    (results, last), stats = with_pool("batched", scenario, batch_size=64)
    assert [result.correct for result in results] == [True, False, *[True, False] * 3]
    assert [result.error for result in results].count(None) == 7 and last.score == 8.0, "all came in one call"
    assert stats["num_exceptions"] == 1 and stats["num_scored"] == 9
    (_, last), _ = with_pool("batched", scenario, batch_size=3)
    assert last.score == 3.0


def test_a_batch_that_nobody_waits_for_any_more_costs_nothing():
    async def scenario(pool):
        first = asyncio.create_task(pool.score("any", "1", "1"))
        await asyncio.sleep(0)
        first.cancel()
        return await pool.score("any", "1", "1")

    result, stats = with_pool("batched", scenario)
    assert result.correct and stats["num_scored"] == 1


def test_a_wrong_signature_is_refused_with_that_of_its_form():
    with pytest.raises(UserError, match=r"\(data_source, responses, ground_truth, extra_info, \*\*\{'bonus': 1\}\)"):
        with_pool("rank", lambda pool: None, kwargs={"bonus": 1})


def test_requests_in_flight_come_back_when_the_pool_closes():
    async def scenario(pool):
        calls = [asyncio.create_task(pool.score("any", "sleep", "1")) for _ in range(3)]
        await asyncio.sleep(0.3)
        await pool.close()
        return await asyncio.gather(*calls)

    results, _ = with_pool("patient", scenario)
    assert [result.error for result in results] == ["crash"] * 3


def test_the_example_scores_as_its_page_says():
    expected = {"plain": [1, 1, 0, 0], "ranked": [1, 0.5, 0, 0], "batched": [1, 1, 0, 0], "judged": [1, 1, 0, 0]}
    for function, scores in expected.items():
        results, _ = asyncio.run(forms.results_of(function, forms.RESPONSES))
        assert [result.score for result in results] == scores
