"""The reward function `code_tests`: runs a response's program on the tests of the ground truth, in
a sandbox."""

import time

from megatron_dapo.rewards.code.cases import Case, program, read_cases
from megatron_dapo.rewards.code.sandbox import SETTINGS, Sandbox, SandboxLost


def code_tests(
    data_source: str,
    response: str,
    ground_truth: str,
    extra_info: dict,
    *,
    partial_credit: bool = False,
    time_limit_s: float = 2.0,
    memory_limit_mb: int = 512,
) -> dict[str, float | bool]:
    """Return 1 if the program passes all tests, else 0.

    Args:
        partial_credit: return the share of passed tests instead, like verl's `continuous`.
        time_limit_s: of one test; all together have four fifths of reward.timeout_s, and unfinished
            ones fail.
        memory_limit_mb: of each of the program's processes.

    Raises:
        ValueError: for a ground truth without tests.
        UserError: if no sandbox can be made.
    """
    cases = read_cases(ground_truth)
    deadline = time.monotonic() + SETTINGS.time_limit_s
    try:
        with Sandbox(SETTINGS.choose(), program(response), memory_limit_mb, deadline) as sandbox:
            num_passed = _count_passed(sandbox, cases, time_limit_s, until_one_fails=not partial_credit)
    except (SandboxLost, TimeoutError):  # before the first test: a sandbox that starts too late
        num_passed = 0
    correct = num_passed == len(cases)
    return {"score": num_passed / len(cases) if partial_credit else float(correct), "correct": correct}


def _count_passed(sandbox: Sandbox, cases: list[Case], time_limit_s: float, until_one_fails: bool) -> int:
    num_passed = 0
    for case in cases:
        try:
            output = sandbox.run(case.request | {"time_limit_s": time_limit_s})
        except (SandboxLost, TimeoutError):  # the program ended its sandbox, or the time is over
            break
        passed = output is not None and case.passes(output)
        num_passed += passed
        if until_one_fails and not passed:
            break
    return num_passed
