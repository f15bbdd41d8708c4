"""The packages of requirements/cuda.txt without a driver: on a login node, used for conversions."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny

ROOT = Path(__file__).resolve().parents[2]
STAMP = ROOT / ".venv" / "setup.json"
PLATFORM = json.loads(STAMP.read_text())["platform"] if STAMP.exists() else "another"

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(
        PLATFORM != "cuda", reason=f".venv has the {PLATFORM} lock: `make setup PLATFORM=cuda` installs that of GPUs"
    ),
    pytest.mark.skipif(
        shutil.which("nvidia-smi") is not None, reason="this machine has an NVIDIA driver, and these tests need none"
    ),
]
# `site` stands in for packages inside SGLang's own processes on a CPU; a __main__ runs its imports
IMPORT_ALL = """
import importlib, sys, traceback
failed = 0
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException:
        failed += 1
        print(name, traceback.format_exc(limit=-2), sep=chr(10))
sys.exit(failed > 0)
"""


def run(*command: object) -> str:
    """Return a command's output; AssertionError with it if the command fails."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def modules(package: str) -> list[str]:
    paths = [path.relative_to(ROOT) for path in sorted((ROOT / package).rglob("*.py"))]
    kept = [path for path in paths if "site" not in path.parts and path.name not in ("__init__.py", "__main__.py")]
    return [".".join(path.with_suffix("").parts) for path in kept]


@pytest.mark.parametrize("package", ["megatron_dapo", "launch", "checkpoints_tools"])
def test_every_module_is_imported(package):
    names = modules(package)
    assert len(names) > 5
    run("-c", IMPORT_ALL, *names)


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "qwen3_moe"])
def test_the_converters_give_back_the_files_to_the_byte(family, tmp_path):
    source = make_tiny(tmp_path / "source", family, vocab=131, layers=2)
    run("-m", "checkpoints_tools.hf_to_megatron", "--hf-model", source, "--output", tmp_path / "megatron")
    run(
        "-m", "checkpoints_tools.megatron_to_hf", "--checkpoint", tmp_path / "megatron", "--output", tmp_path / "result"
    )
    names = {path.name for path in source.iterdir()}
    assert names == {path.name for path in (tmp_path / "result").iterdir()}
    assert not [name for name in names if (source / name).read_bytes() != (tmp_path / "result" / name).read_bytes()]
