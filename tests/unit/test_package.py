"""The package: its wheel in an environment that has the declared dependencies and nothing else."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import megatron_dapo
from megatron_dapo.__main__ import main
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.recipes import config_file, recipe_names
from tests.fake_rollout import write_files
from tests.helpers import REPOSITORY
from tests.model_json import MODEL_JSON
from tests.report_runs import write_run

pytestmark = pytest.mark.unit

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
HEAVY = ("torch", "megatron", "sglang", "transformers", "tensorboard", "einops")
SOURCE = ("megatron_dapo", "launch", "checkpoints_tools", "configs", "pyproject.toml", "README.md", "LICENSE", "docs")
SYNTHETIC = (
    f"trainer.synthetic_batch=true actor_rollout_ref.model.path={REPOSITORY}/examples/arithmetic/base "
    "data.max_prompt_length=64 data.max_response_length=64"
)
MAKE = "from setuptools import build_meta as b; import sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def made(what: str, source: Path, folder: Path) -> Path:
    command = [sys.executable, "-c", MAKE, what, str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """It is made from the source archive, which therefore has all of it."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    for name in SOURCE:
        path = REPOSITORY / name
        if path.is_dir():
            shutil.copytree(path, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    with tarfile.open(made("build_sdist", source, folder)) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return made("build_wheel", unpacked, folder)


def with_their_own(requirements: Iterable[str]) -> set[str]:
    """Return the names of packages of this environment, with all packages that they require."""
    names: set[str] = set()
    left = [Requirement(text) for text in requirements]
    while left:
        requirement = left.pop()
        if requirement.name in names or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        names.add(requirement.name)
        left += map(Requirement, importlib.metadata.requires(requirement.name) or ())
    return names


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory) -> Path:
    """The folder bin/ of the environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "install", "--no-index", "--no-deps", "--no-compile", str(wheel)], check=True)
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if re.fullmatch("megatron_dapo-[^/]*/METADATA", name))
        required = re.findall(r"(?m)^Requires-Dist: ((?:(?!extra ==).)*)$", archive.read(metadata).decode())
    for name in with_their_own(required):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(distribution.locate_file(top))
    return folder / "bin"


def command(programs: Path, *words: str, cwd: Path, program: str = "megatron-dapo") -> subprocess.CompletedProcess:
    environment = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    environment |= {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    return subprocess.run([programs / program, *words], cwd=cwd, env=environment, capture_output=True, text=True)


def test_the_wheel_has_programs_recipes_and_no_leftovers(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    recipes = {name.removeprefix("megatron_dapo/configs/") for name in names if "/configs/" in name}
    files = [*REPOSITORY.glob("configs/**/*.yaml"), REPOSITORY / "configs/schema.json"]
    assert recipes == {str(path.relative_to(REPOSITORY / "configs")) for path in files}
    page = "megatron_dapo/commands/report/page"
    assert {f"{page}/{name}" for name in ("charts.js", "temml/temml.min.js", "temml/LICENSE")} <= names
    assert {name.partition("/licenses/")[2] for name in names if "/licenses/" in name} == {
        "LICENSE",
        f"{page}/temml/LICENSE",
    }
    assert {name.partition("/")[0] for name in names if not name.startswith("megatron_dapo-")} == {
        "megatron_dapo",
        "launch",
        "checkpoints_tools",
    }
    assert not [name for name in names if name.endswith(".pyc")]


def test_the_installed_command_plans_reports_and_explains_without_heavy_packages(programs, tmp_path):
    search = f"import importlib.util as i; print([n for n in {HEAVY!r} if i.find_spec(n)])"
    assert command(programs, "-c", search, cwd=tmp_path, program="python").stdout == "[]\n"
    version = command(programs, "--version", cwd=tmp_path)
    assert version.stdout == f"megatron-dapo {megatron_dapo.__version__}\n"
    plan = command(programs, "plan", "--config", "configs/dapo_32b.yaml", "--staleness", "0", cwd=tmp_path)
    assert plan.returncode == 0 and "step" in plan.stdout, plan.stderr
    write_run(tmp_path / "run", num_steps=2)
    report = command(programs, "report", "run", cwd=tmp_path)
    assert report.returncode == 0 and "report.html" in report.stdout, report.stderr
    assert "plotly" in (tmp_path / "report.html").read_text()
    reference = command(programs, "config-reference", cwd=tmp_path)
    assert reference.stdout == (REPOSITORY / "docs" / "config.md").read_text()


def test_the_installed_command_dry_runs_with_a_reward_of_the_current_folder(programs, tmp_path):
    (tmp_path / "model").mkdir()
    write_files(tmp_path / "model", num_prompts=2)
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL_JSON))
    (tmp_path / "own.py").write_text("def score(data_source, response, ground_truth, extra_info):\n    return 1.0\n")
    (tmp_path / "run.yaml").write_text(
        "data: {train_files: [model/train.jsonl], apply_chat_template: false, train_batch_size: 4}\n"
        "reward: {function: own:score}\nactor_rollout_ref: {model: {path: model}, "
        "actor: {ppo_mini_batch_size: 4}, rollout: {n: 2}}\n"
    )
    done = command(programs, "train", "--dry-run", "--config", "run.yaml", cwd=tmp_path)
    assert done.returncode == 0 and "Process plan" in done.stdout, done.stderr
    started = command(programs, "local", "--config", "run.yaml", cwd=tmp_path)
    assert started.returncode == 2 and "The package torch, which" in started.stderr, started.stderr
    module = command(programs, "-m", "launch.local", "--config", "run.yaml", cwd=tmp_path, program="python")
    assert (module.returncode, module.stderr) == (2, started.stderr)


@pytest.mark.parametrize(
    ("words", "package"),
    [
        (f"train {SYNTHETIC}", "torch"),
        ("convert to-hf --checkpoint a --output b", "torch"),
        ("convert to-megatron --hf-model a --output b", "torch"),
        ("inspect a", "torch"),
        ("verify --checkpoint a --hf-model b", "torch"),
        ("acceptance", ""),
    ],
)
def test_a_command_without_its_packages_says_how_to_install_them(programs, tmp_path, words, package):
    done = command(programs, *words.split(), cwd=tmp_path)
    first, *sentences = done.stderr.splitlines()
    assert done.returncode == 2 and first == "1 mistake to correct:" and len(sentences) == 1, done.stderr
    assert "docs/install.md" in sentences[0] and package in sentences[0]


@pytest.mark.parametrize("module", ["megatron.core.parallel_state", "sglang.srt"])
def test_a_folder_of_its_name_is_no_package(programs, tmp_path, module):
    (tmp_path / module.partition(".")[0]).mkdir()  # docs/checkpoints.md converts into megatron/
    script = f"from megatron_dapo.common.heavy_packages import absence as a; print(a({module!r}).report())"
    done = command(programs, "-c", script, cwd=tmp_path, program="python")
    assert f"The package {module.partition('.')[0]}, which is needed here, is not installed" in done.stdout, done


@pytest.mark.parametrize(
    "script",
    ["import dapo_loss", "import convert_to_megatron; convert_to_megatron('a', 'b')"],
    ids=["a loss", "a tool"],
)
def test_a_public_name_without_its_packages_says_how_to_install_them(programs, tmp_path, script):
    done = command(programs, "-c", f"from megatron_dapo {script}", cwd=tmp_path, program="python")
    last = done.stderr.splitlines()[-1]
    assert "Error: The package torch, which is needed here, is not installed; pip install" in last, done.stderr
    assert "During handling" not in done.stderr


def test_a_missing_module_of_the_program_is_no_missing_package():
    script = "import megatron_dapo.__main__ as p\np.main = lambda: __import__('einops.none')\np.run_and_end()"
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1 and "No module named 'einops.none'" in done.stderr


def test_the_ranges_hold_the_pins_of_the_locks():
    for platform in ("cpu", "cuda"):
        lock = [
            Requirement(line)
            for line in (REPOSITORY / "requirements" / f"{platform}.txt").read_text().splitlines()
            if not line.startswith("#")
        ]
        wanted = [Requirement(text) for text in (*PROJECT["dependencies"], *EXTRAS["training"], *EXTRAS[platform])]
        for python in ("3.11", "3.12"):
            pins = {pin.name: pin.specifier for pin in lock if applies(pin, python)}
            for one in wanted:
                if one.name == "megatron_dapo" or not applies(one, python):
                    continue
                (pin,) = pins[one.name]
                assert one.specifier.contains(pin.version), f"{one} is not {pin} of {platform}.txt"


def test_the_tests_of_loggers_have_the_clients_of_the_extras():
    lock = (REPOSITORY / "requirements" / "agents" / "loggers.txt").read_text().splitlines()[1:]
    pins = {pin.name: pin.specifier for pin in map(Requirement, lock)}
    for one in (Requirement(text) for name in ("wandb", "mlflow") for text in EXTRAS[name]):
        (pin,) = pins[one.name]
        assert one.specifier.contains(pin.version)


def applies(requirement: Requirement, python: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"python_version": python})


def test_help_imports_no_command_and_takes_little_time():
    script = (
        "import sys, time, megatron_dapo.__main__ as p\ntry:\n    p.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'numpy', 'pydantic', 'torch', 'asyncio'} & set(sys.modules)), time.process_time())"
    )
    runs = [subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout for _ in range(2)]
    lines = [run.splitlines()[-1].rpartition(" ") for run in runs]
    assert {imported for imported, _, _ in lines} == {"[]"}
    assert min(float(seconds) for _, _, seconds in lines) < 0.3
    assert all(name in runs[0] for name in ("train", "convert to-hf", "acceptance", "--version"))


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("pl", ["plan"]),
        ("conv", ["convert"]),
        ("convert to-m", ["to-megatron"]),
        ("plan --config-name dapo_7", ["dapo_7b"]),
        ("plan --sea", ["--search"]),
        ("report ru", []),
    ],
)
def test_a_shell_completes_commands_options_and_recipes(words, completed, tmp_path, capsys):
    assert main(["completion"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    typed = f"COMP_WORDS=(megatron-dapo {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))"
    shell = f'. ./script; {typed}; _megatron_dapo; echo "${{COMPREPLY[@]}}"; complete -p megatron-dapo'
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True)
    first, second = done.stdout.splitlines()
    assert first.split() == completed and "-F _megatron_dapo megatron-dapo" in second, done.stderr


def test_the_public_names_are_there_and_no_others():
    from megatron_dapo.public_names import PUBLIC

    assert megatron_dapo.UserError is UserError and {*PUBLIC} <= {*dir(megatron_dapo)}
    with pytest.raises(AttributeError, match="module 'megatron_dapo' has no attribute 'nothing'"):
        megatron_dapo.nothing  # noqa: B018


def test_a_recipe_is_found_where_no_file_of_that_name_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "eval/aime24" in recipe_names()
    assert Path(config_file("configs/demo.yaml")) == REPOSITORY / "configs" / "demo.yaml"
    assert config_file("configs/none.yaml") == "configs/none.yaml" and config_file("demo.yaml") == "demo.yaml"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.yaml").touch()
    assert config_file("configs/demo.yaml") == "configs/demo.yaml"
