"""The page of `report --watch` in a real browser: it follows runs, and folders of runs."""

import json
import random
import threading
import time
from contextlib import contextmanager

import pytest

from megatron_dapo.commands.report.watch import make_server
from megatron_dapo.storage.run_folder import RunFolder
from tests.browser import needs_chromium, status
from tests.report_runs import write_run, write_step

pytestmark = [pytest.mark.e2e, needs_chromium]


@contextmanager
def served(folders):
    server = make_server(folders, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server.url
    finally:
        server.shutdown()
        server.server_close()


def test_answers_that_come_after_the_page_was_opened_are_shown_and_so_are_their_tokens(browser, tmp_path):
    folders = [write_run(tmp_path / name, num_steps=1).path for name in "ab"]
    first, second = map(RunFolder, folders)
    kept = [(path, path.read_bytes()) for path in (first.rollout(1), first.rollout_tokens(1))]
    for path in (*(path for path, _ in kept), second.rollout(1), second.rollout_tokens(1)):
        path.unlink()
    browser.errors.clear()
    with served(folders) as address:
        browser.command("Page.navigate", url=address)
        browser.wait_for("document.getElementById('no-answers')?.textContent === 'There are no answers yet.'")
        kept[0][0].write_bytes(kept[0][1])
        status(browser, "Step 1: 12 answers")
        assert browser.texts("#answer-run option") == ["a", "b (no answers yet)"]
        browser.choose("#colour", "advantages")
        status(browser, "Nothing is known of their tokens")
        browser.press("j")
        browser.press("g")  # only one group
        browser.wait_for("document.querySelectorAll('#list .group').length === 1")
        kept[1][0].write_bytes(kept[1][1])
        browser.wait_for("document.querySelectorAll('#list .token').length > 10")
        assert len(browser.texts("#list .group")) == 1 and browser.errors == []
        browser.command("Page.navigate", url="about:blank")


def test_a_watched_run_is_followed_beside_one_that_begins(browser, tmp_path):
    run = write_run(tmp_path / "run", num_steps=2)
    browser.requests.clear()
    browser.errors.clear()
    with served([tmp_path]) as address:
        browser.open(address)
        status(browser, "Step 2:")
        write_step(run, random.Random(3), 3, 3, 4, 12)
        line = json.loads(run.metrics.read_text().splitlines()[-2]) | {"step": 3, "time": time.time()}
        write_run(tmp_path / "another", num_steps=1)  # now the first by name
        run.metrics.write_text(run.metrics.read_text() + json.dumps(line) + "\n")
        status(browser, "Step 3: 12 answers")
        assert browser.do("runs.map((run) => [run.at, run.steps.step])") == [[1, [1]], [0, [1, 2, 3]]]
        browser.choose("#colour", "advantages")
        browser.wait_for("document.querySelectorAll('#list .token').length > 50")
        assert {each.partition("/")[0] for each in browser.requests} == {"http:"}
        page, _, key = address.partition("?")
        assert key and all(each.startswith(page) for each in browser.requests) and browser.errors == []
        browser.command("Page.navigate", url="about:blank")  # else it goes on asking a dead server


def test_a_page_whose_server_does_not_answer_says_so_wherever_one_reads(browser, tmp_path):
    network = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    with served([write_run(tmp_path / "run", num_steps=1).path]) as address:
        browser.open(address)
        status(browser, "Step 1:")
        browser.command("Network.emulateNetworkConditions", offline=True, **network)
        browser.wait_for("!document.getElementById('failure').hidden")
        assert browser.texts("#failure")[0].startswith("The server of this page does not answer")
        for place in ("0", "document.body.scrollHeight / 2", "document.body.scrollHeight"):
            browser.do(f"scrollTo({{top: {place}, behavior: 'instant'}})")
            top, bottom = browser.do(
                "(r => [r.top, r.bottom])(document.getElementById('failure').getBoundingClientRect())"
            )
            assert 0 < top < bottom <= 900
        browser.command("Network.emulateNetworkConditions", offline=False, **network)
        browser.wait_for("document.getElementById('failure').hidden")
        browser.command("Page.navigate", url="about:blank")


def test_each_run_of_a_folder_that_is_shown_has_a_colour_of_its_own_and_keeps_it(browser, tmp_path):
    for number in range(8):
        write_run(tmp_path / f"run_{number}", num_steps=1, num_groups=1, n=1)
    browser.errors.clear()
    colours = "Object.fromEntries(shownRuns().map(run => [run.name, run.colour]))"
    with served([tmp_path]) as address:
        browser.open(address)
        status(browser, "Step 1:")
        first = browser.do(colours)
        assert len(first) == len(set(first.values())) == 5
        browser.click("#runs label:last-of-type input")
        browser.click("#runs label:nth-of-type(1) input")
        browser.click("#runs label:nth-of-type(7) input")
        shown = browser.do(colours)
        assert len(set(shown.values())) == 6
        assert {name: shown[name] for name in [*first][1:]} == {name: first[name] for name in [*first][1:]}
        write_run(tmp_path / "a_new_run", num_steps=1, num_groups=1, n=1)
        browser.wait_for("runs.length === 9")
        assert browser.do(colours) == {**shown, "a_new_run": 6}, "the newest is shown"
        shown = browser.do(colours)
        dots = browser.do("[...document.querySelectorAll('#runs .dot')].map(dot => dot.style.background)")
        assert [dot for dot in dots if dot != "var(--line)"] == [f"var(--c{colour})" for colour in shown.values()]
        assert browser.errors == []
        browser.command("Page.navigate", url="about:blank")
