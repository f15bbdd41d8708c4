"""Formulas in the answers of the report's page, drawn in a real browser from whatever a model
wrote."""

import json

import pytest

from megatron_dapo.commands.report.command import write_report
from megatron_dapo.common.files import write_whole
from tests.browser import Browser, needs_chromium, status
from tests.helpers import REPOSITORY
from tests.report_runs import write_branches, write_run

pytestmark = [pytest.mark.e2e, needs_chromium]

PROMPT = r"Let $x^2 = 4$. Tickets cost $5 and $10. What is \(x\)?"
ANSWER = "So \\(x = 2\\), a <b>\n\\[\n\\sqrt{4} = 2\n\\]\nand $$\\frac{4}{2}$$ or $\\boxed{2}$, not $\\unknown{x}$."
DRAWN = [r"\(x = 2\)", "\\[\n\\sqrt{4} = 2\n\\]\n", r"$$\frac{4}{2}$$", r"$\boxed{2}$"]
SOURCES = "[...document.querySelectorAll('#list .answer .text')].map(text => text.textContent)"
# of the first answer
FIRST = "[...document.querySelector('#list .answer').querySelectorAll('.formula')].map(formula => formula.title)"


@pytest.fixture(scope="module")
def report_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("formulas")
    run = write_run(folder / "run", num_steps=1, num_groups=12)
    groups = [json.loads(line) for line in run.rollout(1).read_text().splitlines()]
    groups[0]["prompt"] = PROMPT
    for group in groups:
        group["responses"][0]["text"] = ANSWER
    groups[0]["responses"][1]["text"] = "$x$ " * 1000
    write_whole(run.rollout(1), "".join(json.dumps(group) + "\n" for group in groups))
    write_report([run.path], folder / "report.html")
    return folder / "report.html"


@pytest.fixture
def page(browser, report_file):
    browser.requests.clear()
    browser.errors.clear()
    browser.open(report_file.as_uri())
    status(browser, "Step 1: 48 answers in 12 groups")
    show(browser, 0)
    yield browser
    assert browser.errors == []
    assert [address for address in browser.requests if not address.startswith(("file:", "data:"))] == []
    assert browser.do("typeof window.taken") == "undefined"


def show(page: Browser, group: int) -> None:
    page.do(f"[...document.querySelectorAll('#list .group')].at({group}).scrollIntoView({{behavior: 'instant'}})")


def drawn(page: Browser, text: str) -> tuple[list[str], str]:
    """Return the sources of a text's formulas, and its text after they are put back."""
    script = (
        f"(part => {{ const text = element('div', {{class: 'prompt'}}, {json.dumps(text)}); part.append(text);"
        " byId('list').append(part); drawFormulas(text); drawFormulas(text);"
        " const sources = [...part.querySelectorAll('.formula')].map(formula => formula.title);"
        " part.remove(); showFormulas(part); return [sources, part.textContent]; })(element('div'))"
    )
    sources, back = page.do(script)
    return sources, back


TEXTS = {
    "It costs $5 and $10, or US$5-$10.": [],
    "**$5** or **$10**\n\n$ 5$\n\n$5 $\n\n\\$x$ or \\\\(x\\\\)": [],
    "$5 for $x$ of $n$th": ["$x$", "$n$"],
    "`$x$` and ```sh\necho $a $b$\n\\(x\\)": [],
    "$x\n\n+ y$ \\[x\n \n+ y\\]": [],
    "$x\n+ y$ \\[a \\\\[2pt] b\\]": ["$x\n+ y$", "\\[a \\\\[2pt] b\\]"],
    "$$a \\text{ if $b$}$$ \\(c \\( d\\)": ["$$a \\text{ if $b$}$$", "\\( d\\)"],
    "$$\\begin{align}x &= 1 \\\\ y &= 2\\end{align}$$": ["$$\\begin{align}x &= 1 \\\\ y &= 2\\end{align}$$"],
    "\\(unclosed, $$unclosed, `unclosed": [],
    "$50\\%$ of 50% is $25$": ["$50\\%$", "$25$"],
    "\\boxed{7} and \\frac{1}{2}": [],
}


def test_formulas_stand_between_their_marks_and_nothing_else_does(page):
    assert {text: drawn(page, text) for text in TEXTS} == {text: (formulas, text) for text, formulas in TEXTS.items()}


HOSTILE = [
    r"\href{javascript:window.taken=1}{x}",
    r"\url{javascript:window.taken=1}",
    r"\includegraphics{http://127.0.0.1:9/x.png}",
    r"\htmlClass{top}{x}",
    r"\class{top}{x}",
    r"\id{failure}{x}",
    r"\style{position:fixed}{x}",
    r"\data{onclick=window.taken=1}{x}",
    r"\color{url(http://127.0.0.1:9/)}{x}",
    r"x \ref{failure}",
    r"\def\a{\a\a}\a",
    r"\newcommand{\a}{\a\a}\a",
    r"\let\a\llap \a{x}",
    r"\unknown",
    r"\frac{1}{",
    "x } y",
    "x % y",
    "x" * 2001,
    "{" * 11 + "x" + "}" * 11,
    r"\left(" * 120 + "x" + r"\right)" * 120,
    *(f"\\{name}{{" * 10 + "x" + "}" * 10 for name in ("equilibriumRight", "equilibriumLeft", "llap", "mathllap")),
    r"\cancelto{a}{" * 10 + "x" + "}" * 10,
    r"{\verb|}|" * 30 + "x" + "}" * 30,
]


def test_a_hostile_or_broken_formula_stays_text(page):
    texts = [text for tex in HOSTILE for text in (f"$${tex}$$", f"\\({tex}\\)")]
    assert {text: drawn(page, text) for text in texts} == {text: ([], text) for text in texts}


def test_what_is_drawn_has_no_links_pictures_or_names_of_the_page(page):
    shown = [
        r"$$\begin{align}x \label{failure}\end{align}$$",
        r"$$x \tag{1}\label{failure}$$",
        r"\(\text{<img src=x onerror=window.taken=1>}\)",
        r"\(<script>window.taken=1</script>\)",
        r"\(\kern-9999em\rule{9999em}{9999em}x\)",
    ]
    made = f"element('div', {{class: 'prompt'}}, {json.dumps(' '.join(shown))})"
    page.do(f"(text => {{ byId('list').prepend(text); drawFormulas(text); }})({made})")
    assert page.do("[...document.querySelector('#list .prompt').querySelectorAll('.formula')].length") == len(shown)
    assert page.do("document.querySelectorAll('#list :is(a, img, script, [id], [href], [src])').length") == 0
    assert page.do("byId('failure').tagName") == "P" and page.do("document.documentElement.scrollWidth") <= 1400


def test_a_megabyte_of_marks_takes_little_time(page):
    for part in ("$a ", "$$a\n\n", r"\(", r"\(\[", "`a", "```", "\\", "{", "$x$ "):
        made = f"element('div', {{}}, {json.dumps(part)}.repeat({1_000_000 // len(part)}))"
        script = "(text => { const begin = performance.now(); drawFormulas(text); return [performance.now() - begin,"
        took, count = page.do(f"{script} text.querySelectorAll('.formula').length]; }})({made})")
        assert took < 10_000 and count <= 1000 and (count > 0) == (part == "$x$ "), part


def test_the_version_is_the_one_that_is_said(page):
    said = REPOSITORY / "megatron_dapo" / "commands" / "report" / "page" / "temml" / "README.md"
    assert said.read_text().startswith(f"# Temml {page.do('temml.version')}\n")


def test_the_switch_and_its_key_show_the_text_and_the_formulas(page):
    assert page.wait_for(FIRST) == DRAWN
    assert page.do("[...document.querySelectorAll('#list .prompt')][0].querySelectorAll('math').length") == 2
    tree = page.command("Accessibility.getFullAXTree")["nodes"]
    assert sum(node["role"]["value"] == "MathMLFraction" for node in tree) >= 1
    page.press("f")
    assert page.do("document.querySelectorAll('#list math').length") == 0
    assert page.do(SOURCES)[0] == ANSWER and page.texts("#list .prompt")[0] == PROMPT
    page.click("#formulas")
    page.wait_for(f"{FIRST}.length === {len(DRAWN)}")


def test_tokens_and_marked_words_stay_as_they_are(page):
    page.choose("#search", "sqrt")
    page.wait_for("document.querySelectorAll('#list .text mark').length")
    page.do("dispatchEvent(new Event('beforeprint'))")
    assert page.do(SOURCES)[0] == ANSWER and page.do(f"{FIRST}.length") == 0
    page.choose("#search", "")
    page.wait_for(f"{FIRST}.length")
    page.choose("#colour", "advantages")
    page.wait_for("document.querySelectorAll('#list .token').length")
    page.do("dispatchEvent(new Event('beforeprint'))")
    assert page.do("document.querySelectorAll('#list .text math').length") == 0


def test_formulas_are_drawn_when_they_come_in_sight_and_all_of_them_for_paper(page):
    page.wait_for(f"{FIRST}.length")
    last = "[...document.querySelectorAll('#list .group')].at(-1).querySelectorAll('.text .formula').length"
    page.do("scrollTo({top: 0, behavior: 'instant'})")
    page.choose("#sort", "drawn")
    page.do("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
    assert page.do(last) == 0
    show(page, -1)
    page.wait_for(f"{last} === {len(DRAWN)}")
    page.do("scrollTo({top: 0, behavior: 'instant'}); dispatchEvent(new Event('beforeprint'))")
    every = "[...document.querySelectorAll('#list .group')].every(group => group.querySelector('.text math'))"
    assert page.do(every)


def test_all_of_a_long_text_has_its_formulas(page):
    count = "document.querySelectorAll('#list .answer')[1].querySelectorAll('.formula').length"
    page.wait_for(f"{count} === 625")
    page.do("document.querySelectorAll('#list .answer')[1].querySelector('.text button').click()")
    page.wait_for(f"{count} === 1000")
    assert page.do(FIRST) == DRAWN


def test_only_what_an_agent_itself_says_has_formulas(browser, tmp_path):
    run = write_run(tmp_path / "run", num_steps=1)
    write_branches(run, 2)
    group = json.loads(run.rollout(2).read_text())
    turns = [("model", "$x$ <tool_call>$y$</tool_call>"), ("environment", "PATH=$HOME:$PATH $z$"), ("model", "$w$")]
    group["responses"][0]["branches"][0]["turns"] = [{"by": by, "text": text} for by, text in turns]
    write_whole(run.rollout(2), json.dumps(group) + "\n")
    write_report([run.path], tmp_path / "report.html")
    browser.errors.clear()
    browser.open((tmp_path / "report.html").as_uri())
    status(browser, "Step 2: 2 answers in 1 group, ")
    show(browser, 0)
    assert browser.wait_for(FIRST) == ["$x$", "$w$"]
    assert browser.errors == []
