"""Whether Transformer Engine can be imported, and with which cuDNN;
packages and libraries are stand-ins."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.preflight import gpus
from megatron_dapo.common.child_environment import set_rank_defaults
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.actor_rollout_ref import MegatronConfig
from megatron_dapo.models import build
from megatron_dapo.platform import transformer_engine
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit

USE = "actor_rollout_ref.actor.megatron.use_transformer_engine"
VARIABLES = ("CUDNN_HOME", "CUDNN_PATH", "CUDA_HOME", "CUDA_PATH")
TORCH = """
import ctypes, pathlib
ctypes.CDLL(str(pathlib.Path(__file__).parent / "nvidia/cudnn/lib/libcudnn.so.9"))
class backends:
    class cudnn:
        version = staticmethod(lambda: 92400)
class Sum:
    def __add__(self, other): return self
    def sum(self): return self
    def item(self): return 16
def ones(size, device): return Sum()
"""
# its search (transformer_engine/common/__init__.py of 2.18.0): these variables, /usr/local/cuda,
# then the loader's path
ENGINE = """
import ctypes, glob, os
homes = [os.environ.get(name) for name in ("CUDNN_HOME", "CUDNN_PATH", "CUDA_HOME", "CUDA_PATH")]
found = [sorted(glob.glob(f"{home}/**/libcudnn.so*", recursive=True)) for home in homes if home]
path = next((files[-1] for files in found if files), "libcudnn.so")
ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
"""
UTILS = "def get_cudnn_version(): return (9, 13, 0) if 'system' in path else (9, 24, 0)\nfrom . import path\n"
BROKEN = "raise ImportError('libcudnn_graph.so.9: cannot open shared object file\\nand more')\n"


@pytest.fixture
def packages(tmp_path) -> Path:
    """A folder of stand-ins for torch, its cuDNN and Transformer Engine, beside a system's cuDNN.
    The libraries are copies of one of Python's."""
    (library, *_) = Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so")
    for folder, name in (("nvidia/cudnn/lib", "libcudnn.so.9"), ("system", "libcudnn.so")):
        (tmp_path / folder).mkdir(parents=True)
        shutil.copy(library, tmp_path / folder / name)
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "transformer_engine/pytorch").mkdir(parents=True)
    (tmp_path / "transformer_engine/__init__.py").touch()
    (tmp_path / "transformer_engine/pytorch/__init__.py").write_text(ENGINE)
    (tmp_path / "transformer_engine/pytorch/utils.py").write_text(UTILS)
    return tmp_path


@pytest.fixture
def broken(packages, monkeypatch) -> Iterator[Path]:
    """The same, of which Transformer Engine cannot be imported: in this process, too."""
    (packages / "transformer_engine/pytorch/__init__.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(packages))
    yield packages
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]


def probed(packages: Path, **variables: str) -> dict:
    """A node's probe on Transformer Engine, with a system's cuDNN besides."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {"PYTHONPATH": str(packages), "LD_LIBRARY_PATH": str(packages / "system"), **variables}
    command = [sys.executable, "-m", "launch.preflight.gpu_probe", "2"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_rank_takes_one_cudnn_though_the_system_has_another(packages):
    said = probed(packages)
    assert said["cudnn_files"] == [str(packages / "nvidia/cudnn/lib/libcudnn.so.9")]
    assert said["cudnn"] == said["torch_cudnn"] == "9.24.0"
    here = transformer_engine.EngineHere(**said)
    assert here.fault() is None


@pytest.mark.parametrize("variable", ["CUDNN_HOME", "CUDNN_PATH"])
def test_a_users_cudnn_beside_torchs_is_reported(packages, variable):
    said = probed(packages, **{variable: str(packages / "system")})
    files = {str(packages / "nvidia/cudnn/lib/libcudnn.so.9"), str(packages / "system/libcudnn.so")}
    assert set(said["cudnn_files"]) == files
    problem = transformer_engine.EngineHere(**said).fault()
    assert all(file in problem for file in files) and "unset CUDNN_HOME and CUDNN_PATH" in problem


def test_a_rank_takes_the_cudnn_of_the_packages_unless_the_user_names_one(packages, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(packages / "empty"), str(packages)])
    for user_set in ({}, {"CUDNN_HOME": "/opt/cudnn"}, {"CUDNN_PATH": "/opt/cudnn"}):
        environment = dict(user_set)
        set_rank_defaults(environment)
        got = {name: value for name, value in environment.items() if name in VARIABLES}
        assert got == (user_set or {"CUDNN_HOME": str(packages / "nvidia/cudnn")})


def test_a_failed_import_is_reported_before_a_job_waits_for_its_nodes(broken):
    here = transformer_engine.EngineHere(**probed(broken))
    why = "ImportError: libcudnn_graph.so.9: cannot open shared object file"
    assert here.error == why and f"cannot be imported ({why})" in str(here)
    for word in ("on", "auto"):
        problem = gpus.engine_fault(load_config(None, [f"{USE}={word}"]), here)
        assert why in problem and "docs/install.md" in problem and f"set {USE} to off" in problem
    assert gpus.engine_fault(load_config(None, [f"{USE}=off"]), here) is None


def test_a_node_without_it_or_with_torchs_cudnn_is_fit():
    fit = transformer_engine.EngineHere("2.18.0", None, "9.24.0", "9.24.0", ("/libcudnn.so.9",))
    for here, words in ((transformer_engine.EngineHere(), "no Transformer Engine"), (fit, "2.18.0 with cuDNN 9.24.0")):
        assert gpus.engine_fault(load_config(None, []), here) is None and words in str(here)


@pytest.mark.parametrize(
    ("settings", "cure"),
    [
        ({"use_transformer_engine": "on"}, "use auto"),
        ({"tp_comm_overlap": True}, "to false"),
        ({"fp8": "e4m3"}, "none"),
    ],
)
def test_a_trainer_that_needs_it_says_why_it_cannot_be_imported(broken, monkeypatch, settings, cure):
    monkeypatch.setattr(build, "is_gpu", lambda: True)
    monkeypatch.setattr(build, "HAVE_TE", False)
    with pytest.raises(UserError, match=r"\(ImportError: libcudnn_graph.so.9: cannot open.*\)") as error:
        build._use_transformer_engine(MegatronConfig(**settings, dtype="bfloat16"))
    assert cure in error.value.sentences[0] and "\n" not in error.value.sentences[0]
    assert not build._use_transformer_engine(MegatronConfig(dtype="bfloat16"))


def test_a_trainer_names_the_missing_package(monkeypatch):
    on = MegatronConfig(use_transformer_engine="on", dtype="float32")
    with pytest.raises(UserError, match="torch finds no GPU here"):
        build._use_transformer_engine(on)
    monkeypatch.setattr(build, "is_gpu", lambda: True)
    with pytest.raises(UserError, match="dtype is float32"):
        build._use_transformer_engine(on)
    monkeypatch.setattr(build, "HAVE_TE", False)
    with pytest.raises(UserError, match=r"\(it is not installed\)"):
        build._use_transformer_engine(on.model_copy(update={"dtype": "bfloat16"}))
