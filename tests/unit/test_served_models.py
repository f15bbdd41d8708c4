"""The list of models that a server imports is that of the families a trainer can have."""

import ast
import importlib
import runpy
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_dapo.huggingface.model_families import FAMILIES
from megatron_dapo.huggingface.weight_rows import DECODER
from megatron_dapo.servers.keyed_sglang import SERVED_MODELS

pytestmark = pytest.mark.unit


def _file(name: str) -> Path:
    (folder,) = find_spec(SERVED_MODELS).submodule_search_locations
    assert {path.stem for path in Path(folder).glob("*.py")} == {"__init__", "decoders", "classifiers"}
    return Path(folder) / f"{name}.py"


def test_a_server_imports_the_models_of_the_families_under_their_names_and_nothing_else(monkeypatch):
    """A family that lacks here would still be served, after an import of all models."""
    modules = []

    def imported(module: str) -> SimpleNamespace:
        modules.append(module)
        names = [family.server_class.partition(":")[2] for family in FAMILIES.values()]
        return SimpleNamespace(**{name: type(name, (), {}) for name in names})

    monkeypatch.setattr(importlib, "import_module", imported)
    served = runpy.run_path(str(_file("decoders")))["EntryClass"]
    assert [entry.__name__ for entry in served] == list(FAMILIES)
    assert set(modules) == {family.server_class.partition(":")[0] for family in FAMILIES.values()}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_class_that_serves_a_family_exists(architecture):
    """Read without importing SGLang, which takes long."""
    module, _, name = FAMILIES[architecture].server_class.partition(":")
    package, *rest = module.split(".")
    (folder,) = find_spec(package).submodule_search_locations
    tree = ast.parse(Path(folder).joinpath(*rest).with_suffix(".py").read_text())
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    imported = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert name in defined | imported


def test_every_plain_decoder_has_a_classifier_for_reward_models():
    """Under the name that Hugging Face gives it; of the other families SGLang has none."""
    classes = {node.name for node in ast.parse(_file("classifiers").read_text()).body if isinstance(node, ast.ClassDef)}
    plain = {name for name, family in FAMILIES.items() if family.rows is DECODER and not family.is_moe}
    assert classes == {name.replace("ForCausalLM", "ForSequenceClassification") for name in plain}
