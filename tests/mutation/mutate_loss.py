"""Changes the loss in one place at a time and demands that a test fails: `python -m tests.mutation.mutate_loss`.

Every mutant is first compared with plain arithmetic (what the tests of the two backends do); what passes there goes
through the test files of its module, in a process where the mutant is imported in place of the original. The working
tree is never written. Ends with 1 if a mutant survives that is not listed as equivalent, or if a listed one does not.

With `published` it puts in the bugs of tests/mutation/published.py instead.
"""

import argparse
import importlib.abc
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis  # noqa: E402, F401  imported once, for all children
import pytest  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402, F401

from tests.mutation.loss_targets import ROOT, TARGETS, Target, Unchanged, in_a_fork, spec_of  # noqa: E402
from tests.mutation.mutants import Mutant  # noqa: E402
from tests.mutation.published import run as run_published  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="plain arithmetic alone; lists what passes it")
    parser.add_argument(
        "modules", nargs="*", help="parts of module names (default: all); published: see tests/mutation/published.py"
    )
    options = parser.parse_args()
    if "published" in options.modules:
        return 1 if run_published([part for part in options.modules if part != "published"]) else 0
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of lanes that a kernel computes and drops
    os.chdir(ROOT)
    failures = 0
    for target in TARGETS:
        if not options.modules or any(part in target.module for part in options.modules):
            failures += run(target, options.quick)
    return 1 if failures and not options.quick else 0


def run(target: Target, quick: bool) -> int:
    """Number of mutants that survive unexpectedly, or die unexpectedly."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mutants = target.mutants(folder)
        if not quick and not survives_tests(Unchanged(target.original), target, folder):
            raise RuntimeError(f"the tests of {target.module} fail as it is")
        passed = [mutant for mutant in mutants if target.survives_quick(mutant, folder)]
        survivors = passed if quick else [mutant for mutant in passed if survives_tests(mutant, target, folder)]
    names = {mutant.name for mutant in survivors}
    unexpected = [name for name in names if name not in target.equivalent]
    stale = [name for name in target.equivalent if name not in names]
    print(
        f"{target.module}: {len(mutants)} mutants, {len(mutants) - len(passed)} killed by plain arithmetic, "
        f"{len(passed) - len(survivors)} by other tests, {len(names) - len(unexpected)} equivalent, "
        f"{len(unexpected)} survive; {time.monotonic() - started:.0f} s",
        flush=True,
    )
    for name in sorted(unexpected):
        print(f"    survives: {name}")
    for name in stale:
        print(f"    listed as equivalent, but it is not, or not there: {name}")
    return len(unexpected) + len(stale)


class _InPlaceOf(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, path: Path) -> None:
        self.module, self.path = module, path

    def find_spec(self, fullname, path, target=None):
        return spec_of(fullname, self.path) if fullname == self.module else None


def survives_tests(mutant: Mutant | Unchanged, target: Target, folder: Path) -> bool:
    """Runs the target's tests in a fork of this process,
    with the mutant in place of the original."""
    path = folder / "mutant.py"
    path.write_text(mutant.source)
    return in_a_fork(lambda: _pass(target, path))


def _pass(target: Target, mutant: Path) -> bool:
    for name in [name for name in sys.modules if name.split(".")[0] in ("megatron_dapo", "tests")]:
        del sys.modules[name]
    sys.meta_path.insert(0, _InPlaceOf(target.module, mutant))
    return pytest.main(["-x", "-q", "--tb=no", "-p", "no:cacheprovider", *target.tests]) == pytest.ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
