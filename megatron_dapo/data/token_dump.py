"""The tokens of a step's responses, kept for people: rollouts/step_NNNNNN.npz, by the trainer.

It holds the values of each token, response by response in the order of the step's .jsonl (of an
agent, branch by branch), and the text of every occurring token. A token takes 15 bytes before
compression, about 5 on the disk.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_dapo.common.bounded import parse_json, read_bytes
from megatron_dapo.common.files import whole_file
from megatron_dapo.data.tokenizer import Tokenizer

_MAX_BYTES = 256 << 20  # unpacked: of 17 million tokens
_ARRAYS = {
    "lengths": np.int32,
    "tokens": np.int32,
    "loss_mask": np.uint8,
    "weight_versions": np.int32,
    "rollout_log_probs": np.float16,
    "log_prob_diffs": np.float16,
    "advantages": np.float16,
}


@dataclass(frozen=True, eq=False)
class TokenDump:
    """Arrays over the T tokens of R responses, or branches of them; [T] but for `lengths`."""

    lengths: np.ndarray  # [R]
    tokens: np.ndarray
    loss_mask: np.ndarray  # 1 for the model's tokens, in the branch that counts them
    weight_versions: np.ndarray
    rollout_log_probs: np.ndarray  # by the server
    # trainer - server, before the update; NaN if the trainer did not compute it
    log_prob_diffs: np.ndarray
    advantages: np.ndarray  # NaN if the trainer did not compute them
    texts: dict[int, str]  # of every occurring token

    @classmethod
    def of_responses(
        cls, responses: Sequence[dict[str, np.ndarray]], texts: dict[int, str], *, limit: float = 6e4
    ) -> "TokenDump":
        """Join the responses' values per token, by the names of the fields above.

        limit: of the values stored as float16.
        """
        arrays = {"lengths": np.array([len(response["tokens"]) for response in responses], dtype=np.int32)}
        for name in list(_ARRAYS)[1:]:
            parts = [np.asarray(response[name]) for response in responses]
            joined = np.concatenate(parts) if parts else np.zeros(0)
            if _ARRAYS[name] is np.float16:
                joined = joined.astype(np.float32).clip(-limit, limit)
            arrays[name] = joined.astype(_ARRAYS[name])
        return cls(**arrays, texts=texts)

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises OSError on failure."""
        ids = sorted(self.texts)
        texts = json.dumps([self.texts[token] for token in ids]).encode()
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        with whole_file(path) as file:
            np.savez_compressed(
                file, **arrays, text_tokens=np.array(ids, dtype=np.int32), texts=np.frombuffer(texts, dtype=np.uint8)
            )

    @classmethod
    def read(cls, path: Path) -> "TokenDump | None":
        """Return a file's content; None if it is missing, damaged or larger than any step's."""
        try:
            with np.load(io.BytesIO(read_bytes(path, _MAX_BYTES)), allow_pickle=False) as stored:
                if sum(member.file_size for member in stored.zip.infolist()) > _MAX_BYTES:
                    return None
                arrays = {name: stored[name].astype(dtype) for name, dtype in _ARRAYS.items()}
                texts = parse_json(stored["texts"].tobytes())
                dump = cls(**arrays, texts=dict(zip(stored["text_tokens"].tolist(), texts, strict=True)))
        except Exception:  # after changed bytes zipfile, zlib and numpy raise nearly anything
            return None
        if {array.ndim for array in arrays.values()} != {1} or not all(isinstance(text, str) for text in texts):
            return None
        if dump.lengths.min(initial=0) < 0:
            return None
        sizes = {len(array) for name, array in arrays.items() if name != "lengths"}
        is_whole = sizes == {int(dump.lengths.sum())} and set(np.unique(dump.tokens).tolist()) <= dump.texts.keys()
        return dump if is_whole else None


class TokenTexts:
    """The text of each token, remembered after the first request."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def of(self, tokens: np.ndarray) -> dict[int, str]:
        """Return the text of every occurring token.

        Part of a character is the replacement character.
        """
        ids = np.unique(tokens).tolist()
        for token in ids:
            if token not in self._texts:
                self._texts[token] = self._text(token)
        return {token: self._texts[token] for token in ids}

    def _text(self, token: int) -> str:
        """Return the text of a token inside a text: some tokenizers drop a text's first space."""
        alone, twice = (self._tokenizer.decode([token] * number, skip_special_tokens=False) for number in (1, 2))
        return twice[len(alone) :] if twice.startswith(alone) else alone
