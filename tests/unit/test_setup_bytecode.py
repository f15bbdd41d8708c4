"""`make setup` compiles packages while pip goes on: whole ones at once, all in the end,
none in vain."""

import subprocess
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

PROGRAM = Path(__file__).resolve().parents[2] / "requirements" / "bytecode.py"
WAIT_S = 60


def package(packages: Path, name: str, files: dict[str, str]) -> None:
    """pip's traces of a package: its files, their list, and INSTALLER last."""
    for file, text in files.items():
        (packages / file).parent.mkdir(parents=True, exist_ok=True)
        (packages / file).write_text(text)
    info = packages / f"{name}-1.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    (info / "INSTALLER").write_text("pip\n")


@pytest.fixture
def environment(tmp_path):
    """An empty environment's Python and its site-packages."""
    venv.create(tmp_path, symlinks=True)
    (packages,) = tmp_path.glob("lib/*/site-packages")
    return tmp_path / "bin" / "python", packages


def started(python: Path) -> subprocess.Popen:
    return subprocess.Popen([python, PROGRAM], stdin=subprocess.PIPE, stderr=subprocess.STDOUT, stdout=subprocess.PIPE)


def compiled(packages: Path) -> set[str]:
    return {path.name.split(".")[0] for path in packages.rglob("*.pyc")}


def test_a_whole_package_is_compiled_before_pip_ends_and_the_rest_after(environment):
    python, packages = environment
    (packages / "half.py").write_text("")  # no INSTALLER yet: pip is still unpacking it
    package(packages, "whole", {"whole/one.py": "x = 1\n"})
    with started(python) as process:
        for _ in range(WAIT_S * 10):
            if compiled(packages):
                break
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.1)
        assert compiled(packages) == {"one"}
        output, _ = process.communicate()
    assert process.returncode == 0, output
    assert compiled(packages) == {"one", "half"}


def test_what_is_hardly_ever_imported_and_what_is_for_other_pythons_is_passed_over(environment):
    python, packages = environment
    files = ("numpy/core.py", "numpy/tests/cases.py", "transformers/models/rare/rare.py", "torch/testing/used.py")
    package(packages, "numpy", {**dict.fromkeys(files, ""), "numpy/other.py": "print 'Python 2'\n"})
    done = subprocess.run([python, PROGRAM], stdin=subprocess.DEVNULL, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert compiled(packages) == {"core", "used"}


def test_it_ends_with_setup_where_a_step_fails(environment):
    python, packages = environment
    package(packages, "whole", {"one.py": ""})
    with started(python) as process:
        while not compiled(packages):
            assert process.poll() is None
        process.terminate()
        assert process.wait(WAIT_S) != 0
        assert process.stdout.read() == b"", "its workers are gone too: none holds the pipe"
