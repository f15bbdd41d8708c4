"""The list of models that a server imports is that of the families a trainer can have."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_dapo.huggingface.model_spec import FAMILIES
from megatron_dapo.huggingface.weight_maps import WEIGHT_MAPS
from megatron_dapo.huggingface.weight_rows import DECODER
from megatron_dapo.servers.keyed_sglang import SERVED_MODELS

pytestmark = pytest.mark.unit


def _module(name: str) -> ast.Module:
    (folder,) = find_spec(SERVED_MODELS).submodule_search_locations
    assert {path.stem for path in Path(folder).glob("*.py")} == {"__init__", "decoders", "classifiers"}
    return ast.parse((Path(folder) / f"{name}.py").read_text())


def test_every_family_is_imported_by_a_server_and_nothing_else():
    """A family that lacks here would still be served, after an import of all models."""
    *statements, entries = _module("decoders").body[1:]
    imported = {alias.name for each in statements if isinstance(each, ast.ImportFrom) for alias in each.names}
    own = {each.name for each in statements if isinstance(each, ast.ClassDef)}
    assert len(statements) == len(imported) + len(own)
    assert imported | own == {element.id for element in entries.value.elts} == FAMILIES.keys()


def test_every_plain_decoder_has_a_classifier_for_reward_models():
    """Under the name that Hugging Face gives it; of the other families SGLang has none."""
    classes = {node.name for node in _module("classifiers").body if isinstance(node, ast.ClassDef)}
    plain = {name for name, rows in WEIGHT_MAPS.items() if rows is DECODER and not FAMILIES[name].is_moe}
    assert classes == {name.replace("ForCausalLM", "ForSequenceClassification") for name in plain}
