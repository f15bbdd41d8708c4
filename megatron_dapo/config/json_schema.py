"""The JSON schema of a config file, for editors: completion, the meaning of keys, marks on
mistakes."""

import json
from typing import Any

from megatron_dapo.config.aliases import ALIASES, FILTER_GROUPS, MAIN_SWITCH
from megatron_dapo.config.key_reference import key_meaning
from megatron_dapo.config.keys import known_keys, known_sections
from megatron_dapo.config.loader import EXTENDS
from megatron_dapo.config.schema.config import Config


def config_schema() -> str:
    """Return the schema, of draft 7.

    Every file that the loader takes is valid. Unknown keys, wrong types and ranges are not; names
    with a dot, such as `trainer.seed: 2`, are not looked at.
    """
    root = _section("", Config.model_json_schema()["$defs"])
    root["properties"][EXTENDS] = {"type": "string", "description": "Another config, by its path from this file."}
    for alias, key in (ALIASES | FILTER_GROUPS).items():
        _add(root, alias, {"$ref": f"#/properties/{key.replace('.', '/properties/')}"})
    _add(root, MAIN_SWITCH, {"type": "boolean", "description": "Whether this section's techniques may act."})
    return json.dumps({"$schema": "http://json-schema.org/draft-07/schema#"} | root, indent=1) + "\n"


def _section(name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a section. definitions: pydantic's, by class, of a later draft."""
    section = known_sections()[name]
    schema = _mapping(section.__doc__ or "")
    for child in section.model_fields:
        dotted = f"{name}.{child}".lstrip(".")
        if dotted in known_sections():
            schema["properties"][child] = _section(dotted, definitions)
            continue
        key = definitions[section.__name__]["properties"][child] | {"description": key_meaning(known_keys()[dotted])}
        schema["properties"][child] = {
            word.replace("prefixItems", "items"): key[word] for word in key if word != "title"
        }
    return schema


def _mapping(description: str) -> dict[str, Any]:
    """Return the schema of a section without keys. A file may leave it empty."""
    others = {"patternProperties": {r"\.": {}}, "additionalProperties": False}
    return {"type": ["object", "null"], "description": description, "properties": {}, **others}


def _add(schema: dict[str, Any], name: str, added: dict[str, Any]) -> None:
    """Add a schema under a dotted name; make missing sections above it."""
    *sections, last = name.split(".")
    for section in sections:
        schema = schema["properties"].setdefault(section, _mapping(""))
    schema["properties"][last] = added
