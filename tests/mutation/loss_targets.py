"""The files of the loss to mutate, a quick trial of a mutant, and the mutants beyond all tests."""

import contextlib
import faulthandler
import gc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

import megatron_dapo.algorithms.dapo_loss
import megatron_dapo.kernels.token_loss  # noqa: F401
from tests import advantage_oracle, rollout_correction_oracle
from tests.mutation.mutants import Mutant, mutants
from tests.token_loss_oracle import CASES, FLOAT32, FLOAT64, SEQUENCE_CASES, case_and_expected, check

ROOT = Path(__file__).resolve().parents[2]
# the packages export functions of the same names
dapo_loss_module = sys.modules["megatron_dapo.algorithms.dapo_loss"]
token_loss_module = sys.modules["megatron_dapo.kernels.token_loss"]


@dataclass(frozen=True)
class Unchanged:
    """Stands in a mutant's place."""

    source: str
    name: str = "unchanged"


@dataclass(frozen=True)
class Target:
    """survives_quick(mutant, folder for files): whether token-by-token arithmetic sees no
    difference.

    tests: files of which one must fail for every mutant but the equivalent ones (name -> why
    nothing can differ). beyond: beginnings of names of mutants that are invisible to plain
    arithmetic; other tests must see them.
    """

    module: str
    survives_quick: Callable[[Mutant | Unchanged, Path], bool]
    tests: tuple[str, ...]
    equivalent: dict[str, str] = field(default_factory=dict)
    beyond: tuple[str, ...] = ()

    @property
    def original(self) -> str:
        return (ROOT / (self.module.replace(".", "/") + ".py")).read_text()

    def mutants(self, folder: Path) -> list[Mutant]:
        """All of them. Raises if the unchanged source does not survive:
        then death would mean nothing."""
        if not self.survives_quick(Unchanged(self.original), folder):
            raise RuntimeError(f"{self.module} differs from plain arithmetic as it is")
        return mutants(self.original)


def _equals_plain_arithmetic(
    token_loss: Callable, dtype: torch.dtype, precision: float, cases: Iterable[str] = CASES
) -> bool:
    for name in cases:
        case, want = case_and_expected(name)
        case = case.to(dtype)
        try:
            check(token_loss(case.log_probs, case.entropy, case.tokens, case.config, case.kl), case, want, precision)
        except Exception:  # noqa: BLE001  a mutant may fail in any way
            return False
    return True


def torch_survives(module: str) -> Callable[[Mutant | Unchanged, Path], bool]:
    """Puts the mutant's functions in place of the torch backend's, and compares in float64."""

    def survives(mutant: Mutant | Unchanged, folder: Path) -> bool:
        mutated = types.ModuleType(module)
        try:
            exec(compile(mutant.source, module, "exec"), mutated.__dict__)
            with _in_place_of_the_original(mutated):
                return _equals_plain_arithmetic(
                    token_loss_module.token_loss, torch.float64, FLOAT64, CASES | SEQUENCE_CASES
                )
        except Exception:  # noqa: BLE001
            return False

    return survives


def passes(check: Callable[[types.ModuleType], None]) -> Callable[[Mutant | Unchanged, Path], bool]:
    """Gives the mutant's module to a check, which raises on any difference
    from plain arithmetic."""

    def survives(mutant: Mutant | Unchanged, folder: Path) -> bool:
        name = "megatron_dapo.algorithms.mutant"
        mutated = types.ModuleType(name)
        sys.modules[name] = mutated  # a dataclass looks here for its own module
        try:
            exec(compile(mutant.source, name, "exec"), mutated.__dict__)
            check(mutated)
        except Exception:  # noqa: BLE001
            return False
        finally:
            del sys.modules[name]
        return True

    return survives


def check_correction(module: types.ModuleType) -> None:
    for make in rollout_correction_oracle.CASES.values():
        case = make()
        rollout_correction_oracle.check(case.corrected(module.rollout_correction), case)


@contextlib.contextmanager
def _in_place_of_the_original(mutated: types.ModuleType) -> Iterator[None]:
    original = sys.modules[mutated.__name__]
    users = [(dapo_loss_module, token_loss_module)[mutated.__name__ == dapo_loss_module.__name__]]
    saved = []
    for user in users:
        for name, value in list(vars(user).items()):
            if callable(value) and getattr(original, name, None) is value and not isinstance(value, type):
                saved.append((user, name, value))
                setattr(user, name, getattr(mutated, name))
    try:
        yield
    finally:
        for user, name, value in saved:
            setattr(user, name, value)


def triton_survives(mutant: Mutant | Unchanged, folder: Path) -> bool:
    """Launches the mutant in the interpreter, which must be on,
    in a process of its own: it may write anywhere."""
    if isinstance(mutant, Unchanged):  # here, so that every fork has its imports and caches
        return _triton_survives(mutant, folder)
    return in_a_fork(lambda: _triton_survives(mutant, folder))


def in_a_fork(function: Callable[[], bool]) -> bool:
    """The result of `function` in a silent copy of this process; False if it ends otherwise, or not
    within a minute of processor time."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            gc.disable()  # a collection would copy the pages of the parent
            signal.setitimer(signal.ITIMER_PROF, 60)  # not by the clock: on a busy machine waiting says nothing
            faulthandler.disable()
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1), os.dup2(silence, 2)
            os._exit(0 if function() else 1)
        os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


class _WithoutBytecode(importlib.machinery.SourceFileLoader):
    """Compiles a file each time. Otherwise its bytecode would be taken for the next mutant's: the
    same file in the same second, and perhaps the same length."""

    def set_data(self, path: str, data: bytes, *, _mode: int = 0o666) -> None:
        pass


def spec_of(name: str, path: Path) -> importlib.machinery.ModuleSpec:
    """Imports a file under a name."""
    return importlib.util.spec_from_file_location(name, path, loader=_WithoutBytecode(name, str(path)))


def _triton_survives(mutant: Mutant | Unchanged, folder: Path) -> bool:
    path = folder / "mutant.py"  # Triton reads the source of a kernel from its file
    path.write_text(mutant.source)
    spec = spec_of("mutant", path)
    mutated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutated)
    return _equals_plain_arithmetic(mutated.token_loss, torch.float32, FLOAT32)


def _names(names: str, reason: str) -> dict[str, str]:
    """One name per line."""
    return {name.strip(): reason for name in names.strip().splitlines()}


FILL = "any finite number may stand where a token does not count"
AT_THE_BOUND = "both branches give the same number at the bound"
NO_ADVANTAGE = "an advantage of 0 gives no loss with either temperature"
NOT_FAR = "a token as likely as before is not far from the old policy"
K3_BOUND = "k3 is 10 or more, its own bound, long before the log-ratio's"
ROUNDING = "below the rounding of float32"
NOT_RUN = "an argument that changes speed, not numbers, and that the interpreter ignores"

EQUIVALENT = {
    "gae": {
        **_names("gae: 0 -> 1 #2", FILL),
        **_names(
            "_backward_recurrence: stride <= num_steps -> stride < num_steps",
            "only the first step would miss `last`, and gae reads that of a first step nowhere",
        ),
    },
    "policy_loss": {
        **_names(
            "policy_loss: 0 -> 1 #2 \n policy_loss: 0 -> 1 #3 \n policy_loss: 0 -> 1 #4 \n policy_loss: 0 -> 1 #5", FILL
        ),
        **_names("_gated: advantages > 0 -> advantages >= 0", NO_ADVANTAGE),
        **_names(
            "_masked: log_probs > old_log_probs -> log_probs >= old_log_probs \n"
            "_masked: log_probs < old_log_probs -> log_probs <= old_log_probs",
            NOT_FAR,
        ),
    },
    "kl": {
        **_names("_k3: 20.0 -> 21.0 \n _k3: 20.0 -> 21.0 #2", K3_BOUND),
        **_names("_k3: 10.0 -> 11.0", "k3 is never negative: its lower bound does nothing"),
    },
    "mismatch_sums": {
        **_names(
            "mismatch_sums: (trainer_log_probs - rollout_log_probs).detach() -> trainer_log_probs - rollout_log_probs",
            "masked_sum and masked_max detach as well",
        ),
    },
    "rollout_correction": {
        **_names("Segments: True -> False", "whether the device checks the lengths, which are right"),
    },
    "dapo_loss": {
        **_names(
            "\n".join(f"dapo_loss: 0 -> 1 #{number}" for number in (2, 3, 5, 6, 7)),
            FILL,
        ),
        **_names("metric_names: 0 -> 1", "the names do not depend on the number of tokens"),
    },
    "token_loss": {
        **_names("NUM_WARPS: 4 -> 5 \n token_loss: False -> True", NOT_RUN),
        **_names("token_loss: 0.0 -> 1.0", "beta is not read where no token is replayed"),
        **_names("token_loss: 0.0 -> 1.0 #2", "a lower bound is not read where ratios are truncated"),
        **_names(
            """token_loss_kernel: 0.0 -> 1.0 #4
            token_loss_kernel: 0.0 -> 1.0 #6
            token_loss_kernel: 0 -> 1 #3
            token_loss_kernel: 0.0 -> 1.0 #10
            token_loss_kernel: 0.0 -> 1.0 #12""",
            FILL,
        ),
        **_names(
            """_bounded: x > high -> x >= high
            _bounded: x < low -> x <= low
            _gated: x > 0.0 -> x >= 0.0
            _kl: k3 > LARGEST_KL -> k3 >= LARGEST_KL""",
            AT_THE_BOUND,
        ),
        **_names("_kl: k3 <= LARGEST_KL -> k3 < LARGEST_KL", "no float32 log-ratio is known whose k3 is 10 exactly"),
        **_names(
            """_exp_minus_1_minus: 0.5 -> 0.75
            _exp_minus_1_minus: tl.abs(x) < 0.5 -> tl.abs(x) <= 0.5
            _exp_minus_1_minus: 8.0 -> 9.0""",
            ROUNDING,
        ),
        **_names("reduce_kernel: loss + column -> loss - column", "only column 0 is stored"),
        **_names("_gated: adv > 0.0 -> adv >= 0.0", NO_ADVANTAGE),
        **_names("_masked: lp > old -> lp >= old \n _masked: lp < old -> lp <= old", NOT_FAR),
        **_names(
            "_masked: adv > 0.0 -> adv >= 0.0 \n _masked: adv < 0.0 -> adv <= 0.0",
            "an advantage of 0 gives no loss, masked or not, and is counted nowhere",
        ),
        **_names(
            "token_loss_kernel: adv > 0.0 -> adv >= 0.0 #2 \n token_loss_kernel: adv < 0.0 -> adv <= 0.0 #2",
            "a masked token has an advantage",
        ),
    },
}


def _algorithm(name: str, tests: str, beyond: tuple[str, ...]) -> Target:
    module = f"megatron_dapo.algorithms.{name}"
    files = tuple(f"tests/unit/test_{test}.py" for test in tests.split())
    return Target(module, torch_survives(module), files, EQUIVALENT[name], beyond)


TARGETS = (
    Target(
        "megatron_dapo.algorithms.estimators",
        passes(advantage_oracle.check_group_estimators),
        ("tests/unit/test_algorithms_rewards.py", "tests/unit/test_estimate_advantages.py"),
    ),
    Target(
        "megatron_dapo.algorithms.gae",
        passes(advantage_oracle.check_token_estimators),
        ("tests/unit/test_algorithms_gae.py", "tests/unit/test_estimate_advantages.py"),
        EQUIVALENT["gae"],
    ),
    _algorithm(
        "policy_loss",
        "token_loss off_policy_loss algorithms_loss",
        ("Clip:", "OffPolicy:", "policy_loss: weighted.detach()"),
    ),
    _algorithm(
        "kl", "algorithms_rewards token_loss", ("AdaptiveKLController:", "_k3: (ref_log_probs - log_probs).clamp")
    ),
    _algorithm("mismatch_sums", "token_loss algorithms_metrics", ()),
    Target(
        "megatron_dapo.algorithms.rollout_correction",
        passes(check_correction),
        tuple(f"tests/unit/test_{name}.py" for name in ("rollout_correction", "off_policy_loss", "loss_config")),
        EQUIVALENT["rollout_correction"],
        (
            "RatioBounds:",
            "RolloutCorrection:",
            "token_importance:",
            "log_difference: 0 -> 1",
            "log_difference: diff.detach()",
        ),
    ),
    _algorithm(
        "dapo_loss",
        "token_loss off_policy_loss algorithms_loss",
        (
            "LossConfig:",
            "TokenBatch:",
            "dapo_loss: loss_sum.detach()",
            "dapo_loss: batch.importance.detach()",
            "dapo_loss: (batch.weights * kl).detach()",
        ),
    ),
    Target(
        "megatron_dapo.kernels.triton_ops.loss_kernel",
        triton_survives,
        ("tests/unit/interpreter/test_token_loss_kernel.py",),
        EQUIVALENT["token_loss"],
        ("_exp_minus_1_minus:",),
    ),
)
