"""One rank of the trainer under torchrun, with a separate log file.

python -m launch.rank --log-dir DIR MODULE [argument ...]

Standard error, and standard output of all but rank 0, which shows the steps, go to
DIR/trainer-rank-N.log. Ends with its launcher in any case.
"""

import os
import runpy
import sys
from pathlib import Path

from megatron_dapo.common.parent_death import end_with_parent


def main() -> None:
    end_with_parent(os.getppid())
    option, folder, module, *arguments = sys.argv[1:]
    assert option == "--log-dir", option
    rank = int(os.environ["RANK"])
    log = os.open(Path(folder) / f"trainer-rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, sys.stderr.fileno())
    if rank != 0:
        os.dup2(log, sys.stdout.fileno())
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
