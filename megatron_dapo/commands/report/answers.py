"""The answers that a run kept, step by step, as the page reads them: texts as JSON, tokens as
arrays of bytes."""

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dapo.commands.report.values import number
from megatron_dapo.common.bounded import parse_json, read_bytes
from megatron_dapo.data.token_dump import TokenDump
from megatron_dapo.storage.run_folder import RunFolder, rollout_steps
from megatron_dapo.telemetry.metrics_file import is_step

TRAINED, HELD_OUT = "trained", "held-out"
MAX_FILE_BYTES = 256 << 20  # of the answers of a step: larger ones are left out


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _switch(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _turns(value: Any) -> list[dict] | None:
    turns = [_picked(turn, {"by": _text, "text": _text}) for turn in value if isinstance(turn, dict)]
    return [turn for turn in turns if "text" in turn] or None


def _branches(value: Any) -> list[dict] | None:
    if not isinstance(value, list) or not all(isinstance(branch, dict) for branch in value):
        return None
    return [_picked(branch, _BRANCH_KEYS) for branch in value] or None


Kinds = Mapping[str, Callable[[Any], Any]]
"""Key -> conversion to a value for the page's scripts, None for a wrong kind."""
_GROUP_KEYS: Kinds = {"uid": _text, "prompt": _text, "ground_truth": _text, "data_source": _text, "masked": _switch}
_BRANCH_KEYS: Kinds = {
    "num_tokens": number,
    "prompt": _text,
    "turns": lambda value: _turns(value) if isinstance(value, list) else None,
}
_RESPONSE_KEYS: Kinds = {
    **_BRANCH_KEYS,
    "text": _text,
    "reward": number,
    "raw_reward": number,
    "correct": _switch,
    "finish_reason": _text,
    "num_turns": number,
    "branches": _branches,
    "answer": _text,
    "replayed": _switch,
    "reward_error": _text,
}
_NONE = -128  # of an unknown number
_PER_OCTAVE = 4


@dataclass(frozen=True)
class StepFile:
    """The answers of one step."""

    kind: str
    """TRAINED, or HELD_OUT: an evaluation after the step."""
    step: int
    path: Path
    tokens: Path | None = None
    """The file of token data, if it exists."""

    def groups(self) -> list[dict]:
        """Return the groups: the data of each prompt, and under "responses" of its answers.

        Damaged lines and values of a wrong kind are left out; [] if the file is unreadable or above
        MAX_FILE_BYTES.
        """
        try:
            lines = io.BytesIO(read_bytes(self.path, MAX_FILE_BYTES))  # split only at \n
        except OSError:
            return []
        records = (record for record in map(_parsed, lines) if record is not None)
        return _by_prompt(records) if self.kind == HELD_OUT else [*_trained(records)]

    def num_bytes(self) -> int:
        """Return the size of the file; 0 if it is unreadable."""
        try:
            status = self.path.stat()
        except OSError:
            return 0
        return status.st_size if status.st_size <= MAX_FILE_BYTES else 0


def answer_files(folder: Path) -> list[StepFile]:
    """Return the files of answers of a run, by step; within a step, trained ones first."""
    run = RunFolder(folder)
    trained = [
        StepFile(TRAINED, step, run.rollout(step), run.rollout_tokens(step)) for step in rollout_steps(run.rollouts)
    ]
    held_out = [StepFile(HELD_OUT, step, run.validation(step)) for step in rollout_steps(run.validation(0).parent)]
    files = [file for file in (*trained, *held_out) if is_step(file.step)]
    return sorted(files, key=lambda file: (file.step, file.kind == HELD_OUT))


def _parsed(line: bytes) -> dict | None:
    """Return a record, or None for a damaged line."""
    try:
        record = parse_json(line.decode("utf-8", "replace"))
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _trained(records: Iterable[dict]) -> Iterator[dict]:
    for record in records:
        if isinstance(responses := record.get("responses"), list):
            picked = [_picked(response, _RESPONSE_KEYS) for response in responses if isinstance(response, dict)]
            yield _picked(record, _GROUP_KEYS) | {"responses": picked}


def _by_prompt(records: Iterable[dict]) -> list[dict]:
    """Return answers, one per line, as groups in order of their prompts' first occurrence."""
    groups: dict[Any, dict] = {}
    for record in records:
        key = str(record.get("prompt_index", record.get("prompt")))
        group = groups.setdefault(key, _picked(record, _GROUP_KEYS) | {"uid": f"held-out {key}", "responses": []})
        response = _picked(record, _RESPONSE_KEYS)
        response.pop("prompt", None)
        group["responses"].append(response)
    return [*groups.values()]


def _picked(record: dict, kinds: Kinds) -> dict:
    values = ((key, kind(record.get(key))) for key, kind in kinds.items())
    return {key: value for key, value in values if value is not None}


def texts_bytes(groups: list[dict]) -> bytes:
    """Return the groups of a step as the page reads them."""
    return json.dumps(groups, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def tokens_bytes(file: StepFile, groups: list[dict]) -> bytes | None:
    """Return a step's token data in the page's format; None without data of these answers.

    A little-endian uint32 with the length of a JSON head, the head, padding to four bytes, then
    arrays over all tokens:

    - the index of each token's text in the head (uint16, or uint32 if the head says "wide"),
    - the token's age in versions relative to the newest (uint8),
    - log-probs, differences and advantages as `coded` bytes.

    Unknown arrays are left out, and so are advantages if all tokens of a response have the same. A
    response of several branches has a part for each of them.
    """
    dump = TokenDump.read(file.tokens) if file.tokens else None
    responses = [response for group in groups for response in group["responses"]]
    rows = [row for response in responses for row in response.get("branches", [response])]
    if dump is None or dump.lengths.tolist() != [row.get("num_tokens") for row in rows]:
        return None
    ids = sorted(dump.texts)
    newest = int(dump.weight_versions.max(initial=0))
    written = dump.loss_mask != 0
    advantages = dump.advantages.astype(np.float32)
    per_response = [*_advantages(advantages, dump.lengths)]
    numbers = {
        "log_probs": np.where(written, dump.rollout_log_probs.astype(np.float32), np.nan),
        "differences": dump.log_prob_diffs.astype(np.float32),
        "advantages": advantages,
    }
    if None not in per_response:
        del numbers["advantages"]
    known = {name: array for name, array in numbers.items() if not np.isnan(array).all()}
    wide = len(ids) > 2**16
    head: dict[str, Any] = {
        "texts": [dump.texts[token] for token in ids],
        "lengths": dump.lengths.tolist(),
        "newest": newest,
        "wide": wide,
        "advantages": per_response,
        "arrays": list(known),
    }
    json_head = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    json_head += b" " * (-len(json_head) % 4)
    ages = np.clip(newest - dump.weight_versions, 0, 255).astype(np.uint8)
    places = np.searchsorted(np.array(ids), dump.tokens).astype("<u4" if wide else "<u2")
    arrays = [places, ages, *map(coded, known.values())]
    return np.array(len(json_head), dtype="<u4").tobytes() + json_head + b"".join(each.tobytes() for each in arrays)


def _advantages(advantages: np.ndarray, lengths: np.ndarray) -> Iterator[float | str | None]:
    """Yield the advantage of each response; "" without one, None if its tokens differ."""
    for part in np.split(advantages, np.cumsum(lengths)[:-1]):
        values = np.unique(part[np.isfinite(part)])
        yield "" if not len(values) else float(f"{values[0]:.4g}") if len(values) == 1 else None


def coded(values: np.ndarray) -> np.ndarray:
    """Return numbers as signed bytes for colors, to 9 % and from 1e-7 to 200: the sign, and four
    steps per octave. 0 is 0, unknown -128."""
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.rint(_PER_OCTAVE * np.log2(np.abs(values)) + 96)
        coded_values = np.where(values == 0, 0, np.sign(values) * np.clip(steps, 1, 127))
    return np.where(np.isnan(values), _NONE, np.nan_to_num(coded_values)).astype(np.int8)


def num_answers(groups: list[dict]) -> int:
    return sum(len(group["responses"]) for group in groups)
