"""Mistakes in a file or an override: a sentence for the user, and the keys in doubt."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """One mistake of the user, found on reading."""

    keys: tuple[str, ...]
    """Dotted names of keys with a possibly different value in the config."""
    text: str
    """One sentence with the key, its value and the cure."""
