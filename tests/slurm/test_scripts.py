"""Every script of slurm/ as read by a shell and by shellcheck, and as submitted to Slurm."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers import REPOSITORY

pytestmark = pytest.mark.slurm

SCRIPTS = sorted(path.relative_to(REPOSITORY) for path in (REPOSITORY / "slurm").glob("*.sh"))
HEADS = {
    "acceptance.sh": "gpu",
    "dapo_32b.sh": "gpu",
    "dapo_7b.sh": "gpu",
    "dapo_qwen3_235b_a22b.sh": "gpu",
    "dapo_qwen3_30b_a3b.sh": "gpu",
    "demo.sh": "cpu",
    "one_node.sh": "gpu",
}  # script -> the tests' partition that has its nodes
LOCAL_SLURM = "tests/slurm/local_slurm.sh"


def run(*command: object, **environment: str) -> subprocess.CompletedProcess:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PYTHON"))}
    return subprocess.run(
        [*map(str, command)], cwd=REPOSITORY, env=own | environment, capture_output=True, text=True, timeout=300
    )


def test_these_are_the_scripts():
    assert {path.name for path in SCRIPTS} == {*HEADS, "body.sh"}
    assert all(os.access(REPOSITORY / path, os.X_OK) for path in SCRIPTS)


def test_bash_reads_them():
    done = [run("bash", "-n", path) for path in (*SCRIPTS, LOCAL_SLURM)]
    assert all(each.returncode == 0 for each in done), done


def test_shellcheck_finds_nothing():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed here: `make setup-slurm` installs it on Debian and Ubuntu")
    done = run("shellcheck", *SCRIPTS, LOCAL_SLURM, "containers/install.sh")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", HEADS)
def test_slurm_would_run_it_as_it_is(cluster, script):
    cluster.run("sbatch", "--test-only", f"--partition={HEADS[script]}", f"slurm/{script}")


@pytest.mark.parametrize("script", HEADS)
def test_slurm_would_run_it_without_counting_gpus(cluster, script):
    cluster.run("sbatch", "--test-only", "--partition=cpu", "--nodes=2", "--gpus-per-node=0", f"slurm/{script}")


def test_the_script_of_the_acceptance_run_hands_its_words_on():
    done = run("bash", "slurm/acceptance.sh", "--list", PYTHON=sys.executable)
    assert done.returncode == 0 and done.stdout.splitlines()[0].startswith("environment"), done.stderr


@pytest.mark.parametrize(
    ("name", "nodes"),
    [("dapo_32b", 16), ("dapo_7b", 2), ("dapo_qwen3_235b_a22b", 32), ("dapo_qwen3_30b_a3b", 6), ("one_node", 1)],
)
def test_a_dry_run_shows_nodes_processes_and_memory_and_then_the_missing_files(name, nodes):
    done = run("bash", f"slurm/{name}.sh", DRY_RUN="1")
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("FAILED (2): data.train_files holds")
    assert f" node{nodes}\n" in done.stdout and f"node{nodes + 1}" not in done.stdout
    for words in ("8 ranks on each of", "launch.torchrun", "launch.sglang_server", "launch.preflight", "memory"):
        assert words in done.stdout
    assert f"#SBATCH --nodes={nodes}\n" in (REPOSITORY / "slurm" / f"{name}.sh").read_text()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"CONTAINER": "docker"}, "CONTAINER=docker is neither none, pyxis nor apptainer"),
        ({"CONTAINER": "pyxis"}, "CONTAINER=pyxis needs IMAGE=..."),
        ({"REQUEUE": "no"}, "REQUEUE=no is neither auto nor off"),
        ({"DRY_RUN": "0"}, "no Slurm job: sbatch slurm/NAME.sh, or DRY_RUN=1 bash slurm/NAME.sh"),
    ],
)
def test_a_wrong_setting_is_one_line(settings, sentence):
    done = run("bash", "slurm/dapo_7b.sh", **{"DRY_RUN": "1"} | settings)
    assert done.returncode == 2 and done.stderr == f"FAILED (2): {sentence}\n" and done.stdout == ""


# Stands for srun and for apptainer: notes the command line, then runs the words after the flags;
# but no task of a node. As srun does, it adds a line of its own after a failure.
STUB = """#!/bin/bash
echo "${0##*/} $*" >>"$CALLS"
while [[ $1 != python* ]]; do shift; done
[[ "$*" != *" node "* ]] || exit 1
"$@" && exit 0 || code=$?
[[ $0 != */srun ]] || echo "srun: error: n1: task 0: Exited with exit code $code" >&2
exit $code
"""
CONTAINERS = {  # between srun's own flags and the command
    "pyxis": "--container-image=image.sqsh --container-mounts=/data:/data --container-workdir={here}",
    "apptainer": "apptainer exec --nv --bind /data:/data --pwd {here} image.sqsh",
}


@pytest.fixture
def stubs(tmp_path):
    """Runs slurm/body.sh on the demo's config as a job of Slurm, with `programs` as its commands.
    Its standard output is the job's log, of both streams."""

    def run_job(programs: dict[str, str], *overrides: str, **environment: str) -> subprocess.CompletedProcess:
        for name, text in programs.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1"}
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        overrides = (f"trainer.run_dir={tmp_path / 'run'}", *overrides)
        body = ("bash", "-c", 'exec bash slurm/body.sh "$@" 2>&1', "body.sh")
        return run(*body, *overrides, CONFIG="configs/demo.yaml", PATH=path, **job, **environment)

    return run_job


NODES = "#!/bin/bash\necho n1\necho n2\n"


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_container_s_flags_stand_between_srun_s_and_the_command_of_every_step(container, stubs, tmp_path):
    programs = {"srun": STUB, "apptainer": STUB, "squeue": "#!/bin/bash\n", "scontrol": NODES}
    programs["python3"] = f'#!/bin/bash\nexec {sys.executable} "$@"\n'
    calls = tmp_path / "calls"
    settings = {"CONTAINER": container, "IMAGE": "image.sqsh", "MOUNTS": "/data:/data", "CALLS": str(calls)}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1=", "label": "2", "data_source": "math"}\n')
    data = [f"data.train_files=[{prompts}]", "data.apply_chat_template=false"]
    done = stubs(programs, *data, "actor_rollout_ref.rollout.server.nnodes=1", **settings)
    logs = tmp_path / "run" / "logs" / "attempt-1-0"
    assert done.returncode == 10 and done.stdout.splitlines()[-1].startswith("FAILED (10): preflight"), done
    [preflight] = [call for call in calls.read_text().splitlines() if "--job-name=preflight" in call]
    flags = CONTAINERS[container].format(here=REPOSITORY)
    assert preflight.endswith(
        f"{logs}/preflight-%N.log {flags} python3 -m launch.slurm node preflight {logs}/plan.json"
    )
    assert calls.read_text().count(flags) == 3  # the plan, the preflight, how it ended


# Stands for srun: the preflight is well; the trainer has its script signalled. On finding the file
# `stop` it leaves the files of a trainer asked to save.
SRUN_OF_A_TRAINER = """#!/bin/bash
[[ "$*" = *=trainer* ]] || exit 0
logs=$(dirname "${@: -1}") run=$RUN_FOLDER
kill -USR1 "$PPID"
until [ -e "$run/stop" ]; do sleep 0.1; done
mkdir -p "$run/ends" "$run/checkpoints/step_000003"
for node in n1 n2; do
    echo '{"kind": "saved", "exit_code": 85, "start": "'"$logs"'"}' >"$run/ends/trainer-$node.json"
done
"""
SCONTROL = """#!/bin/bash
[ "$1 $2" != "show hostnames" ] || exec printf 'n1\nn2\n'
[ "$1 $2 ${STATE:+known}" != "show job known" ] || exec echo "JobId=1 JobName=dapo JobState=$STATE Reason=None"
echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2
exit 1
"""


@pytest.mark.parametrize("state", ["", "RUNNING", "SIGNALING", "SUSPENDED"])
def test_a_running_job_obeys_the_signal_and_reports_its_save_after_slurm_fell_silent(state, stubs, tmp_path):
    """state: Slurm's word for the job ("": no answer); at a signal it is SIGNALING for a moment."""
    failing = "#!/bin/bash\nexit 1\n"
    programs = {"srun": SRUN_OF_A_TRAINER, "scontrol": SCONTROL, "squeue": failing, "scancel": failing}
    # it asks Slurm again every two seconds, twice five times
    programs["sleep"] = "#!/bin/bash\nexec /bin/sleep 0.05\n"
    (tmp_path / "batches").mkdir()
    (tmp_path / "batches" / "step_000040.json.gz").touch()
    overrides = [f"trainer.replay={tmp_path / 'batches'}", "trainer.nnodes=2", "trainer.n_procs_per_node=1"]
    overrides.append("trainer.total_training_steps=40")
    done = stubs(programs, *overrides, PYTHON=sys.executable, RUN_FOLDER=str(tmp_path / "run"), STATE=state)
    assert done.returncode == 85, done
    lines = [line for line in done.stdout.splitlines() if not line.startswith("slurm_load_jobs")]
    assert "SAVED: step 3 of 40 is saved in" in lines[-2] and "requeued on USR1" in lines[-2]
    assert done.stdout.splitlines()[-1] == "SAVED: Slurm does not requeue this job; the same command resumes it"


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_mistake_in_the_config_is_the_last_line_even_after_words_of_srun(container, stubs, tmp_path):
    programs = {"srun": STUB, "apptainer": STUB, "scontrol": NODES}
    programs["python3"] = f'#!/bin/bash\nexec {sys.executable} "$@"\n'
    settings = {"CONTAINER": container, "IMAGE": "image.sqsh", "CALLS": str(tmp_path / "calls")}
    done = stubs(programs, "trainer.sed=1", **settings)
    assert done.returncode == 2 and done.stdout.splitlines()[-1].startswith("FAILED (2): Unknown key trainer.sed"), done


@pytest.mark.parametrize(
    ("venv", "sentence"),
    [
        (False, "there is no {python}: run make setup where packages can be downloaded"),
        (True, "{python} has not the packages of requirements/: run make setup, while no job uses it"),
    ],
    ids=["missing", "of another lock"],
)
def test_a_job_makes_a_missing_venv_and_changes_none(venv, sentence, tmp_path):
    """Other jobs may be using it. No network here: building anything fails."""
    for name in ("slurm/body.sh", "requirements/install.py", "requirements/cpu.txt", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / "make").write_text("#!/bin/bash\nexit 1\n")
    (tmp_path / "make").chmod(0o755)
    python = tmp_path / ".venv" / "bin" / "python"
    if venv:
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)
        (tmp_path / ".venv" / "setup.json").write_text('{"platform": "cpu", "lock": "another"}')
    settings = {"CONFIG": "none.yaml", "DRY_RUN": "1", "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = run("bash", "-c", f"cd {tmp_path} && exec bash slurm/body.sh", **settings)
    assert done.returncode == 2 and done.stderr.splitlines()[-1] == f"FAILED (2): {sentence.format(python=python)}"


def test_a_mistake_found_by_the_planner_is_the_last_line(stubs):
    done = stubs({"scontrol": NODES}, PYTHON=sys.executable, MIN_BANDWIDTH="fast")
    assert done.returncode == 2 and "invalid float value: 'fast'" in done.stdout
    assert done.stdout.splitlines()[-1] == "FAILED (2): the plan could not be made; see above"
