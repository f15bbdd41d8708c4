"""One Slurm cluster of three nodes for this folder's tests (one per worker),
and questions to a job.

The cluster is real (see local_slurm.sh); scripts, trainer and servers are the users' own.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron_dapo.storage.run_folder import RunFolder
from tests.helpers import REPOSITORY

LOCAL_SLURM = Path(__file__).with_name("local_slurm.sh")
TAIL = 2500  # characters of each log that a failure shows
PATIENCE_S = 900
"""For a test to wait for Slurm and jobs: several times their duration beside other work
on two cores."""

SMALL_STEPS = (
    # 200 held-out prompts before and after each run would take longer than its steps
    "data.val_files=[]",
    "data.train_batch_size=8",
    "data.gen_batch_size=8",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
)

_ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Cluster"]:
    if shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        pytest.skip("Slurm is not installed here: `make setup-slurm` installs it on Debian and Ubuntu")
    if subprocess.run(["unshare", "--mount", "--net", "--pid", "--fork", "true"], capture_output=True).returncode:
        pytest.skip("the nodes of a Slurm cluster on one machine need namespaces, which this user may not make here")
    folder = tmp_path_factory.mktemp("cluster")
    process = subprocess.Popen([LOCAL_SLURM, folder, "3"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:  # the end of its input ends the cluster
        assert process.stdout.readline() == "ready\n", "the cluster did not start; what it said is above"
        yield Cluster(folder)
    assert process.returncode == 0


class Cluster:
    """folder: seen by all nodes, as the repository is; their /tmp is not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self._environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "PYTHON": sys.executable}

    def run(self, *command: str, **environment: str) -> str:
        """A command of Slurm, as the user who submits runs it; its standard output."""
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            env=self._environment | environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def on(self, node: str, *command: str) -> str:
        """A command run on a node."""
        return self.run(str(LOCAL_SLURM), str(self.folder), "on", node, *command)

    def set_node(self, node: str, state: str) -> None:
        self.run("scontrol", "update", f"nodename={node}", f"state={state}", "reason=test")

    def submit(self, name: str, *overrides: str, flags: tuple[str, ...] = (), **environment: str) -> "Job":
        """`sbatch FLAGS slurm/demo.sh OVERRIDES` with a run folder of its own and a fourth of the
        samples per step."""
        run = RunFolder(self.folder / name)
        log = self.folder / f"{name}.log"
        number = self.run(
            *("sbatch", "--parsable", f"--output={log}", *flags),
            *("slurm/demo.sh", f"trainer.run_dir={run.path}", *SMALL_STEPS, *overrides),
            **environment,
        )
        return Job(self, int(number), run, log)


class Job:
    def __init__(self, cluster: Cluster, number: int, run: RunFolder, log: Path) -> None:
        self._cluster, self.number, self.run_folder, self._log = cluster, number, run, log

    # Slurm's words

    def fact(self, name: str) -> str:
        """A field of `scontrol show job`: JobState, ExitCode, Restarts, NodeList ..."""
        shown = self._cluster.run("scontrol", "show", "job", str(self.number), "--oneliner")
        return re.search(rf"\b{name}=(\S*)", shown)[1]

    def exit_code(self) -> int:
        """Waits until the job has ended for good; its exit code,
        or 128 + signal for an end by a signal."""
        self.wait(lambda: self.fact("JobState") in _ENDS, "the job ends")
        code, signal = map(int, self.fact("ExitCode").split(":"))
        return 128 + signal if signal else code

    def signal(self, name: str) -> None:
        """To the script, as Slurm does before the time limit."""
        self._cluster.run("scancel", "--batch", f"--signal={name}", str(self.number))

    def shorten(self) -> None:
        """Its time limit: Slurm then sends the script's signal 120 s before the limit, at its next
        look (every 30 s)."""
        hours, minutes, _ = map(int, self.fact("RunTime").split(":"))
        self._cluster.run("scontrol", "update", f"jobid={self.number}", f"timelimit={60 * hours + minutes + 2}")

    def cancel(self) -> None:
        self._cluster.run("scancel", str(self.number))

    # its output

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def last_line(self) -> str:
        return self.log().rstrip("\n").rpartition("\n")[2]

    def last_lines(self) -> list[str]:
        """Of each attempt; Slurm adds lines of its own to logs of jobs it ends."""
        attempts = re.split(r"^\[.*?\] job \d+, attempt \d+: .*$", self.log(), flags=re.MULTILINE)[1:]
        lines = [[line for line in part.splitlines() if not line.startswith("slurmstepd-")] for part in attempts]
        return [part[-1] for part in lines]

    def attempt(self, number: int = 0) -> Path:
        """Folder of an attempt's logs."""
        return self.run_folder.logs / f"attempt-{self.number}-{number}"

    def attempt_log(self, number: int, name: str) -> str:
        file = self.attempt(number) / f"{name}.log"
        return file.read_text() if file.exists() else ""

    def saved_step(self) -> int:
        """After which it was requeued."""
        return int(re.match(r"SAVED: step (\d+) of", self.last_lines()[0])[1])

    def metrics(self) -> list[dict]:
        """Those of the steps that are done."""
        file = self.run_folder.metrics
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [line for line in map(json.loads, lines) if "actor/loss" in line]

    def weight_versions(self, step: int) -> set[int]:
        """Of the tokens that a step was trained on."""
        groups = map(json.loads, self.run_folder.rollout(step).read_text().splitlines())
        return {version for group in groups for answer in group["responses"] for version in answer["weight_versions"]}

    def report(self) -> str:
        """The ends of all logs, for a test that fails."""
        logs = [self._log, *sorted(self.run_folder.logs.rglob("*.log"))]
        return "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-TAIL:]}" for log in logs if log.exists())

    # its programs

    def processes(self, *words: str) -> list[psutil.Process]:
        """Processes of this job, on all nodes, with all the words in their command lines."""
        matching = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("SLURM_JOB_ID") != str(self.number) or process.status() == "zombie":
                    continue
                if process.environ().get("SLURM_CONF") == str(self._cluster.folder / "slurm.conf"):
                    matching += [process] if set(words) <= set(process.cmdline()) else []
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return matching

    def leaves_nothing(self) -> bool:
        """No step and no process, some time after the end."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            steps = self._cluster.run("squeue", "--steps", "--noheader", f"--job={self.number}")
            if not steps.strip() and not self.processes():
                return True
            time.sleep(0.2)
        print(f"left behind: {steps} {[process.cmdline() for process in self.processes()]}")
        return False

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}\n{self.report()}"
            time.sleep(0.2)

    def wait_for_steps(self, number: int) -> None:
        self.wait(lambda: len(self.metrics()) >= number or self.fact("JobState") in _ENDS, f"step {number} is done")
        assert len(self.metrics()) >= number, self.report()
