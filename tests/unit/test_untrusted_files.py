"""No program here runs a file's contents: every such call is in a short list, with its reason."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
# the tests read their own files
TREES = (
    "megatron_dapo",
    "launch",
    "checkpoints_tools",
    "examples",
    "benchmarks",
    "requirements",
    "slurm",
    "containers",
)
MODULES = ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "code", "jsonpickle")
CALLS = {
    "builtins.eval",
    "builtins.exec",
    "builtins.__import__",
    "torch.load",
    "torch.jit.load",
    "torch.package.PackageImporter",
    "torch.hub.load",
    "pandas.read_pickle",
    "runpy.run_path",
    "os.system",
    "os.popen",
}
YAML = ("load", "load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all", "Loader", "FullLoader")
# methods of any object: torch's checkpoints, Megatron's, ZMQ
METHODS = {"read_metadata", "recv_pyobj", "load_plain_tensors", "load_common_state_dict", "load_tensors_metadata"}
WRITES = {"dump", "dumps", "Pickler", "PickleBuffer", "UnpicklingError", "PicklingError"}

ALLOWED = {
    ("megatron_dapo/checkpointing/torch_dist/reading.py", "pickle.Unpickler"): "makes inert records alone",
    ("megatron_dapo/checkpointing/torch_dist/reading.py", "torch.load"): "tensors and plain values alone",
    ("megatron_dapo/data/flat_pickle.py", "pickle.loads"): "what a process of this run wrote into memory of this run",
    ("megatron_dapo/rewards/code/inside.py", "builtins.exec"): "a program of the model, inside the sandbox",
    ("megatron_dapo/rewards/code/inside.py", "builtins.eval"): "a test of it, inside the sandbox",
    ("megatron_dapo/rewards/code/cases.py", "builtins.eval"): "comparisons whose parts were checked one by one",
}


def dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)) is not None:
        return f"{owner}.{node.attr}"
    return None


def aliases(tree: ast.AST) -> dict[str, str]:
    """Local name -> full name of each import."""
    names = {name: f"builtins.{name}" for name in ("eval", "exec", "__import__")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def is_risky(name: str) -> bool:
    module, _, last = name.rpartition(".")
    if module == "yaml":
        return last in YAML or last.startswith("Unsafe")
    return name in CALLS or (module in MODULES and last not in WRITES) or (bool(module) and last in METHODS)


def risks(tree: ast.AST) -> Iterator[str]:
    """Full names that could run the content of a file; every mention counts, called or not."""
    names = aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (
                f"{node.module}.{alias.name}" for alias in node.names if is_risky(f"{node.module}.{alias.name}")
            )
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = dotted(node)
            if name is None:
                name = f"?.{node.attr}" if isinstance(node, ast.Attribute) else ""
            first, dot, rest = name.partition(".")
            full = names.get(first, first) + dot + rest
            if is_risky(full):
                yield full
        elif isinstance(node, ast.Call):
            yield from risky_options(node, names)


def risky_options(call: ast.Call, names: dict[str, str]) -> Iterator[str]:
    """Yield options that turn a harmless function into a risk."""
    options = {option.arg: ast.unparse(option.value) for option in call.keywords}
    first, dot, rest = (dotted(call.func) or "").partition(".")
    function = names.get(first, first) + dot + rest
    if function == "numpy.load" and options.get("allow_pickle") != "False":
        yield "numpy.load"
    if options.get("weights_only", "True") != "True":
        yield f"{function}(weights_only={options['weights_only']})"
    if options.get("trust_remote_code", "False") != "False":
        yield f"{function}(trust_remote_code={options['trust_remote_code']})"
    if options.get("shell", "False") != "False":
        yield f"{function}(shell={options['shell']})"


def files() -> list[Path]:
    return [path for tree in TREES for path in sorted((ROOT / tree).rglob("*.py"))]


def test_nothing_outside_a_short_list_can_run_what_a_file_holds():
    assert len(files()) > 300, "the program was not found"
    seen = {
        (path.relative_to(ROOT).as_posix(), name) for path in files() for name in risks(ast.parse(path.read_text()))
    }
    assert seen - ALLOWED.keys() == set(), "read the file without running what it names, or justify the place"
    assert ALLOWED.keys() - seen == set(), "the list names what is not there"


def test_torch_reads_tensors_alone_wherever_it_reads():
    [reader] = {file for file, name in ALLOWED if name == "torch.load"}
    calls = [node for node in ast.walk(ast.parse((ROOT / reader).read_text())) if isinstance(node, ast.Call)]
    loads = [call for call in calls if dotted(call.func) == "torch.load"]
    assert loads
    for call in loads:
        assert {option.arg: ast.unparse(option.value) for option in call.keywords}["weights_only"] == "True"


def test_a_model_of_a_folder_is_read_without_its_code_and_its_pickles():
    """By transformers: it reads pytorch_model.bin in the absence of safetensors, and asks whether
    to run code."""
    for path in (ROOT / "checkpoints_tools").glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                options = {option.arg: ast.unparse(option.value) for option in call.keywords}
                if call.func.attr == "from_pretrained":
                    assert options.get("trust_remote_code") == "False", f"{path.name}:{call.lineno}"
                    is_model = "Model" in ast.unparse(call.func)
                    assert not is_model or options.get("use_safetensors") == "True", f"{path.name}:{call.lineno}"


def test_every_test_that_the_page_on_security_names_is_there():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "security.md").read_text()))
    there = {
        test for path in (ROOT / "tests").rglob("test_*.py") for test in re.findall(r"def (\w+)", path.read_text())
    }
    assert len(named) > 30 and named - there == set()


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.load(f)",
        "import pickle as p\np.loads(x)",
        "from pickle import loads",
        "from pickle import loads as read\nread(x)",
        "import pickle\nclass A(pickle.Unpickler): pass",
        "import pickle\nread = pickle.loads",
        "import torch\ntorch.load(f, weights_only=True)",
        "from torch import load",
        "torch_load = __import__('torch').load",
        "import numpy as np\nnp.load(f)",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
        "from numpy import load\nload(f)",
        "import yaml\nyaml.load(f, Loader=yaml.FullLoader)",
        "from yaml import unsafe_load",
        "import shelve\nshelve.open(f)",
        "import marshal\nmarshal.loads(x)",
        "def f():\n    eval('1')",
        "exec(open('x').read())",
        "FileSystemReader(f).read_metadata()",
        "AutoModel.from_pretrained(f, trust_remote_code=True)",
        "AutoModel.from_pretrained(f, trust_remote_code=asked)",
        "import subprocess\nsubprocess.run(x, shell=True)",
        "torch_files.get(name, weights_only=False)",
        "import os\nos.system(x)",
    ],
)
def test_every_way_to_run_a_file_is_seen(source):
    assert list(risks(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.dumps(x)",
        "model.eval()",
        "import numpy as np\nnp.load(f, allow_pickle=False)",
        "import yaml\nyaml.safe_load(f)\nyaml.compose(f, Loader=Mine)",
        "import re\nre.compile(x)",
        "import json\njson.load(f)",
    ],
)
def test_what_runs_nothing_is_let_be(source):
    assert not list(risks(ast.parse(source)))
