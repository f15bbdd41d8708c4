"""YAML as people mean it: `1e-6` is a number, `on` and `off` are words, a key stands once.

pyyaml follows YAML 1.1: 1e-6 is text, `on` is true, 1:30 is 90 and 010 is 8. This dialect, for
reading and writing, is YAML 1.2's core schema without tags and aliases. The output of `dump_yaml`
means the same in both.
"""

import re
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

_PLAIN = (  # pattern, reader of a matching scalar without quotes; others are text
    (re.compile(r"|~|null|Null|NULL"), lambda text: None),
    (re.compile(r"true|True|TRUE"), lambda text: True),
    (re.compile(r"false|False|FALSE"), lambda text: False),
    (re.compile(r"[-+]?[0-9]{1,4000}"), int),  # Python refuses to read longer ones
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda text: float(text.replace(".", ""))),
)
MAX_VALUES = 10_000  # keys and values; the schema has some hundred keys, lists of files may be long
MAX_DEPTH = 50
_UNTAGGED = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}


class YamlMistake(ValueError):
    """The text is not one document of this dialect. The message is one line with the place and
    reason."""


def parse_yaml(text: str) -> tuple[Any, list[str]]:
    """Return the value of one document, and a phrase for each duplicate key.

    The value is a plain dict, list, str, int, float, bool or None. Mapping keys become text. The
    first value of a duplicate key wins. Raises YamlMistake.
    """
    duplicates: list[str] = []
    try:
        node = yaml.compose(text, Loader=_BoundedLoader)
        return (None if node is None else _value(node, set(), duplicates)), duplicates
    except yaml.MarkedYAMLError as error:
        raise YamlMistake(f"line {error.problem_mark.line + 1}: {error.problem}") from None
    except yaml.YAMLError as error:  # unreadable characters
        raise YamlMistake(" ".join(str(error).split())) from None


def dump_yaml(tree: dict) -> str:
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _BoundedLoader(yaml.BaseLoader):
    """Loader with limits on number and depth of values: pyyaml takes a minute for 200 000 keys."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._num_values = 0
        self._depth = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node:
        line = self.peek_event().start_mark.line + 1
        self._num_values += 1
        self._depth += 1
        if self._num_values > MAX_VALUES:
            raise YamlMistake(f"line {line}: it holds more than {MAX_VALUES} keys and values, which no config does")
        if self._depth > MAX_DEPTH:
            raise YamlMistake(f"line {line}: it is nested more than {MAX_DEPTH} deep, which no config is")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _value(node: Node, seen: set[int], duplicates: list[str]) -> Any:
    line = node.start_mark.line + 1
    if id(node) in seen:
        raise YamlMistake(f"line {line}: anchors and aliases (&, *) are not supported; write the value out")
    seen.add(id(node))
    if node.tag not in _UNTAGGED:
        raise YamlMistake(f"line {line}: tag {node.tag} is not supported; write the plain value")
    if isinstance(node, SequenceNode):
        return [_value(child, seen, duplicates) for child in node.value]
    if isinstance(node, MappingNode):
        return _mapping(node, seen, duplicates)
    return _scalar(node)


def _mapping(node: MappingNode, seen: set[int], duplicates: list[str]) -> dict[str, Any]:
    first_lines: dict[str, int] = {}
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, ScalarNode):
            raise YamlMistake(f"line {line}: a key must be a word")
        key = key_node.value
        if key in mapping:
            duplicates.append(f"key {key} stands twice, in lines {first_lines[key]} and {line}")
            continue
        first_lines[key] = line
        mapping[key] = _value(value_node, seen, duplicates)
    return mapping


def _scalar(node: ScalarNode) -> Any:
    if node.style is None:
        for pattern, read in _PLAIN:
            if pattern.fullmatch(node.value):
                return read(node.value)
    return node.value


class _Dumper(yaml.SafeDumper):
    """Dumper with quotes around texts with another meaning in YAML 1.1 or in this dialect."""

    def represent_text(self, text: str) -> ScalarNode:
        # without quotes pyyaml loses line ends such as U+0085
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


_Dumper.add_implicit_resolver(
    "tag:megatron_dapo:not_text", re.compile(rf"^(?:{_PLAIN[4][0].pattern})$"), list("-+.0123456789")
)
