"""The GPU tests load with only torch, triton, numpy and pytest,
and give a reason for their skips."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit

# torch, triton, numpy, pytest and their own needs
BARE = (
    "torch torchgen functorch triton numpy numpy.libs pytest _pytest py.py pluggy iniconfig packaging pygments sympy "
    "mpmath networkx jinja2 markupsafe filelock fsspec typing_extensions.py"
).split()
START = "import sys; sys.path[:0] = [sys.argv.pop(1)]; import pytest; sys.exit(pytest.main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def bare_packages(tmp_path_factory) -> Path:
    """A folder with only these packages."""
    folder, installed = tmp_path_factory.mktemp("bare"), Path(sysconfig.get_paths()["purelib"])
    for name in BARE:
        for package in [*installed.glob(name), *installed.glob(f"{name}-*.dist-info")]:
            (folder / package.name).symlink_to(package)
    return folder


def test_they_load_with_only_torch_triton_numpy_and_pytest(bare_packages):
    command = [sys.executable, "-I", "-S", "-c", START, str(bare_packages)]
    command += ["-c", "tests/gpu/pytest.ini", "tests/gpu", "-p", "no:cacheprovider"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d{2,} skipped in", done.stdout), done.stdout
    assert "1 CUDA GPU(s) needed, 0 here" in done.stdout and "2 CUDA GPU(s) needed, 0 here" in done.stdout
    assert "megatron-core is not installed" in done.stdout


def test_nothing_else_was_to_be_had(bare_packages):
    """Otherwise the test above would show nothing."""
    code = "import sys; sys.path[:0] = [sys.argv[1]]; import pydantic"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(bare_packages)], capture_output=True, text=True)
    assert done.returncode != 0 and "No module named 'pydantic'" in done.stderr
