"""The page of `report` in a real browser: no console errors, no requests, every control works."""

import json
import math
import random
import re

import pytest

from megatron_dapo.commands.report.command import write_report
from megatron_dapo.common.files import write_whole
from tests.browser import Browser, needs_chromium, status
from tests.proofs import amount
from tests.report_runs import HOSTILE, START, TOOL, write_branches, write_run, write_validation

pytestmark = [pytest.mark.e2e, needs_chromium]

MAX_BYTES = 30e6
CARDS = "#list .answer"


@pytest.fixture(scope="module")
def report_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    runs = [write_run(folder / f"seed_{seed}", num_steps=6, seed=seed) for seed in (0, 1)]
    write_validation(runs[0], 0, [1, 4, 0, 4])
    write_validation(runs[0], 6, [3, 1, 2, 4], text="wait, 12 + 4 = 16. " * 4)
    for attempt, seed in (("9-0", 3), ("10-0", 4)):
        logs = runs[0].logs / f"attempt-{attempt}"
        write_whole(logs / "config.yaml", f"trainer: {{seed: {seed}}}\n")
        write_whole(logs / "trainer-rank-0.log", f"{HOSTILE} of attempt {attempt}")
    write_report([run.path for run in runs], folder / "report.html")
    return folder / "report.html"


@pytest.fixture
def page(browser, report_file):
    browser.requests.clear()
    browser.errors.clear()
    browser.open(report_file.as_uri())
    yield browser
    assert browser.errors == []
    assert [address for address in browser.requests if not address.startswith(("file:", "data:", "blob:"))] == []
    assert browser.do("document.title") != "taken"


def test_filters_choose_right_wrong_and_cut_answers(page):
    status(page, "Step 6: 12 answers in 3 groups, 6 right (50 %), 3 cut, 0 in a loop.")
    page.choose("#view", "list")
    for verdict, number, badges in (("wrong", 6, {"✗ wrong"}), ("right", 6, {"✓ right"}), ("cut", 3, None)):
        page.click(f"input[value={verdict}]")
        status(page, f"{number} match.")
        assert len(page.texts(CARDS)) == number
        if badges:
            assert set(page.texts(f"{CARDS} .badge:first-child")) == badges
    assert all("✂ length" in text for text in page.texts(CARDS))


def test_prompts_that_became_right_or_wrong_since_the_first_evaluation_are_found(page):
    """As `eval --compare` says it: more than half of the answers are right, and were not,
    or the reverse."""
    assert page.do("document.querySelector('input[value=gained]').closest('label').hidden")
    page.choose("#kind", "held-out")
    status(page, "Step 6: 16 answers in 4 groups, 10 right (62.5 %), 0 cut, 16 in a loop.")
    for verdict, prompt, share in (
        ("gained", "Held out 0?", "3 of 4 right (1 of 4 after step 0)"),
        ("lost", "Held out 1?", "1 of 4 right (4 of 4 after step 0)"),
    ):
        page.click(f"input[value={verdict}]")
        status(page, " 4 match.")
        assert page.texts("#list .prompt") == [prompt] and share in page.texts("#list .group > header")[0]
        assert [("after step 0" in text, "↻ loop" in text) for text in page.texts(CARDS)] == [
            *[(False, True)] * 4,
            *[(True, False)] * 4,
        ]
    page.choose("#kind", "trained")
    status(page, "Step 6: 12 answers in 3 groups, 6 right (50 %), 3 cut, 0 in a loop.")
    assert page.do("document.querySelector('input[name=verdict]:checked').value") == "all"


@pytest.mark.parametrize(
    "text, is_loop",
    [
        ("so " * 20, True),
        ("First 7. " + "wait, 12 + 4 = 16. " * 4 + "wait, 1", True),
        ("wait, 12 + 4 = 16. " * 4 + "Answer: 16", False),
        ("A longer sentence that comes three times in all. " * 3, False),
        ("12, 12, 12, 12, 12", False),
        ("", False),
    ],
)
def test_an_answer_that_says_the_same_again_and_again_to_its_end_is_a_loop(page, text, is_loop):
    assert page.do(f"isLoop({{text: {json.dumps(text)}}})") is is_loop


def test_answers_are_sorted_by_length_and_reward(page):
    page.choose("#view", "list")
    for order, sign, what in (("long", -1, "num_tokens"), ("short", 1, "num_tokens"), ("high", -1, "reward")):
        page.choose("#sort", order)
        page.wait_for(f"document.getElementById('sort').value === '{order}' && view.sort === '{order}'")
        values = page.wait_for(f"[...document.querySelectorAll('{CARDS}')].map(card => card.answer.{what})")
        assert values == sorted(values, key=lambda value: sign * value) and len(set(values)) > 2


def test_a_search_marks_its_words_in_this_step_and_in_all(page):
    page.choose("#search", "What is 4+1")
    status(page, "Step 6", " 0 match.")
    page.click("#everywhere")
    status(page, "Steps 1 to 6: 72 answers", " 4 match.")
    assert set(page.texts("#list mark")) == {"What is 4+1"}
    assert page.texts("#list .group strong") == ["step 4 · 00000004-1"]


def test_a_group_is_shown_side_by_side_from_the_list_and_back_with_keys(page):
    page.choose("#view", "list")
    page.wait_for(f"document.querySelectorAll('{CARDS}').length === 12")
    page.press("j")
    page.press("j")
    assert page.do(f"[...document.querySelectorAll('{CARDS}')].indexOf(document.activeElement)") == 1
    page.press("g")
    page.wait_for("document.querySelectorAll('#list .group').length === 1")
    tops = page.do(f"[...document.querySelectorAll('{CARDS}')].map(card => card.getBoundingClientRect().top)")
    assert len(tops) == 4 and len(set(tops)) == 1
    page.press("g")
    page.wait_for(f"document.querySelectorAll('{CARDS}').length === 12")
    page.press("[")
    status(page, "Step 5:")
    page.press("]")
    status(page, "Step 6:")


def test_tokens_are_coloured_and_show_their_data(page):
    page.choose("#colour", "advantages")
    page.wait_for("document.querySelectorAll('#list .token').length > 50")
    right, wrong = (
        page.do(f"[...document.querySelectorAll('.answer:has(.{one}) .token')].map(t => t.style.background)")
        for one in ("right", "wrong")
    )
    assert set(right) != set(wrong) and len(set(right)) == len(set(wrong)) == 1 and "--plus" in right[0]
    page.choose("#colour", "differences")
    page.wait_for("view.colour === 'differences' && document.getElementById('legend').textContent.includes('server')")
    page.do("document.querySelector('#list .answer:nth-child(2) .text').focus()")
    page.command("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    tip = page.wait_for("!document.getElementById('tip').hidden && document.getElementById('tip').textContent")
    assert (
        "token 1 of" in tip and "trainer − server ≈" in tip and "advantage −0.800" in tip and "weight version 4" in tip
    )


def test_what_the_environment_wrote_has_no_advantage(page):
    made = "new AnswerTokens({head: {}, arrays: {log_probs: [-128, 90]}}, 0, 2, 1.5)"
    assert page.do(f"[0, 1].map(token => String({made}.value('advantages', token)))") == ["NaN", "1.5"]
    assert page.do(f"colourScale('advantages', [{made}]).high") == 1.5


def test_hostile_answers_are_text(page):
    assert any(HOSTILE in text for text in page.texts("#list .text"))
    assert page.do("document.querySelectorAll('#list img, #list script').length") == 0


def test_runs_lie_over_each_other_and_can_be_left_out(page):
    page.do("document.getElementById('curves').scrollIntoView({behavior: 'instant'})")
    names = "document.querySelector('#curve-figures .chart').data?.filter(t => t.name).map(t => t.name)"
    assert page.wait_for(names) == ["seed_0: shaped", "seed_1: shaped"]
    page.click("#runs input")
    assert page.wait_for(f"({names})?.length === 1 && {names}") == ["shaped"]
    page.click("#runs input")
    label = page.do("document.querySelector('#curve-figures .chart').getAttribute('aria-label')")
    assert label.startswith("Reward. seed_0, shaped: ") and "at step 6" in label
    page.choose("#axis", "time")
    title = "document.querySelector('#curve-figures .xtitle')?.textContent"
    assert page.wait_for(f"({title})?.includes('since') && {title}") == "minutes since the start"
    assert page.texts("#config tr.differs code") == ["trainer.seed"]


FIRST_CHART = "document.querySelector('#curve-figures .chart')"


def draw_all(page: Browser) -> None:
    page.do("dispatchEvent(new Event('beforeprint'))")
    page.wait_for("figures.length && figures.every(figure => figure.chart.querySelector('.main-svg'))")


def test_a_zoom_is_of_all_charts_with_steps_until_a_double_click(page):
    draw_all(page)
    ranges = "figures.filter(figure => figure.isLinked).map(figure => figure.chart.layout.xaxis.range)"
    box = page.do(
        f"(r => [r.left, r.top, r.width, r.height])({FIRST_CHART}.querySelector('.nsewdrag').getBoundingClientRect())"
    )
    assert box[2] > 100
    page.do(f"{FIRST_CHART}.scrollIntoView({{behavior: 'instant', block: 'center'}})")
    left, top, width, height = page.do(
        f"(r => [r.left, r.top, r.width, r.height])({FIRST_CHART}.querySelector('.nsewdrag').getBoundingClientRect())"
    )
    at = {"y": top + height / 2, "button": "left"}
    page.command("Input.dispatchMouseEvent", type="mousePressed", x=left + width / 2, clickCount=1, **at)
    for x in (left + 0.6 * width, left + 0.8 * width):
        page.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, **at)
    page.command("Input.dispatchMouseEvent", type="mouseReleased", x=left + 0.8 * width, clickCount=1, **at)
    first, last = page.wait_for("settings.range")
    assert 2 < first < 4 and first < last < 6
    page.do("dispatchEvent(new Event('beforeprint'))")
    page.wait_for(f"{ranges}.length > 10 && {ranges}.every(range => range[0] === {first} && range[1] === {last})")
    assert page.do(f"Math.min(...{FIRST_CHART}.data[0].x)") > 1, "the axis of values is that of the shown steps"
    for count in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            page.command("Input.dispatchMouseEvent", type=kind, x=left + width / 2, clickCount=count, **at)
    page.wait_for("settings.range === null")
    page.choose("#from", "3")
    assert page.do("settings.range") == [3, 6] and not page.do("document.getElementById('whole').disabled")
    for field, value, shown in (("to", 5, [3, 5]), ("from", 5, [5, 6]), ("to", 4, [0, 4]), ("to", 99, None)):
        page.choose(f"#{field}", str(value))
        assert page.do("settings.range") == shown
    page.choose("#from", "-2")
    assert page.do("settings.range") is None and page.do("document.getElementById('from').value") == ""
    page.choose("#from", "3")
    page.choose("#axis", "time")
    assert page.do("settings.range") is None


def test_metrics_are_found_by_an_expression_and_drawn_on_a_log_axis(page):
    before = page.texts("#curve-figures h3")
    page.choose("#pattern", "^actor/.*(norm|entropy)$")
    assert page.texts("#curve-figures h3, #found") == ["2 metrics", "actor/entropy", "actor/grad_norm"]
    page.choose("#scale", "log")
    page.choose("#pattern", "staleness_mean")
    draw_all(page)
    assert page.do(f"{FIRST_CHART}.layout.yaxis.type") == "log"
    assert "12 values of 0 or below: not on a log axis" in page.texts("#curve-figures .keys-of-chart li")
    page.choose("#scale", "linear")
    draw_all(page)
    assert page.do(f"{FIRST_CHART}.layout.yaxis.range") == [0, 1], "a constant 0"
    page.choose("#pattern", "")
    assert page.texts("#curve-figures h3") == before


@pytest.mark.parametrize("pattern", ["(a+)+$", "(", ".*.*.*.*.*x", "(a|b)*c", "(?:(?:a+)+)+$", "\\"])
def test_an_expression_that_could_take_for_ever_is_refused_and_said_why(page, pattern):
    page.choose("#pattern", pattern)
    [said] = page.texts("#found")
    assert said and "metric" not in said and page.texts("#curve-figures h3")[0] == "Reward"


def test_an_expression_that_is_allowed_ends_soon(page):
    asked = "matchingNames(Array(2000).fill('a'.repeat(5000) + '!'), '.*.*.*.*x')"
    script = f"(begin => {{ try {{ {asked}; }} catch {{}} return performance.now() - begin; }})(performance.now())"
    assert page.do(script) < 10_000


def test_a_constant_has_an_axis_of_its_own_size(page):
    axis = "JSON.stringify(valueAxis([{{y: [{0}, {0}]}}]).range)"
    assert [page.do(axis.format(value)) for value in ("0", "2", "-3")] == ["[0,1]", "[0,4]", "[-6,0]"]
    assert page.do("JSON.stringify(valueAxis([{y: [1, 2]}]))") == '{"type":"linear"}'
    noisy = "JSON.stringify(valueAxis([{y: [2e-4, ...smoothed([2e-4, 2e-4, 2e-4], 0.6)]}]).range)"
    assert page.do("smoothed([2e-4, 2e-4, 2e-4], 0.6).some(value => value !== 2e-4)"), "the mean is not exact"
    assert page.do(noisy) == "[0,0.0004]"
    page.choose("#scale", "log")
    assert page.do(noisy) == json.dumps([math.log10(2e-4) - 1, math.log10(2e-4) + 1], separators=(",", ":"))
    assert page.do("JSON.stringify(valueAxis([{y: [0, -1]}]))") == '{"type":"log"}'


def test_attempts_have_their_changes_and_logs_as_text(page):
    page.click("#attempts > summary")
    page.wait_for("document.querySelectorAll('#attempts details').length === 4")
    assert page.texts("#attempts h3") == ["seed_0", "seed_1 has no logs"]
    assert page.texts("#attempts > div > details > summary") == ["attempt-10-0", "attempt-9-0"]
    assert page.texts("#attempts dl") == ["trainer.seed3 → 4", ""]
    assert page.texts("#attempts pre")[0] == f"{HOSTILE} of attempt 10-0"
    assert page.do("document.querySelectorAll('#attempts img, #attempts script').length") == 0


CALLS = {
    '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>': "add",
    "<tool_call>\n<function=search.web>\n<parameter=q>x</parameter></function></tool_call>": "search.web",
    "<tool_call>lookup\n<arg_key>a</arg_key></tool_call>": "lookup",
    "<|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>{}<|tool_call_end|>": "run",
    " to=functions.open <|message|>{}": "open",
    '<|python_tag|>{"name": "sum"}': "sum",
    '[TOOL_CALLS][{"name": "cut"': "cut",
    "<｜tool▁call▁begin｜>calc<｜tool▁sep｜>{}<｜tool▁call▁end｜>": "calc",
    "<tool_call>": "a tool",
}


def test_calls_of_tools_are_folded_in_texts_and_tokens(page):
    for text, name in CALLS.items():
        [call] = page.do(f"callsIn({json.dumps('I call. ' + text)})")
        assert call == {"from": len("I call. "), "to": len("I call. " + text), "label": f"call: {name}"}
    turn = "so <tool_call>x</tool_call> and <tool_call>y</tool_call>"
    folds = "[...document.querySelectorAll('#folds .folded')].map(fold => fold.textContent)"
    page.do(f"document.body.append(element('div', {{id: 'folds'}}, ...withCalls({json.dumps(turn)})))")
    calls = [f"call: {letter}<tool_call>{letter}</tool_call>" for letter in "xy"]
    assert page.do(folds) == calls and page.do("document.getElementById('folds').textContent.length") == len(turn) + 14
    texts = ["so", " <tool", "_call>x", "</tool_call>", " and ", "<tool_call>y</tool_call>", "READ"]
    codes = [0] * 6 + [-128]
    head = f"{{texts: {json.dumps(texts)}, newest: 0}}"
    known = f"{{head: {head}, places: [0,1,2,3,4,5,6], ages: [0,0,0,0,0,0,0], arrays: {{log_probs: {codes}}}}}"
    made = f"colouredText(new AnswerTokens({known}, 0, 7, 1), {{name: 'advantages', most: 1}}, 99, '', true)"
    page.do(f"document.getElementById('folds').replaceChildren({made})")
    assert page.do(folds) == ["call: x <tool_call>x</tool_call>", calls[1]]
    assert page.do("document.querySelectorAll('#folds .token').length") == 7


def test_all_figures_are_on_paper(page):
    """Rows never in view are drawn for it."""
    page.do("dispatchEvent(new Event('beforeprint'))")
    page.wait_for("figures.length > 10 && figures.every(figure => figure.chart.querySelector('.main-svg'))")


def test_slow_servers_stand_out_of_a_map_over_the_steps(page):
    page.do("dispatchEvent(new Event('beforeprint'))")
    chart = "figures.find(figure => figure.describe().startsWith('Speed of the servers of seed_0'))"
    factors = page.wait_for(f"{chart}?.chart.data?.[0].z")
    assert factors == [[1] * 6, [1, 4, 1, 1, 1, 1]]
    assert page.do(f"{chart}.chart.data[0].y") == ["node1:30000", "node2:30000"]
    assert page.do(f"{chart}.table().rows[1]") == ["node2:30000", "4", "31"]


def test_every_control_has_a_name_and_nothing_is_wider_than_a_narrow_screen(page, report_file):
    page.open(report_file.as_uri(), width=380, height=800)
    status(page, "Step 6")
    assert page.do("document.documentElement.scrollWidth") <= 380
    tree = page.command("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "combobox", "checkbox", "radio", "slider", "searchbox", "image", "link")
    named = [(node["role"]["value"], node["name"]["value"]) for node in tree if node["role"]["value"] in roles]
    assert len(named) >= 35 and all(name for _, name in named)


def contrast(page: Browser, css: str) -> float:
    """Of text and background, by WCAG 2."""
    colours = page.do(
        f"(e => {{ let b = e; while (getComputedStyle(b).backgroundColor === 'rgba(0, 0, 0, 0)') b = b.parentElement;"
        " return [getComputedStyle(e).color, getComputedStyle(b).backgroundColor]; })"
        f"(document.querySelector({json.dumps(css)}))"
    )
    luminances = []
    for colour in colours:
        parts = [float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        luminances.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    low, high = sorted(luminances)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_have_the_contrast_that_wcag_asks_for(page, theme):
    page.do(f"setTheme('{theme}')")
    parts = [
        "h2",
        "figcaption p",
        "#status",
        ".badge.right",
        ".badge.wrong",
        ".badge.cut",
        ".answer .text",
        ".top nav a",
    ]
    assert {css: contrast(page, css) for css in parts if contrast(page, css) < 4.5} == {}


def test_branches_of_an_agent_are_parts_of_its_answer_and_long_readings_are_folded(browser, tmp_path):
    run = write_run(tmp_path / "run", num_steps=1)
    write_branches(run, 2)
    write_report([run.path], tmp_path / "report.html")
    browser.errors.clear()
    browser.open((tmp_path / "report.html").as_uri())
    status(browser, "Step 2: 2 answers in 1 group, ")
    assert browser.texts(".branch > summary") == [
        f"branch {n} of 3 · {k}" for n, k in ((1, "2 tokens"), (2, "104 tokens"), (3, "1 token"))
    ]
    assert browser.do("[...document.querySelectorAll('.branch')].map(part => part.open)") == [True, False, False]
    folded = (
        "[...document.querySelectorAll('.branch > .text > .folded')].map(part => [part.textContent.length, part.open])"
    )
    assert browser.do(folded) == [[len("read: 60606 characters") + 6 + 101 * len(TOOL), False]]
    browser.choose("#colour", "advantages")
    browser.wait_for("document.querySelectorAll('.branch .token').length === 107")
    assert [summary.rpartition(" · ")[2] for summary in browser.texts(".branch > summary")] == [
        "A\u00a00.25",
        "A\u00a00.50",
        "A\u00a00.75",
    ]
    assert browser.texts(".branch > .text > .folded > summary") == ["read: 103 tokens"]
    of_tokens = "[...document.querySelectorAll('.branch .token')].map(token => Boolean(token.style.background))"
    assert browser.do(of_tokens) == [True] * 2 + [False] * 103 + [True] * 2
    browser.do("document.querySelectorAll('.branch')[1].open = true")
    browser.do("document.querySelectorAll('.branch > .text')[1].focus()")
    browser.command("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")  # over the folded ones
    tip = browser.wait_for("!document.getElementById('tip').hidden && document.getElementById('tip').textContent")
    assert tip.startswith('token 104 of 104: "42"') and "advantage 0.5" in tip
    browser.choose("#search", "result 7")
    browser.wait_for("view.words && [...document.querySelectorAll('.branch')].every(part => part.open)")
    assert browser.errors == []


def test_a_long_run_opens_and_is_not_too_large(browser, tmp_path):
    """Many steps of 64 groups of 8 answers with drawn words: like real answers, hard to
    compress."""
    run = write_run(tmp_path / "run", num_steps=amount(25, 500), num_groups=64, n=8, mean_length=60, num_distinct=10)
    write_report([run.path], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < MAX_BYTES
    browser.errors.clear()
    browser.open((tmp_path / "report.html").as_uri())
    status(browser, "512 answers in 64 groups")
    assert browser.errors == []


def test_thousands_of_noisy_steps_are_drawn_with_few_points(browser, tmp_path):
    rng = random.Random(0)
    run = write_run(tmp_path / "run", num_steps=1)
    record = json.loads(run.metrics.read_text().splitlines()[1])

    def noisy(step: int) -> dict:
        values = {
            name: value + rng.gauss(0, 0.1) for name, value in record.items() if name in ("reward/mean", "time/rollout")
        }
        return values | {"step": step, "time": START + 10 * step}

    run.metrics.write_text("".join(json.dumps(noisy(step)) + "\n" for step in range(1, 4001)))
    write_report([run.path], tmp_path / "report.html")
    browser.errors.clear()
    browser.open((tmp_path / "report.html").as_uri())
    draw_all(browser)
    sizes = browser.do(
        "figures.filter(f => f.isLinked).flatMap(f => f.chart.data.map(t => t.type === 'heatmap' ? 0 : t.x.length))"
    )
    assert 900 < max(sizes) <= 2000
    raw = "series(runs[0], 'reward/mean').values"
    drawn = f"{FIRST_CHART}.data[0].y"
    assert browser.do(f"Math.max(...{drawn}) === Math.max(...{raw}) && Math.min(...{drawn}) === Math.min(...{raw})")
    browser.do("zoom([500, 520]); dispatchEvent(new Event('beforeprint'))")
    assert browser.do(f"{FIRST_CHART}.data[0].x") == [*range(499, 522)]
    assert browser.errors == []
