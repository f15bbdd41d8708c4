"""The families of docs/models.md, in SGLang's classes.

SGLang imports all of its two hundred models otherwise, image and speech models among them, and logs
an error for each missing package. It still does so for an architecture outside this list.
"""

from importlib import import_module
from typing import Any

from megatron_dapo.huggingface.family import Family
from megatron_dapo.huggingface.model_families import FAMILIES


def _served(family: Family) -> Any:
    """Return a family's class under the name of its architecture: SGLang looks for that name."""
    module, _, name = family.server_class.partition(":")
    served = getattr(import_module(module), name)
    return served if name == family.architecture else type(family.architecture, (served,), {})


EntryClass = [_served(family) for family in FAMILIES.values()]
