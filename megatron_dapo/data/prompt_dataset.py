"""Prompts from prompt files: read, checked, deduplicated, tokenized, limited in length."""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date, time
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from megatron_dapo.common.errors import UserError
from megatron_dapo.data.prompt_files import no_column, read_rows
from megatron_dapo.data.samples import Prompt
from megatron_dapo.data.tokenizer import Messages, Tokenizer

MAX_PROMPT_BYTES = 4 << 20  # far above a model's reach; tokenizing takes seconds and 200 MB per MiB
_NAMED_CONFLICTS = 3


@dataclass
class FileReport:
    """The fate of one file's rows: num_rows is the sum of num_kept and the dropped ones' counts."""

    path: str
    num_rows: int = 0
    num_duplicates: int = 0
    num_conflicting: int = 0
    num_overlong: int = 0
    num_outside: int = 0  # with a pass rate outside `data.pass_rate`, or null
    num_truncated: int = 0

    @property
    def num_kept(self) -> int:
        """Return the number of rows kept as prompts of the data set."""
        dropped = (self.num_duplicates, self.num_conflicting, self.num_overlong, self.num_outside)
        return self.num_rows - sum(dropped)

    def __str__(self) -> str:
        counts = {
            "duplicates": self.num_duplicates,
            "with conflicting answers": self.num_conflicting,
            "over-long": self.num_overlong,
            "outside data.pass_rate": self.num_outside,
            "truncated": self.num_truncated,
        }
        details = "".join(f", {count} {name}" for name, count in counts.items() if count)
        return f"{self.path}: {self.num_kept} prompts of {self.num_rows} rows{details}"


@dataclass(frozen=True)
class Columns:
    """The columns of a row, by keys of the config's `data` section."""

    prompt_key: str
    answer_key: str | None = None
    prompt_template: str = "{prompt}"
    data_source: str = ""  # of rows without one of their own
    pass_rate_key: str | None = None  # a column of numbers; without a name it is not read
    difficulty_key: str | None = None  # as pass_rate_key
    needs_answer: bool = False  # refuse an empty answer


@dataclass(frozen=True)
class PromptDataset:
    """The prompts of some files, in their order."""

    prompts: list[Prompt]
    report: list[FileReport]  # one entry per file
    difficulties: tuple[float, ...] = ()  # of each prompt, if they were asked for

    @classmethod
    def load(
        cls,
        files: Sequence[str],
        prompt_key: str,
        tokenizer: Tokenizer,
        max_prompt_length: int,
        filter_overlong: bool = True,
        truncation: Literal["error", "left"] = "error",
        dedup: bool = True,
        apply_chat_template: bool = True,
        conflicting_answers: Literal["error", "drop", "keep"] = "error",
        answer_key: str | None = None,
        prompt_template: str = "{prompt}",
        data_source: str = "",
        pass_rate: Sequence[float] | None = None,
        pass_rate_key: str = "pass_rate",
        difficulty_key: str | None = None,
        needs_answer: bool = True,
        max_rows: int | None = None,
    ) -> "PromptDataset":
        """Read .jsonl and .parquet files by the keys of the config's `data` section.

        A row has the column `prompt_key` (chat messages or a string) and its answer in
        `answer_key`. By default the answer is in reward_model.ground_truth or in `label`.
        data_source and extra_info are optional. Rows of equal prompt and answer are the same, at
        any index.

        needs_answer: false if no reward function reads it; then it may be empty.

        max_rows: the number of rows read from the start of each file; the rest may have prompts,
        too.

        Raises UserError, naming file, row and column, for unreadable rows, for prompts with
        conflicting answers, and for a data set without prompts.
        """
        rate_key = None if pass_rate is None else pass_rate_key
        columns = Columns(prompt_key, answer_key, prompt_template, data_source, rate_key, difficulty_key, needs_answer)
        limit = _LengthLimit(max_prompt_length, filter_overlong, truncation)
        kept: list[tuple[Prompt, FileReport, float]] = []
        reports: list[FileReport] = []
        seen: set[str] = set()
        answers = _Answers()
        for path in files:
            report = FileReport(str(path))
            reports.append(report)
            for place, prompt, rate, difficulty in islice(_read(Path(path), columns), max_rows):
                report.num_rows += 1
                if pass_rate is not None and not pass_rate[0] <= rate <= pass_rate[1]:
                    report.num_outside += 1
                    continue
                if dedup and prompt.key in seen:
                    report.num_duplicates += 1
                    continue
                seen.add(prompt.key)
                if conflicting_answers != "keep":
                    answers.add(prompt, place)
                encoded = _encode(prompt, tokenizer, apply_chat_template, f"{place}, column {prompt_key!r}")
                limited = limit.apply(encoded, place, tokenizer, report)
                if limited is not None:
                    kept.append((replace(limited, index=len(kept)), report, difficulty))
        if conflicting_answers == "error":
            answers.check()
        agreeing = _without_conflicts(kept, answers)
        if not agreeing and not any(report.num_rows == max_rows for report in reports):
            raise UserError(_no_prompts(reports, max_prompt_length))
        difficulties = tuple(difficulty for _, difficulty in agreeing) if difficulty_key else ()
        return cls([prompt for prompt, _ in agreeing], reports, difficulties)


def content_key(row: dict[str, Any], place: str, columns: Columns) -> str:
    """Return the identity of a prompt file's row: a hash of messages and answer.

    place: names file and row for errors. Raises UserError for a row unfit for any data set.
    """
    return _checked(row, place, columns).key


def _json_of(messages: str | Messages) -> str:
    """Return messages in a form for comparison."""
    return json.dumps(messages, sort_keys=True, default=str)


def _messages_digest(prompt: Prompt) -> bytes:
    return hashlib.sha256(_json_of(prompt.messages).encode()).digest()[:16]


def _encode(prompt: Prompt, tokenizer: Tokenizer, apply_chat_template: bool, place: str) -> Prompt:
    """Return the prompt with its tokens. place: names file, row and column for errors."""
    try:
        tokens, text = tokenizer.encode_prompt(prompt.messages, apply_chat_template)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{place}: {error}.") from error
    if not tokens:
        raise UserError(f"{place}: the prompt has no tokens.")
    return replace(prompt, tokens=tokens, text=text)


class _Answers:
    """The first answer of each prompt.

    conflicts: prompts with another answer as well, by their hash; with the first two such rows of
    each, in words.
    """

    def __init__(self) -> None:
        self._first: dict[bytes, tuple[str, str]] = {}
        self.conflicts: dict[bytes, str] = {}

    def add(self, prompt: Prompt, place: str) -> None:
        """Compare a row's answer. place: names file and row."""
        digest = _messages_digest(prompt)
        answer, first_place = self._first.setdefault(digest, (prompt.ground_truth, place))
        if answer != prompt.ground_truth and digest not in self.conflicts:
            self.conflicts[digest] = (
                f"{place}: the answer is {prompt.ground_truth[:60]!r}, but {answer[:60]!r} for the same prompt in "
                f"{first_place}"
            )

    def check(self) -> None:
        """Raise UserError if there are conflicts."""
        if self.conflicts:
            named = list(self.conflicts.values())[:_NAMED_CONFLICTS]
            more = len(self.conflicts) - len(named)
            others = f" ({more} more prompts have such rows)" if more else ""
            cure = "correct the rows, or set data.conflicting_answers to drop or keep"
            raise UserError([f"{words}; {cure}." for words in named[:-1]] + [f"{named[-1]}{others}; {cure}."])


def _without_conflicts(
    kept: Sequence[tuple[Prompt, FileReport, float]], answers: _Answers
) -> list[tuple[Prompt, float]]:
    """Return the prompts without conflicting answers, numbered anew, with their difficulties.

    Count the others in their reports.
    """
    agreeing: list[tuple[Prompt, float]] = []
    for prompt, report, difficulty in kept:
        if answers.conflicts and _messages_digest(prompt) in answers.conflicts:
            report.num_conflicting += 1
        else:
            agreeing.append((replace(prompt, index=len(agreeing)), difficulty))
    return agreeing


@dataclass(frozen=True)
class _LengthLimit:
    """`data.max_prompt_length`, and the treatment of longer prompts."""

    max_tokens: int
    filter_overlong: bool
    truncation: str

    def apply(self, prompt: Prompt, place: str, tokenizer: Tokenizer, report: FileReport) -> Prompt | None:
        """Return the prompt within the limit, or None to drop it.

        place: names file and row for errors.
        """
        if len(prompt.tokens) <= self.max_tokens:
            return prompt
        if self.filter_overlong:
            report.num_overlong += 1
            return None
        if self.truncation == "left":
            report.num_truncated += 1
            tokens = prompt.tokens[-self.max_tokens :]
            return replace(prompt, tokens=tokens, text=tokenizer.decode(tokens, skip_special_tokens=False))
        raise UserError(
            f"{place}: the prompt has {len(prompt.tokens)} tokens, data.max_prompt_length is {self.max_tokens}; raise "
            f"it, or set data.filter_overlong_prompts: true, or data.truncation: left."
        )


def _read(path: Path, columns: Columns) -> Iterator[tuple[str, Prompt, float, float]]:
    """Yield (place, checked row, its pass rate, its difficulty) of a file.

    The place names file and row, counted from 1. A number without a key is 0.
    """
    answer = ("reward_model", "label") if columns.answer_key is None else (columns.answer_key,)
    numbers = tuple(key for key in (columns.pass_rate_key, columns.difficulty_key) if key)
    for number, row in read_rows(path, (columns.prompt_key, *answer, "data_source", "extra_info", *numbers)):
        place = f"{path}, row {number}"
        prompt = _checked(row, place, columns)
        rate = _number(row, place, columns.pass_rate_key, "data.pass_rate_key", highest=1.0)
        yield place, prompt, rate, _number(row, place, columns.difficulty_key, "data.difficulty_key")


def _number(row: dict[str, Any], place: str, key: str | None, name: str, highest: float = math.inf) -> float:
    """Return the number in a column, 0 without a key. Raises UserError.

    A number with a highest value may not be below 0. It may be null, returned as NaN: nobody has
    measured it.
    """
    if key is None:
        return 0.0
    is_bounded = highest < math.inf
    value = row.get(key)
    if value is None and key in row and is_bounded:
        return math.nan
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not math.isfinite(value)
        or (is_bounded and not 0 <= value <= highest)
    ):
        kind = f"a number from 0 to {highest:g}" if is_bounded else "a number"
        seen = _seen(value) if key in row else "the column is missing"
        raise UserError(f"{place}, column {key!r}: expected {kind}, {seen}; {name} names another column.")
    return float(value)


def _checked(row: Any, place: str, columns: Columns) -> Prompt:
    """Return a row as a prompt without tokens. place: names file and row for errors."""
    prompt_key = columns.prompt_key
    if not isinstance(row, dict):
        raise UserError(f"{place}: expected an object with named columns, found {type(row).__name__}.")
    if prompt_key not in row:
        raise no_column(place, prompt_key, list(row))
    messages = row[prompt_key]
    if not (isinstance(messages, str) or _are_messages(messages)):
        raise UserError(
            f"{place}, column {prompt_key!r}: expected text or messages with role and content, {_seen(messages)}."
        )
    if isinstance(messages, str):
        messages = columns.prompt_template.replace("{prompt}", messages)
    elif columns.prompt_template != "{prompt}":
        raise UserError(
            f"{place}, column {prompt_key!r}: data.prompt_template takes text, {_seen(messages)}; leave it out."
        )
    prompt_json = _json_of(messages)
    if len(prompt_json) > MAX_PROMPT_BYTES:
        raise UserError(
            f"{place}, column {prompt_key!r}: the prompt is larger than {MAX_PROMPT_BYTES >> 20} MiB; shorten or "
            f"remove it."
        )
    ground_truth = _ground_truth(row, place, columns)
    content = f"[{prompt_json}, {json.dumps(ground_truth)}]"
    return Prompt(
        index=-1,
        key=hashlib.sha256(content.encode()).hexdigest()[:32],
        tokens=(),
        text="",
        messages=messages,
        ground_truth=ground_truth,
        data_source=_optional(row, "data_source", str, columns.data_source, place),
        extra_info=_plain(_optional(row, "extra_info", dict, {}, place), "extra_info", place),
    )


def _are_messages(value: Any) -> bool:
    return bool(value) and isinstance(value, list) and all(_is_message(message) for message in value)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and value.get("content") is not None


def _ground_truth(row: dict[str, Any], place: str, columns: Columns) -> str:
    answer_key = columns.answer_key
    reward_model = row.get("reward_model")
    if answer_key is not None:
        if answer_key not in row:
            raise no_column(place, answer_key, list(row), "data.answer_key")
        column = answer_key
        value = row[answer_key]
    elif isinstance(reward_model, dict):
        column = "reward_model.ground_truth"
        value = reward_model.get("ground_truth")
    elif reward_model is None and "label" in row:
        column = "label"
        value = row["label"]
    else:
        raise UserError(
            f"{place}: the answer is missing; it must be in reward_model.ground_truth, or in the column 'label' "
            f"(columns here: {', '.join(row)})."
        )
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"{place}, column {column!r}: expected text or a number, {_seen(value)}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{place}, column {column!r}: {value} is no answer; correct or remove the row.")
    text = str(value)
    if columns.needs_answer and not text.strip():
        raise UserError(f"{place}, column {column!r}: the answer is empty; correct or remove the row.")
    return text


def _optional(row: dict[str, Any], column: str, kind: type, default: Any, place: str) -> Any:
    value = row.get(column)
    if value is None:
        return default
    if not isinstance(value, kind):
        expected = "text" if kind is str else "an object"
        raise UserError(f"{place}, column {column!r}: expected {expected}, {_seen(value)}.")
    return value


def _plain(value: Any, column: str, place: str) -> Any:
    """Return an equal value fit for a checkpoint: a waiting prompt is the same after a resume.

    Dates and times become ISO text, decimals text, tuples lists. Raises UserError for other types.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {str(name): _plain(item, f"{column}.{name}", place) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, column, place) for item in value]
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise UserError(
        f"{place}, column {column!r}: a checkpoint cannot hold {type(value).__name__} values; store text or numbers, "
        f"or remove the column."
    )


def _seen(value: Any) -> str:
    return f"found {type(value).__name__} {str(value)[:60]!r}"


def _no_prompts(reports: list[FileReport], max_prompt_length: int) -> list[str]:
    if not reports:
        return ["no prompt files are given; name them in data.train_files."]
    num_overlong = sum(report.num_overlong for report in reports)
    if any(report.num_conflicting for report in reports):
        return [f"no prompt is left: {report}; correct their answers (data.conflicting_answers)." for report in reports]
    if any(report.num_outside for report in reports):
        return [f"no prompt is left: {report}; widen data.pass_rate." for report in reports]
    if num_overlong:
        return [f"all {num_overlong} prompts are longer than data.max_prompt_length = {max_prompt_length}; raise it."]
    return [f"{report.path}: the file has no rows." for report in reports]
