"""Closed or unread standard streams change neither a command's work nor its exit code."""

import os
import subprocess
import sys
import textwrap

import pytest

from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit

# of which a plan simulates some
SMALL_STEPS = ("data.train_batch_size=32", "data.gen_batch_size=96")


def test_ranks_have_standard_streams_though_the_launcher_has_none(tmp_path):
    """As one who makes a daemon closes them."""
    code = """
        import sys
        from launch.local import run_local
        from megatron_dapo.config.loader import load_config
        given = "actor_rollout_ref.rollout.server_urls=[http://127.0.0.1:9]"
        rank = "import os; print(*(os.readlink(f'/proc/self/fd/{i}') for i in range(3)), file=open('seen', 'w'))"
        sys.exit(run_local(load_config(None, ["trainer.run_dir=run", given]), [sys.executable, "-c", rank]))
    """
    command = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", sys.executable, "-c", textwrap.dedent(code)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    subprocess.run(command, env=environment, cwd=tmp_path, check=True, timeout=60)
    log = tmp_path / "run" / "logs" / "trainer-rank-0.log"
    assert (tmp_path / "seen").read_text().split() == ["/dev/null", "/dev/null", str(log)]


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("megatron_dapo", "config-reference"), 0),
        (("checkpoints_tools.hf_to_megatron", "--hf-model", "examples/arithmetic/base", "--output", "{folder}/new"), 0),
        # files absent from here
        (("megatron_dapo", "train", "--dry-run", "--config", "configs/dapo_7b.yaml", *SMALL_STEPS), 2),
        (("launch.slurm", "plan", "--config", "configs/dapo_7b.yaml", *SMALL_STEPS), 2),
    ],
)
def test_what_a_command_prints_may_go_into_head(command, code, tmp_path):
    ours, its = os.pipe()
    os.close(ours)
    with os.fdopen(its, "w") as stdout:
        done = subprocess.run(
            [sys.executable, "-m", *(word.format(folder=tmp_path) for word in command)],
            **{"stdout": stdout, "stderr": subprocess.PIPE, "cwd": REPOSITORY, "text": True},
        )
    assert done.returncode == code
    assert "BrokenPipe" not in done.stderr and ("model.path" in done.stderr) == (code == 2)
