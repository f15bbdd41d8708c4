"""What is wrong with a config: a sentence for the user, and the keys that it is about."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """One mistake of the user.

    keys: dotted names of all keys whose values made it one. Where the value of one of them is not known, because it was
    refused, neither is the mistake, and it is not shown.
    text: one sentence that names the key, its value and the cure.
    """

    keys: tuple[str, ...]
    text: str
