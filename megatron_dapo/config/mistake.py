"""What is wrong with a file or an override: a sentence for the user, and what is not known for it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """One mistake of the user in what was given, which is found when it is read."""

    keys: tuple[str, ...]
    """Dotted names of the keys that may have another value than the config has."""
    text: str
    """One sentence that names the key, its value and the cure."""
