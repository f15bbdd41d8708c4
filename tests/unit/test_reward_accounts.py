"""Every giver of rewards has a deadline; its errors and the wait for it are counted by source."""

import asyncio
import json

import pytest

from megatron_dapo.rollout.controller import Controller
from tests.fake_rollout import FakeServer, Script, make_config, run_in_folder
from tests.unit.test_judge import SECRET, Endpoint

pytestmark = pytest.mark.unit

VERDICT = """
import asyncio, time

def verdict(response, extra_info):
    if extra_info["fault"] == "raises":
        raise ValueError("scripted")
    time.sleep(600 if extra_info["fault"] == "hangs" else 0.02)
    return {"score": float(response == "right"), "correct": response == "right"}
"""
FORMS = {
    "plain": """
def score(data_source, response, ground_truth, extra_info):
    return verdict(response, extra_info)
""",
    "coroutine": """
async def score(data_source, response, ground_truth, extra_info):
    await asyncio.sleep(600 if extra_info["fault"] == "hangs" else 0.02)
    return verdict(response, extra_info)
""",
    "group": """
def score(data_source, responses, ground_truth, extra_info):
    return [verdict(response, extra_info) for response in responses]
""",
    "batched": """
def score(data_sources, responses, ground_truths, extra_infos):
    return [verdict(response, extra_info) for response, extra_info in zip(responses, extra_infos)]
""",
}
NO_FILTER = "algorithm.dynamic_sampling.enable=false"


def write_prompts(folder, fault):
    """p0, p1, ...; those of odd numbers are of a source of their own, which has the fault."""
    rows = [
        {"prompt": f"p{number}", "label": "right", "data_source": "odd" if number % 2 else "even",
         "extra_info": {"fault": fault if number % 2 else ""}}
        for number in range(8)
    ]  # fmt: skip
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def check(metrics, kind):
    assert {name: metrics[f"reward/{name}"] for name in ("odd/num_errors", "even/num_errors", kind)} == {
        "odd/num_errors": 4, "even/num_errors": 0, kind: 4,
    }  # fmt: skip
    assert metrics["reward/even/accuracy"] == 0.5 and metrics["reward/odd/accuracy"] == 0
    assert 0 < metrics["reward/wait_share"] <= 1


@pytest.mark.parametrize(("fault", "kind"), [("raises", "num_exceptions"), ("hangs", "num_timeouts")])
@pytest.mark.parametrize("form", FORMS)
def test_a_function_of_each_form_has_its_account(form, fault, kind, folder):
    (folder / "fake_rewards.py").write_text(VERDICT + FORMS[form])
    write_prompts(folder, fault)

    async def scenario(controller, servers):
        check((await controller.next_batch(1, 1)).metrics, kind)

    # a busy machine takes a while for the sound ones; four workers wait for four hanging ones at once
    settings = ["reward.timeout_s=2.0", "reward.num_workers=4"] if fault == "hangs" else ["reward.timeout_s=60.0"]
    run_in_folder(folder, scenario, overrides=[NO_FILTER, *settings])


def test_a_judge_has_its_account_and_its_key_is_in_no_file_of_the_run(folder, monkeypatch, caplog):
    caplog.set_level("DEBUG")
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    write_prompts(folder, "")

    def answer(question):
        return "no idea" if "Question: p1" in question or "Question: p3" in question else "Score: 1"

    async def main():
        endpoint = Endpoint(answer)
        server = await FakeServer(Script()).start()
        keys = ["reward.function=none", NO_FILTER, "reward.judge.api_key_env=JUDGE_KEY", "trainer.dump_batches=true"]
        async with endpoint.running() as url:
            controller = Controller(make_config(folder, [server], f"reward.judge.url={url}", *keys))
            try:
                await controller.start()
                return (await controller.next_batch(1, 1)).metrics, endpoint.keys
            finally:
                await controller.close()
                await server.stop()

    metrics, keys = asyncio.run(main())
    assert metrics["reward/odd/num_errors"] == metrics["reward/num_exceptions"] == 4
    assert metrics["reward/even/num_errors"] == 0 and metrics["reward/even/accuracy"] == 1
    assert 0 < metrics["reward/wait_share"] <= 1
    assert set(keys) == {f"Bearer {SECRET}"}
    files = [path for path in (folder / "run").rglob("*") if path.is_file()]
    assert files and not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert SECRET not in caplog.text
