"""Limits of the distributed tests: computing ranks may take long, idle ones are stuck."""

import pytest

from tests.forked_ranks import run_ranks

pytestmark = pytest.mark.distributed

COMPUTING = """
import time

began = time.process_time()
while time.process_time() - began < 2.0:
    pass
print("done")
"""
WAITING = """
import os
import time

time.sleep(60.0 if os.environ["RANK"] == "1" else 0.0)
"""


def test_ranks_that_compute_are_waited_for_however_long_it_takes(tmp_path):
    (tmp_path / "worker.py").write_text(COMPUTING)
    assert run_ranks(tmp_path / "worker.py", 2, stuck_s=0.5) == "done\ndone\n"


def test_ranks_that_do_not_compute_are_named_and_ended(tmp_path):
    (tmp_path / "worker.py").write_text(WAITING)
    with pytest.raises(AssertionError, match=r"ranks \[1\] have not computed for 1 s"):
        run_ranks(tmp_path / "worker.py", 2, stuck_s=1.0)
