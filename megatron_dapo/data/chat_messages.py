"""The type of chat messages."""

from collections.abc import Sequence
from typing import Any

Messages = Sequence[dict[str, Any]]
