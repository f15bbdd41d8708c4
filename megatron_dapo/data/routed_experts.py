"""The experts chosen by a server's routers: one array of small numbers per response.

A response of T tokens, its prompt included, has T - 1 rows: nobody asks for the last token's
successor, so no model has read it. A row has the experts of every layer, the first layer's first.
"""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dapo.data.token_arrays import EXPERT, Dtype
from megatron_dapo.huggingface.experts import MoEConfig
from megatron_dapo.huggingface.model_spec import ModelSpec

_SENT = np.dtype("<i4")  # as sent by SGLang


@dataclass(frozen=True)
class RouterShape:
    """The sizes of the choices of a model's routers: experts per token in each of num_layers."""

    num_layers: int
    moe: MoEConfig

    @classmethod
    def of(cls, spec: ModelSpec) -> "RouterShape":
        """Return those of a model with experts."""
        assert spec.moe is not None, "the model has no experts"
        return cls(spec.num_layers, spec.moe)

    @property
    def per_token(self) -> int:
        """Return the number of experts of a token, in all layers together."""
        return self.num_layers * self.moe.experts_per_token

    @property
    def dtype(self) -> Dtype:
        """Return the dtype of an expert's number."""
        return EXPERT if self.moe.bytes_per_choice == 1 else np.uint16

    def decode(self, text: str, num_rows: int) -> np.ndarray:
        """Return [num_rows * per_token] from a server's text.

        Raises ValueError, the end of a sentence.
        """
        try:
            sent = np.frombuffer(base64.b64decode(text, validate=True), dtype=_SENT)
        except (binascii.Error, TypeError, ValueError) as error:
            raise ValueError(f"has routed experts that cannot be read ({error})") from error
        if len(sent) != num_rows * self.per_token:
            raise ValueError(
                f"has {len(sent)} routed experts for {num_rows} tokens, but the model has {self.per_token} per token "
                f"({self.num_layers} layers x {self.moe.experts_per_token})"
            )
        is_outside = (sent < 0) | (sent >= self.moe.num_experts)
        if is_outside.any():
            raise ValueError(
                f"has the routed expert {sent[is_outside][0]}, but the model has {self.moe.num_experts} per layer"
            )
        # a server with kernels that do not tell their choice sends zeros
        chosen = np.sort(self.rows(sent, range(self.moe.num_dense_layers, self.num_layers)))
        is_twice = chosen[..., 1:] == chosen[..., :-1]
        if is_twice.any():
            raise ValueError(
                f"has the routed expert {chosen[..., 1:][is_twice][0]} twice for a token in a layer; give the server "
                "another --moe-runner-backend"
            )
        return sent.astype(self.dtype)

    def rows(self, experts: np.ndarray, layers: Sequence[int]) -> np.ndarray:
        """Return [rows, len(layers), experts_per_token] of some layers of a response's array."""
        return experts.reshape(-1, self.num_layers, self.moe.experts_per_token)[:, list(layers)]


def as_text(experts: np.ndarray) -> str:
    """Return an array as text, for a file of JSON."""
    return f"{experts.dtype.name} {base64.b64encode(experts.tobytes()).decode()}"


def from_text(text: str) -> np.ndarray:
    """Return the array given to `as_text`. Raises ValueError, the end of a sentence."""
    name, _, content = text.partition(" ")
    if name not in ("uint8", "uint16"):
        raise ValueError(f"has routed experts of type {name!r}")
    try:
        return np.frombuffer(base64.b64decode(content, validate=True), dtype=name)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"has routed experts that cannot be read ({error})") from error
