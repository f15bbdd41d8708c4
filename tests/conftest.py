"""Settings of every test: one thread per process, no network, unhurried property tests."""

import gc
import os
import signal
from collections.abc import Iterator
from functools import cache
from itertools import zip_longest
from pathlib import Path

from megatron_dapo.common import ends
from megatron_dapo.common.child_environment import ONE_THREAD

# before any import of torch and transformers, here and in child processes
os.environ.update(ONE_THREAD)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from tests.helpers import free_port as find_free_port  # noqa: E402
from tests.proofs import PROOFS, amount  # noqa: E402

torch.set_num_threads(1)
# no deadline: the first call of many functions imports, and the machine may be busy
hypothesis.settings.register_profile("megatron_dapo", deadline=None, max_examples=amount(25, 50), print_blob=True)
hypothesis.settings.load_profile("megatron_dapo")


# Tests with processes have deadlines of their own, which name the missing one. This one catches the
# rest, also on a busy machine; unit tests have that of pyproject.toml.
PROCESSES_TIMEOUT_S = 1800

TESTS = Path(__file__).resolve().parent

# end-to-end files of half a minute at most; the others take up to two
SHORT = ("test_classic_control.py", "test_docs.py", "test_server_decode.py", "test_server_options.py")
# by layer, the slowest files, slowest first: distributed ones from four minutes to one, unit ones
# from half a minute to ten seconds. Waiting ones stand between computing ones; the others take less
LONG = {
    "distributed": (
        "test_layouts.py",
        "test_checkpoint_layouts.py",
        "test_kills_in_flight.py",
        "test_head.py",
        "test_critic.py",
        "test_critic_kinds.py",
        "test_mpi.py",
        "test_parity.py",
        "test_convert.py",
        "test_weight_sync_group.py",
    ),
    "unit": (
        "test_fleet_simulation.py",
        "test_rewards_pool.py",
        "test_launch.py",
        "test_moves.py",
        "test_reward_accounts.py",
        "test_report_damage.py",
        "test_handle.py",
        "test_plan_steps.py",
        "test_server_watch.py",
        "test_eval_command.py",
        "test_stops_in_flight.py",
        "test_cli.py",
        "test_judge.py",
        "test_batch_invariant.py",
        "test_supervisor_lease.py",
        "test_platform.py",
        "test_standard_streams.py",
        "test_reward_forms.py",
        "test_length_bias.py",
        "test_judged_answers.py",
        "test_controller_async.py",
        "test_first_gpu_parts.py",
        "test_server_pool.py",
        "test_uneven_fleet.py",
        "test_supervisor.py",
        "test_code_tests.py",
        "test_recipes_planned.py",
        "test_tokenizer_damage.py",
    ),
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not PROOFS:
        proofs = [item for item in items if item.get_closest_marker("proof")]
        config.hook.pytest_deselected(items=proofs)
        items[:] = [item for item in items if item not in proofs]
    for item in items:
        if any(item.get_closest_marker(layer) for layer in ("distributed", "e2e", "slurm")):
            item.add_marker(pytest.mark.timeout(PROCESSES_TIMEOUT_S))
    _mix(items)


def pytest_collection_finish() -> None:
    """Keep the collector from the imports of all test modules:
    one look through them takes half a second."""
    gc.freeze()


def _mix(items: list[pytest.Item]) -> None:
    """Put the Slurm tests, which mostly wait, between computing ones, one class or file of each in
    turn. Long files come first. Short ones come last and fill the gaps of workers with less to
    do."""
    jobs: dict[str, list[pytest.Item]] = {}
    others: dict[str, list[pytest.Item]] = {}
    for item in sorted(items, key=lambda item: _place(item.path)):
        scopes = jobs if item.get_closest_marker("slurm") else others
        scopes.setdefault(item.nodeid.rpartition("::")[0], []).append(item)
    pairs = zip_longest(others.values(), jobs.values(), fillvalue=[])
    items[:] = [item for pair in pairs for scope in pair for item in scope]


@cache
def _place(path: Path) -> int:
    """Return the sort key of a file's tests; equal places keep their order."""
    layer, name = path.relative_to(TESTS).parts[0], path.name
    long = LONG.get(layer, ())
    if name in long:
        return long.index(name) - len(long)
    is_filler = layer in ("compile", "distributed")
    return 2 if name in SHORT else int(is_filler)


@pytest.fixture(autouse=True)
def no_end_on_record() -> None:
    """A test's record of its program's end is not the next test's."""
    ends.forget_this_process()


@pytest.fixture
def free_port() -> int:
    return find_free_port()


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Ctrl-C and a closed terminal end processes again, in tests that send these signals to
    themselves or to children. The starter of the tests may have had them ignored (nohup: SIGHUP; a
    script's `&`: SIGINT), and all children inherit that. Not for every test: under nohup the others
    outlive a closed terminal."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
