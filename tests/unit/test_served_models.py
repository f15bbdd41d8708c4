"""The list of models that a server imports is that of the families a trainer can have."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_dapo.huggingface.model_spec import FAMILIES
from megatron_dapo.rollout.keyed_sglang import SERVED_MODELS

pytestmark = pytest.mark.unit


def test_every_family_is_imported_by_a_server_and_nothing_else():
    """A family that lacks here would still be served, after an import of all models."""
    (folder,) = find_spec(SERVED_MODELS).submodule_search_locations
    (module,) = (path for path in Path(folder).glob("*.py") if path.name != "__init__.py")
    *imports, entries = ast.parse(module.read_text()).body[1:]
    imported = {alias.name for statement in imports for alias in statement.names}
    assert imported == {element.id for element in entries.value.elts} == FAMILIES.keys()
