"""Recipes of container images agree with the lock, with each other and with the copied files."""

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "containers"
IN_IMAGE = "/opt/megatron_dapo"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
APPTAINER = (FOLDER / "apptainer.def").read_text()
INSTALL = FOLDER / "install.sh"


def base_image(recipe: str) -> str:
    """Return the one image that a recipe starts from."""
    (image,) = re.findall(r"^from:? +(\S+)$", recipe, re.MULTILINE | re.IGNORECASE)
    return image


def copied_by_docker() -> dict[str, str]:
    """Return source -> place in the image, which WORKDIR is the folder of."""
    (folder,) = re.findall(r"^WORKDIR (\S+)$", DOCKERFILE, re.MULTILINE)
    places = {}
    for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE):
        *sources, target = line.split()
        for source in sources:
            is_folder = target.endswith("/")
            places[source] = str(Path(folder, target, Path(source).name if is_folder else ""))
    return places


def section(name: str) -> list[str]:
    """Return the lines of a section of the apptainer definition."""
    (text,) = re.findall(rf"^%{name}\n((?:    .*\n)+)", APPTAINER, re.MULTILINE)
    return [line.strip() for line in text.splitlines()]


def test_both_recipes_start_from_the_locks_cuda_with_a_compiler_and_no_second_cudnn():
    image = base_image(DOCKERFILE)
    assert image == base_image(APPTAINER)
    version, kind = re.fullmatch(r"nvidia/cuda:(\d+\.\d+\.\d+)-(.+)-ubuntu24\.04", image).groups()
    lock = (ROOT / "requirements" / "cuda.txt").read_text()
    toolkit = re.search(r"^cuda-toolkit==(\d+\.\d+\.\d+)", lock, re.MULTILINE)
    assert version == toolkit[1]
    # nvcc for SGLang's kernels; cuDNN is only the lock's:
    # Transformer Engine would load the image's beside torch's
    assert kind == "devel" and "nvidia-cudnn-cu13==" in lock


def test_the_recipes_copy_the_same_files_which_are_all_there():
    by_apptainer = dict(line.split() for line in section("files"))
    assert copied_by_docker() == by_apptainer
    for source, target in by_apptainer.items():
        assert (ROOT / source).exists()
        assert target == f"{IN_IMAGE}/{source}"


def test_the_image_has_every_package_that_its_programs_import_and_what_setup_reads():
    copied = {source.split("/")[0] for source in copied_by_docker()}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert {"tests", "benchmarks"} <= packages <= copied  # these two: launch.acceptance runs them
    project = (ROOT / "pyproject.toml").read_text()
    read_by_setup = {
        "Makefile",
        "requirements",
        "pyproject.toml",
        *re.findall(r'(?:"|\[")(README\.md|LICENSE)"', project),
    }
    assert read_by_setup <= copied


def test_the_image_has_one_python_that_the_lock_is_for():
    assert set(re.findall(r"python(3\.\d+)", INSTALL.read_text())) == {"3.12"}
    first, *_ = (ROOT / "requirements" / "cuda.txt").read_text().splitlines()
    assert "3.12" in first


def test_both_recipes_run_the_same_two_steps_and_then_the_program():
    steps = ["sh containers/install.sh system", "sh containers/install.sh python"]
    assert re.findall(r"^RUN (.+)$", DOCKERFILE, re.MULTILINE) == steps
    assert section("post") == [f"cd {IN_IMAGE}", *steps]
    assert f"ENV PATH={IN_IMAGE}/.venv/bin:$PATH" in DOCKERFILE
    assert section("environment") == [f"export PATH={IN_IMAGE}/.venv/bin:$PATH"]
    assert 'ENTRYPOINT ["python", "-m", "megatron_dapo"]' in DOCKERFILE
    assert section("runscript") == ['exec python -m megatron_dapo "$@"']


@pytest.fixture
def machine(tmp_path):
    """A folder with a make, an apt-get and a Python that only write down their calls."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("make", "apt-get", ".venv/bin/python"):
        program = tmp_path / name
        variables = "$(env | grep -E '^(PIP_CONSTRAINT|NVTE_.*)=' | sort | tr '\n' ' ')"
        program.write_text(f'#!/bin/sh\necho "{variables}{name} $*" >> {tmp_path}/calls\nexit "${{FAILS:-0}}"\n')
        program.chmod(0o755)
    return tmp_path


def install(machine: Path, *step: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["sh", INSTALL, *step],
        cwd=machine,
        env={"PATH": f"{machine}:/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
    )


def test_the_packages_are_those_of_make_setup_and_of_transformer_engine(machine):
    assert install(machine, "python").returncode == 0
    setup, engine = (machine / "calls").read_text().splitlines()
    assert setup == "make setup PLATFORM=cuda PYTHON=python3.12"
    command = ".venv/bin/python -m pip install --no-build-isolation -r requirements/transformer_engine.txt"
    assert engine == f"NVTE_BUILD_USE_NVIDIA_WHEELS=1 PIP_CONSTRAINT= {command}"
    for text in ("docs/install.md", "requirements/transformer_engine.txt"):
        assert f"PIP_CONSTRAINT= NVTE_BUILD_USE_NVIDIA_WHEELS=1 {command}" in (ROOT / text).read_text(), text


def test_the_image_has_the_libraries_by_which_nccl_uses_infiniband(machine):
    """NCCL loads libibverbs at its start, and that loads the adapters' providers. With one of them
    missing it goes on with sockets, in silence."""
    install(machine, "system")
    packages = (machine / "calls").read_text().split()
    assert {"libibverbs1", "ibverbs-providers", "librdmacm1", "rdma-core"} <= set(packages)


def test_a_step_that_fails_ends_the_build(machine):
    assert install(machine, "python", FAILS="7").returncode == 7
    assert len((machine / "calls").read_text().splitlines()) == 1
    done = install(machine, "pytohn")
    assert done.returncode == 2 and "pytohn is neither system nor python" in done.stderr
