"""Conversations for supervised fine-tuning: read from files, checked, tokenized, limited."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.batching import TrainSample
from megatron_dapo.data.prompt_dataset import MAX_PROMPT_BYTES
from megatron_dapo.data.prompt_files import read_rows
from megatron_dapo.data.token_arrays import LOG_PROB, MASK, TOKEN, VERSION
from megatron_dapo.data.tokenizer import ASSISTANT, Messages, Tokenizer


@dataclass
class ConversationReport:
    """The fate of one file's rows, in counts."""

    path: str
    num_rows: int = 0
    num_overlong: int = 0

    def __str__(self) -> str:
        overlong = f", {self.num_overlong} over-long" if self.num_overlong else ""
        return f"{self.path}: {self.num_rows - self.num_overlong} conversations of {self.num_rows} rows{overlong}"


@dataclass(frozen=True)
class ConversationSet:
    """The conversations of some files, in their order."""

    samples: list[TrainSample]
    report: list[ConversationReport]
    content: str  # a hash of them, see `PromptCursor`

    @classmethod
    def load(
        cls, files: Sequence[str], config: Config, tokenizer: Tokenizer, max_rows: int | None = None
    ) -> "ConversationSet":
        """Read .jsonl and .parquet files by the keys of `data` and `sft`.

        A row has a column with chat messages, or one with a prompt and one with the response to it.

        max_rows: the number of rows read from the start of each file; the rest may have
        conversations, too.

        Raises UserError, naming file, row and column, for unreadable rows, for rows with nothing to
        learn from, and if no conversation is left.
        """
        samples: list[TrainSample] = []
        reports: list[ConversationReport] = []
        digest = hashlib.sha256()
        for path in files:
            report = ConversationReport(str(path))
            reports.append(report)
            for place, messages in islice(_read(Path(path), config), max_rows):
                report.num_rows += 1
                tokens, is_learned = _encoded(messages, tokenizer, config.data.apply_chat_template, place)
                if len(tokens) > config.sft.max_length:
                    report.num_overlong += 1
                    continue
                samples.append(conversation_sample(len(samples), tokens, is_learned))
                digest.update(samples[-1].tokens.tobytes() + samples[-1].loss_mask.tobytes())
        if not samples and not any(report.num_rows == max_rows for report in reports):
            cure = "give files with rows, or raise sft.max_length"
            raise UserError(f"no conversation is left: {report}; {cure}." for report in reports)
        return cls(samples, reports, digest.hexdigest()[:16])


def conversation_sample(index: int, tokens: Sequence[int], is_learned: Sequence[bool]) -> TrainSample:
    """Return a conversation as a sample for the trainer.

    is_learned: of each token. The first token follows nothing, so it is never learned.
    """
    mask = np.zeros(len(tokens), dtype=MASK)
    mask[:-1] = is_learned[1:]
    return TrainSample(
        sample_id=index,
        uid=str(index),
        tokens=np.asarray(tokens, dtype=TOKEN),
        loss_mask=mask,
        rollout_log_probs=np.zeros(len(tokens), dtype=LOG_PROB),
        advantage=1.0,
        weight_versions=np.zeros(len(tokens), dtype=VERSION),
    )


def _encoded(messages: Messages, tokenizer: Tokenizer, apply_chat_template: bool, place: str) -> tuple[list, list]:
    try:
        tokens, is_learned = tokenizer.encode_conversation(messages, apply_chat_template)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{place}: {error}.") from error
    if not any(is_learned[1:]):
        raise UserError(
            f"{place}: the assistant's messages have no tokens, so that nothing is learned; remove the row."
        )
    return tokens, is_learned


def _read(path: Path, config: Config) -> Iterator[tuple[str, Messages]]:
    """Yield (place, conversation) of each row of a file; the place names file and row."""
    columns = (config.sft.messages_key, config.data.prompt_key, config.sft.response_key)
    names = [name for column in columns for name in (column, column.partition(".")[0])]

    def check(place: str, existing: Sequence[str]) -> None:
        if columns[0] not in existing and not all(_has(existing, column) for column in columns[1:]):
            some = ", ".join(list(existing)[:12])
            raise UserError(
                f"{place}: there is neither a column {columns[0]!r} nor {columns[1]!r} with {columns[2]!r} (columns "
                f"here: {some}); name yours with sft.messages_key, or with data.prompt_key and sft.response_key."
            )

    for number, row in read_rows(path, tuple(dict.fromkeys(names)), check):
        place = f"{path}, row {number}"
        if not isinstance(row, dict):
            raise UserError(f"{place}: expected an object with named columns, found {type(row).__name__}.")
        check(place, list(row))
        yield place, _messages(row, place, config)


def _has(existing: Sequence[str], column: str) -> bool:
    return column in existing or column.partition(".")[0] in existing


def _messages(row: Mapping[str, Any], place: str, config: Config) -> Messages:
    own = config.sft.messages_key
    if row.get(own) is not None:
        messages = row[own]
        column = own
    else:
        column = config.data.prompt_key
        messages = _asked(_value(row, column), config.data.prompt_template, f"{place}, column {column!r}")
        response = _value(row, config.sft.response_key)
        if not isinstance(response, str):
            raise UserError(f"{place}, column {config.sft.response_key!r}: expected text, {_seen(response)}.")
        messages = [*messages, {"role": ASSISTANT, "content": response}]
    place = f"{place}, column {column!r}"
    if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        raise UserError(
            f"{place}: expected messages with a role and a content (or tool_calls of the assistant), {_seen(messages)}."
        )
    if len(json.dumps(messages, default=str)) > MAX_PROMPT_BYTES:
        raise UserError(f"{place}: the conversation is larger than {MAX_PROMPT_BYTES >> 20} MiB; shorten or remove it.")
    # a parquet file gives every message all fields; to a template, a null field is a missing one
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def _asked(prompt: Any, template: str, place: str) -> list:
    """Return the messages of a prompt: text, or messages already."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": template.replace("{prompt}", prompt)}]
    if template != "{prompt}":
        raise UserError(f"{place}: data.prompt_template takes text, {_seen(prompt)}; leave it out.")
    if not isinstance(prompt, list):
        raise UserError(f"{place}: expected text or messages, {_seen(prompt)}.")
    return prompt


def _is_message(value: Any) -> bool:
    if not (isinstance(value, dict) and isinstance(value.get("role"), str)):
        return False
    return value.get("content") is not None or (value["role"] == ASSISTANT and bool(value.get("tool_calls")))


def _value(row: Mapping[str, Any], column: str) -> Any:
    """Return a column's value; for a missing column the value at the end of its dotted path."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _seen(value: Any) -> str:
    return f"found {type(value).__name__} {str(value)[:60]!r}"
