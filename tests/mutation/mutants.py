"""Mutants of a source file: copies that differ in one comparison, sign, constant,
branch or extremum."""

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMPARISONS = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
OTHER_NAMES = {"maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max"}
LEFT_OUT = {"detach", "abs", "clamp", "expm1", "square"}  # x.f(...) or module.f(x) becomes x


@dataclass(frozen=True)
class Mutant:
    """name: top-level statement, expression before and after;
    unique in a file, stable when lines move.

    kind: comparison, sign, extremum, or other.
    """

    name: str
    kind: str
    original: str
    place: int  # of the node in `_code`
    change: int

    @property
    def source(self) -> str:
        """The whole module, changed."""
        tree = ast.parse(self.original)
        node = next(other for number, other in enumerate(_code(tree)) if number == self.place)
        _changes(node)[self.change](node)
        return ast.unparse(ast.fix_missing_locations(tree))


def mutants(source: str) -> list[Mutant]:
    """All mutants of a module, in order. Strings, annotations and keyword names stay."""
    tree = ast.parse(source)
    owners = {child: _name(statement) for statement in tree.body for child in ast.walk(statement)}
    all_mutants: list[Mutant] = []
    names: Counter[str] = Counter()
    for place, node in enumerate(_code(tree)):
        for change in range(len(_changes(node))):
            name = f"{owners[node]}: {_changed(node, change)}"
            names[name] += 1
            unique = f"{name} #{names[name]}" if names[name] > 1 else name
            all_mutants.append(Mutant(unique, _kind(node), source, place, change))
    return all_mutants


def _name(statement: ast.stmt) -> str:
    target = getattr(statement, "targets", [getattr(statement, "target", statement)])[0]
    return getattr(statement, "name", None) or ast.unparse(target)


def _kind(node: ast.AST) -> str:
    kinds = {ast.Compare: "comparison", ast.UnaryOp: "sign", ast.Call: "extremum"}
    is_other = isinstance(node, ast.Call) and "where" in ast.unparse(node.func)
    return "other" if is_other else kinds.get(type(node), "other")


def _changed(node: ast.AST, change: int) -> str:
    """`before -> after`; leaves the node as it was."""
    before, kind = ast.unparse(node), node.__class__
    fields = {name: list(value) if isinstance(value, list) else value for name, value in vars(node).items()}
    children = {child: dict(vars(child)) for child in ast.iter_child_nodes(node)}
    _changes(node)[change](node)
    after = ast.unparse(node)
    node.__class__, node.__dict__ = kind, fields
    for child, values in children.items():
        child.__dict__ = values
    return f"{before} -> {after}"


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Executed nodes, depth first: no annotations, no decorators, no imports,
    no default of a field's name."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.Import | ast.ImportFrom):
                yield child
                yield from _code(child)


def _changes(node: ast.AST) -> list[Callable[[ast.AST], object]]:
    """Functions that change a node in place."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            return [lambda n, new=new: setattr(n, "ops", [new()]) for new in COMPARISONS[type(op)]]
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in OPERATORS:
            return [lambda n: setattr(n, "op", OPERATORS[type(op)]())]
        case ast.UnaryOp(op=ast.USub() | ast.Invert() | ast.Not()):
            return [lambda n: _become(n, n.operand)]
        case ast.Constant(value=bool()):
            return [lambda n: setattr(n, "value", not n.value)]
        case ast.Constant(value=int() | float()):
            return [lambda n: setattr(n, "value", n.value * 1.5 if n.value % 2 else n.value + 1)]
        case ast.IfExp():
            return [lambda n: _swap(n, "body", "orelse")]
        case ast.Call(func=ast.Attribute(attr="where"), args=[_, _, _]):
            return [lambda n: n.args.insert(1, n.args.pop())]
        case ast.Call(func=ast.Attribute(attr=name)) if name in LEFT_OUT:
            return [lambda n: _become(n, n.args[0] if _is_module(n.func.value) else n.func.value)]
        case ast.Call(func=ast.Attribute(attr=name)) if name in OTHER_NAMES:
            return [lambda n: setattr(n.func, "attr", OTHER_NAMES[name])]
        case ast.Call(func=ast.Name(id=name)) if name in OTHER_NAMES:
            return [lambda n: setattr(n.func, "id", OTHER_NAMES[name])]
    return []


def _become(node: ast.AST, other: ast.AST) -> None:
    node.__class__ = other.__class__
    node.__dict__ = dict(other.__dict__)


def _swap(node: ast.AST, a: str, b: str) -> None:
    first, second = getattr(node, a), getattr(node, b)
    setattr(node, a, second), setattr(node, b, first)


def _is_module(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("tl", "torch")
