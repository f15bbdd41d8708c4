"""Assembles the page: one file that needs no network."""

import json
import re
import secrets
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from megatron_dapo.agents.call_marks import CALL_MARKS
from megatron_dapo.commands.report.answers import answer_files
from megatron_dapo.commands.report.attempts import attempts_of
from megatron_dapo.commands.report.embedding import StepAnswers, answers_of, packed
from megatron_dapo.commands.report.panels import CURVES, PHASES, UTILISATION, drawn
from megatron_dapo.commands.report.run_data import RunData, config_rows, read_run, runs_in

_SCRIPTS = ("data.js", "charts.js", "tokens.js", "temml/temml.min.js", "formulas.js", "viewer.js", "page.js")
_FILES = resources.files("megatron_dapo.commands.report") / "page"


def summary(folders: Sequence[Path], read: Callable[[Path], RunData] = read_run) -> dict:
    """Return the page's data of the runs without their answers.

    Raises UserError for a folder without a run.
    """
    runs = [read(folder) for folder in folders]
    metrics = {name for run in runs for columns in (run.steps, run.validations) for name in columns}
    return {
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "runs": [run.for_page() for run in runs],
        "config": config_rows(runs),
        "curves": drawn(CURVES, metrics),
        "utilisation": drawn(UTILISATION, metrics),
        "phases": PHASES,
        "calls": sorted({marks if marks[1:] else (*marks, "") for marks in CALL_MARKS.values()}),
    }


def whole_page(folders: Sequence[Path]) -> str:
    """Return the page of these runs, with the answers that fit.

    Raises UserError for a folder without a run.
    """
    folders = runs_in(folders)
    content = summary(folders)
    answers = answers_of(folders)
    for run, folder, carried in zip(content["runs"], folders, answers, strict=True):
        run["answers"] = [_entry(each) for each in carried]
        run["num_answer_files"] = len(answer_files(folder))
    logs = [(f"logs-{number}", pack(attempts_of(folder))) for number, folder in enumerate(folders)]
    chunks = [
        (f"{kind}-{number}-{place}", content_)
        for number, carried in enumerate(answers)
        for place, each in enumerate(carried)
        for kind, content_ in (("texts", each.texts), ("tokens", each.tokens))
        if content_
    ]
    return render(
        [run["name"] for run in content["runs"]], is_live=False, chunks=[("summary", pack(content)), *logs, *chunks]
    )


def _entry(each: StepAnswers) -> dict:
    return {
        "kind": each.file.kind,
        "step": each.file.step,
        "groups": each.num_groups,
        "answers": each.num_answers,
        "tokens": bool(each.tokens),
    }


def pack(content: dict | list) -> str:
    """Return plain data as a page carries it."""
    return packed(
        json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
    )


def render(names: Sequence[str], *, is_live: bool, chunks: Sequence[tuple[str, str]]) -> str:
    """Return the page's HTML. is_live: it asks the server that sent it for everything. chunks:
    (name, base64)."""
    from plotly.offline import get_plotlyjs  # only this command needs it

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (_FILES / name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("report.html.jinja").render(
        title=" and ".join(names),
        is_live=is_live,
        nonce=secrets.token_urlsafe(16),
        style=_text("temml/Temml-Local.css") + _text("report.css"),
        scripts=[_without_end(get_plotlyjs()), _without_end(f"/*\n{_text('temml/LICENSE')}*/"), *map(_text, _SCRIPTS)],
        chunks=chunks,
    )


def _text(name: str) -> Markup:
    """Return a file's text. A font would be one more file."""
    return _without_end(re.sub(r"@font-face \{[^}]*\}", "", (_FILES / name).read_text(encoding="utf-8")))


def _without_end(script: str) -> Markup:
    """Return our own text as it is. It must not close the element that it stands in."""
    assert "</script" not in script.lower() and "</style" not in script.lower()
    return Markup(script)
