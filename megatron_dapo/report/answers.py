"""The answers that a run kept, step by step, as the page reads them: texts as JSON, tokens as arrays of bytes."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dapo.data.token_dump import TokenDump
from megatron_dapo.storage.run_folder import RunFolder, rollout_steps

TRAINED, HELD_OUT = "trained", "held-out"
_GROUP_KEYS = ("uid", "prompt", "ground_truth", "data_source", "masked")
_RESPONSE_KEYS = (
    "text",
    "reward",
    "raw_reward",
    "correct",
    "finish_reason",
    "num_tokens",
    "num_turns",
    "turns",
    "prompt",
    "answer",
    "replayed",
    "reward_error",
)
_NONE = -128  # of a number that is not known
_PER_OCTAVE = 4


@dataclass(frozen=True)
class StepFile:
    """The answers of one step. kind: TRAINED, or HELD_OUT: an evaluation after the step. tokens: what is known of their
    tokens, if the file exists."""

    kind: str
    step: int
    path: Path
    tokens: Path | None = None

    def groups(self) -> list[dict]:
        """Return the groups: what is said of each prompt, and under "responses" of the answers to it. Damaged lines are
        left out; [] where the file cannot be read."""
        try:
            lines = self.path.read_bytes().split(b"\n")  # str.splitlines ends lines at characters of the answers too
        except OSError:
            return []
        records = [record for record in map(_parsed, lines) if record is not None]
        return _by_prompt(records) if self.kind == HELD_OUT else [*_trained(records)]


def answer_files(folder: Path) -> list[StepFile]:
    """Return the files of answers of a run, by step; of a step, what it trained on comes first."""
    run = RunFolder(folder)
    trained = [
        StepFile(TRAINED, step, run.rollout(step), run.rollout_tokens(step)) for step in rollout_steps(run.rollouts)
    ]
    held_out = [StepFile(HELD_OUT, step, run.validation(step)) for step in rollout_steps(run.validation(0).parent)]
    return sorted([*trained, *held_out], key=lambda file: (file.step, file.kind == HELD_OUT))


def _parsed(line: bytes) -> dict | None:
    """Return a record, None where the line is damaged. A number that is not finite counts as none: a browser would
    refuse the whole step."""
    try:
        record = json.loads(line.decode("utf-8", "replace"), parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def _trained(records: list[dict]) -> Iterator[dict]:
    for record in records:
        if isinstance(responses := record.get("responses"), list):
            picked = [_picked(response, _RESPONSE_KEYS) for response in responses if isinstance(response, dict)]
            yield _picked(record, _GROUP_KEYS) | {"responses": picked}


def _by_prompt(records: list[dict]) -> list[dict]:
    """Return answers that stand one per line as groups, in the order in which their prompts first come."""
    groups: dict[Any, dict] = {}
    for record in records:
        key = str(record.get("prompt_index", record.get("prompt")))
        group = groups.setdefault(key, _picked(record, _GROUP_KEYS) | {"uid": f"held-out {key}", "responses": []})
        response = _picked(record, _RESPONSE_KEYS)
        response.pop("prompt", None)
        group["responses"].append(response)
    return [*groups.values()]


def _picked(record: dict, keys: tuple[str, ...]) -> dict:
    return {key: record[key] for key in keys if record.get(key) is not None}


def texts_bytes(groups: list[dict]) -> bytes:
    """Return the groups of a step as the page reads them."""
    return json.dumps(groups, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def tokens_bytes(file: StepFile, groups: list[dict]) -> bytes | None:
    """Return what is known of the tokens of a step as the page reads it; none where nothing is, or it is of other
    answers than these.

    A little-endian uint32 with the length of a JSON head, the head, padding to four bytes, then arrays over all tokens:
    the place of each token's text in the head (uint16, or uint32 where the head says "wide"), how many versions the
    token is older than the newest (uint8), and log-probs, differences and advantages as `coded` bytes. An array of
    which nothing is known is left out, and so are advantages where all tokens of a response have the same.
    """
    dump = TokenDump.read(file.tokens) if file.tokens else None
    responses = [response for group in groups for response in group["responses"]]
    if dump is None or dump.lengths.tolist() != [response.get("num_tokens") for response in responses]:
        return None
    ids = sorted(dump.texts)
    newest = int(dump.weight_versions.max(initial=0))
    own = dump.loss_mask != 0
    advantages = dump.advantages.astype(np.float32)
    per_response = [*_advantages(advantages, dump.lengths)]
    numbers = {
        "log_probs": np.where(own, dump.rollout_log_probs.astype(np.float32), np.nan),
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
    """Yield the advantage of each response; "" where it has none, None where its tokens differ."""
    for part in np.split(advantages, np.cumsum(lengths)[:-1]):
        values = np.unique(part[~np.isnan(part)])
        yield "" if not len(values) else float(f"{values[0]:.4g}") if len(values) == 1 else None


def coded(values: np.ndarray) -> np.ndarray:
    """Return numbers as signed bytes, to 9 % and from 1e-7 to 200, for colours: the sign, and four steps per octave.
    0 is 0, and what is not known -128."""
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.rint(_PER_OCTAVE * np.log2(np.abs(values)) + 96)
        coded_values = np.where(values == 0, 0, np.sign(values) * np.clip(steps, 1, 127))
    return np.where(np.isnan(values), _NONE, np.nan_to_num(coded_values)).astype(np.int8)


def num_answers(groups: list[dict]) -> int:
    return sum(len(group["responses"]) for group in groups)
