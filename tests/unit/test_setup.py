"""`make setup`: the locks are whole, unusable Pythons are passed over,
and a failure names its cure."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
PIN = re.compile(r'(?P<name>[a-z0-9.-]+)==(?P<version>[^ ;]+)( ; python_version == "(?P<python>3\.1[12])")?')


def pins(platform: str, python: str) -> dict[str, str]:
    """The lock's packages for this Python. Every line is an exact pin."""
    versions = {}
    for line in (ROOT / "requirements" / f"{platform}.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        pin = PIN.fullmatch(line)
        assert pin, f"not an exact pin: {line}"
        if pin["python"] in (None, python):
            assert pin["name"] not in versions, f"{pin['name']} is pinned twice for Python {python}"
            versions[pin["name"]] = pin["version"]
    return versions


def direct(platform: str) -> set[str]:
    lines = (ROOT / "requirements" / f"{platform}.in").read_text().splitlines()
    lines = [line.removeprefix("--no-deps ") for line in lines if line and not line.startswith("#")]
    return {re.split(r"[=;\s\[]", line)[0] for line in lines}


AGENTS = [f"agents/{path.stem}" for path in sorted((ROOT / "requirements" / "agents").glob("*.in"))]


@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize("platform", ["cpu", "cuda", "docs", *AGENTS])
def test_the_lock_pins_everything_for_both_pythons(platform, python):
    assert direct(platform) <= pins(platform, python).keys()
    assert "apex" not in pins(platform, python), "the PyPI project of this name is not NVIDIA's apex"


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_cpu_lock_has_no_cuda_packages(python):
    names = pins("cpu", python)
    # beside a CPU torch, torchvision breaks the import of every transformers model
    unwanted = [
        n for n in names if n.startswith(("nvidia-", "cuda-", "flash", "sgl-", "sglang-")) or n == "torchvision"
    ]
    assert not unwanted


@pytest.mark.parametrize(("python", "line"), [("3.12", 0), ("3.11", 1)])
def test_each_python_gets_the_line_of_versions_that_the_docs_show(python, line):
    section = (ROOT / "docs" / "install.md").read_text().split("## Two lines of versions")[1]
    table = section.split("**Transformer Engine.**")[0]
    cells = re.findall(r"(?m)^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", table)
    shown = {name: versions[line] for name, *versions in cells}
    assert shown["Python"] == python
    for platform in ("cpu", "cuda"):
        assert pins(platform, python)["megatron-core"] == shown["Megatron-core"]
    engine = f'transformer-engine[pytorch]=={shown["Transformer Engine"]} ; python_version == "{python}"'
    assert engine in (ROOT / "requirements" / "transformer_engine.txt").read_text().splitlines()


def test_triton_is_locked_whichever_one_torch_insists_on():
    """A CUDA build of torch, pip's usual one, names another:
    resolved together they are a conflict."""
    resolved, alone = load(ROOT / "requirements" / "relock.py").read_inputs("cpu")
    assert f"triton=={pins('cpu', '3.12')['triton']}" in alone
    assert not [line for line in resolved if line.startswith("triton")]


def test_this_environment_is_the_locks():
    """The tests run with the users' packages. Run `make setup` if this fails."""
    stamp = json.loads((ROOT / ".venv" / "setup.json").read_text())
    wrong = {
        name: f"{version(name)}, locked {locked}"
        for name, locked in pins(stamp["platform"], f"3.{sys.version_info.minor}").items()
        if version(name).split("+")[0] != locked
    }
    assert not wrong


@pytest.fixture
def checkout(tmp_path):
    """The files that setup needs, in a folder of their own."""
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def setup(checkout: Path, **environment: str) -> subprocess.CompletedProcess:
    """Without a pip that can download anything: PIP_NO_INDEX, no links, no configuration."""
    cut_off = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(checkout), "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(
        ["sh", checkout / "requirements" / "setup.sh"],
        env={**os.environ, "PYTHON": "", "PLATFORM": "", **cut_off, **environment},
        text=True,
        capture_output=True,
    )


def load(path: Path):
    """A module from its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_python_that_does_not_run_is_passed_over(checkout):
    """pyenv's shims exist for every Python and fail for all but the chosen."""
    for name in ("python3.11", "python3.12"):
        script(checkout / name, "echo 'pyenv: command not found' >&2; exit 127")
    script(checkout / "python3", f'echo "$@" >> {checkout}/called; exec {sys.executable} "$@"')
    done = setup(checkout, PATH=f"{checkout}:{os.environ['PATH']}", PLATFORM="toaster")
    assert done.returncode == 2 and "PLATFORM=toaster is not one of cpu, cuda" in done.stderr
    assert "requirements/install.py toaster" in (checkout / "called").read_text()


@pytest.mark.parametrize(("platform", "first"), [("cpu", "python3.11"), ("cuda", "python3.12")])
def test_gpu_machines_get_the_main_line_where_both_pythons_are_there(checkout, platform, first):
    """A setup that fails at once: the question is only its Python."""
    (checkout / "requirements" / "install.py").write_text("")
    for name in ("python3.11", "python3.12"):
        script(checkout / name, f'echo {name} "$@" >> {checkout}/called')
    assert setup(checkout, PATH=f"{checkout}:{os.environ['PATH']}", PLATFORM=platform).returncode == 0
    assert (checkout / "called").read_text().splitlines()[-1] == f"{first} requirements/install.py {platform}"


@pytest.mark.parametrize(("here", "chosen"), [("11", "python3.12"), ("12", "python3.11")])
def test_the_other_line_is_tested_on_the_last_commit_in_a_clone(checkout, here, chosen):
    def git(*command: str) -> None:
        author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *author, *command], cwd=checkout, check=True, capture_output=True)

    (checkout / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "other_line.sh", checkout / "tests")
    (checkout / ".venv" / "bin").mkdir(parents=True)
    script(checkout / ".venv" / "bin" / "python", f"echo {here}")
    (checkout / "bin").mkdir()
    script(checkout / "bin" / "make", f'echo "$@" >> {checkout}/called')
    script(checkout / "bin" / chosen, "exit 0")
    (checkout / ".gitignore").write_text(".venv/\n.cache/\nbin/\ncalled\n")
    git("init")
    environment = {**os.environ, "PATH": f"{checkout}/bin:{os.environ['PATH']}", "PYTHON": ""}
    for text in ("first", "second"):
        (checkout / "file").write_text(text)
        git("add", ".")
        git("commit", "-m", text)
        (checkout / "file").write_text("not committed")
        subprocess.run(["sh", checkout / "tests" / "other_line.sh"], env=environment, check=True, capture_output=True)
        assert (checkout / ".cache" / "other_line" / "file").read_text() == text
    assert (checkout / "called").read_text().splitlines() == [f"-C .cache/other_line test PYTHON={chosen}"] * 2
    script(checkout / "bin" / chosen, "echo 'pyenv: command not found' >&2; exit 127")
    done = subprocess.run(["sh", checkout / "tests" / "other_line.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == (
        f"{chosen} does not run here; name one that does: make test-other-line PYTHON=/path/to/python\n"
    )


def test_the_python_of_the_other_line_is_not_given_to_this_checkouts_venv():
    """It would be made anew, with that Python."""
    command = ["make", "--dry-run", "--no-print-directory", "test-other-line", "PYTHON=/another", "PLATFORM="]
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    setup_line, run_line = done.stdout.splitlines()
    assert setup_line.startswith("PLATFORM= PYTHON= sh requirements/setup.sh")
    assert run_line == "PYTHON='/another' sh tests/other_line.sh"


def test_a_python_that_is_not_ours_is_refused_with_a_sentence(checkout):
    old = script(checkout / "python2", "exit 1")
    done = setup(checkout, PYTHON=str(old))
    assert done.returncode == 2
    assert done.stderr == f"setup: PYTHON={old} is not a Python 3.11 or 3.12 that runs and has venv and ensurepip.\n"


def empty_environment(checkout: Path) -> None:
    """.venv with only pip: ours, because unpacking another takes seconds."""
    folder = checkout / ".venv"
    venv.create(folder)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for path in Path(sysconfig.get_path("purelib")).glob("pip*"):
        (packages / path.name).symlink_to(path)


def wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    """A package without any module."""
    info = f"{name}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {n}" for n in needs)]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{info}/METADATA", "\n".join([*metadata, ""]))
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


# each alone would end the setup; the first one is in NVIDIA's containers
PIP_VARIABLES = {
    "PIP_CONSTRAINT": "constraint.txt",
    "PIP_USER": "1",
    "PIP_TARGET": "elsewhere",
    "PIP_PREFIX": "elsewhere",
}


def test_a_torch_that_insists_on_another_triton_is_installed_and_the_locks_triton_beside_it(checkout):
    """A CUDA build on a machine without a GPU, from pip's usual index. The user's environment may
    ask for anything."""
    empty_environment(checkout)
    (checkout / "requirements" / "cpu.txt").write_text("torch==2.13.0\ntriton==3.8.0\n")
    (checkout / "constraint.txt").write_text("torch==2.9.0\ntriton==3.5.0\n")
    wheel(checkout, "torch", "2.13.0", "triton==3.7.1")
    wheel(checkout, "triton", "3.7.1")
    wheel(checkout, "triton", "3.8.0")
    done = setup(checkout, PYTHON=sys.executable, **PIP_VARIABLES)
    failed = [line for line in done.stdout.splitlines() if line.endswith("FAILED")]
    # there is no setuptools
    assert len(failed) == 1 and "this project, in place" in failed[0], done.stderr
    assert list(checkout.glob(".venv/lib/*/site-packages/triton-3.8.0.dist-info"))


def test_a_download_that_fails_says_what_to_do(checkout):
    empty_environment(checkout)
    done = setup(checkout, PYTHON=sys.executable)
    assert done.returncode == 1
    assert "torch" in done.stdout and "FAILED" in done.stdout
    assert "pip config list" in done.stderr and "make setup" in done.stderr
    assert not (checkout / ".venv" / "setup.json").exists(), "a failed setup must not look finished"


def test_an_up_to_date_environment_is_one_line(checkout):
    """And it is not up to date for another platform, or with another lock."""
    install = load(checkout / "requirements" / "install.py")
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (checkout / ".venv" / "setup.json").write_text(json.dumps(install.wanted("cpu")))
    done = setup(checkout, PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("setup: .venv is up to date (cpu, Python 3.1") and done.stdout.count("\n") == 1
    assert install.read_stamp() != install.wanted("cuda")
    with (checkout / "requirements" / "cpu.txt").open("a") as lock:
        lock.write("# another lock\n")
    assert install.read_stamp() != install.wanted("cpu")


@pytest.mark.parametrize(
    ("what", "commands", "sentence"),
    [
        ("slurm", {}, "there is no apt-get here; install slurmctld, "),
        ("slurm", {"apt-get": "exit 1", "id": "echo 1000"}, "apt-get needs root: sudo make setup-slurm\n"),
        ("browser", {}, "there is no apt-get here; install Chromium "),
        ("browser", {"apt-get": "exit 1", "id": "echo 1000"}, "apt-get needs root: sudo make setup-browser\n"),
    ],
)
def test_where_slurm_or_a_browser_cannot_be_installed_a_sentence_says_why(tmp_path, what, commands, sentence):
    for name, text in commands.items():
        script(tmp_path / name, text)
    done = subprocess.run(
        ["/bin/sh", ROOT / "requirements" / f"{what}.sh"], env={"PATH": str(tmp_path)}, text=True, capture_output=True
    )
    assert done.returncode == 2 and done.stderr.startswith(f"setup-{what}: {sentence}") and done.stderr.count("\n") == 1


def test_an_agents_environment_is_made_again_only_for_another_lock(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "requirements")
    agents = load(ROOT / "requirements" / "agents.py")
    made = []

    def run(title: str, command: list) -> None:
        made.append(title)
        (tmp_path / "home" / "harness").mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(agents, "LOCKS", tmp_path)
    monkeypatch.setattr(agents, "HOME", tmp_path / "home")
    monkeypatch.setattr(agents.install, "ROOT", tmp_path)
    monkeypatch.setattr(agents.install, "run", run)
    lock = tmp_path / "harness.txt"
    for text, names in (("a==1\n", []), ("a==1\n", ["harness"]), ("a==2\n", [])):
        lock.write_text(text)
        assert agents.main(names) == 0
    assert len(made) == 2 * 3  # a new folder, the lock, a check; twice
    assert agents.main(["other"]) == 2
