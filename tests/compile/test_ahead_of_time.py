"""Every Triton kernel compiles for absent GPUs, with its planned instructions and no spills.

The numbers are compared with ahead_of_time.json, so that a regression shows in a change of that
file; tests/ahead_of_time.py writes it anew.
"""

import json

import pytest
from triton.compiler import CompilationError

from tests.ahead_of_time import CASES, COMPILED, SHARED_MEMORY, TABLE, Compiled, compile_case, key, tools
from tests.token_loss_oracle import declaring

pytestmark = pytest.mark.compile


def check_what_must_hold(architecture: str, kernel: str, compiled: Compiled) -> None:
    """With any version of the compiler."""
    assert compiled.spilled == 0
    assert compiled.registers <= 255 and compiled.shared <= SHARED_MEMORY[architecture]
    if kernel != "token_loss_kernel":  # reads little, at addresses that are not known to be aligned
        assert compiled.wide_loads > 0
    if kernel == "row_gradient_kernel":
        assert compiled.wide_stores > 0


@pytest.mark.parametrize(("architecture", "name"), COMPILED)
def test_production_launches_compile_without_spills(architecture, name):
    committed = json.loads(TABLE.read_text())
    assert committed["tools"] == tools(), "another compiler gives out other registers: write the table anew"
    for kernel, compiled in compile_case(architecture, name).items():
        check_what_must_hold(architecture, kernel, compiled)
        assert compiled.as_row() == committed[key(architecture, name, kernel)]


def test_the_table_has_the_kernels_that_are_compiled_and_no_others():
    rows = [row.rpartition(": ") for row in json.loads(TABLE.read_text()) if row != "tools"]
    assert {case for case, _, _ in rows} == {f"{architecture}: {name}" for architecture, name in COMPILED}
    assert {name for architecture, name in COMPILED if architecture == "sm_90"} == set(CASES)


@pytest.mark.parametrize(("kind", "name"), [("sums", "actor/ratio_mean"), ("maxima", "actor/ratio_max")])
def test_the_token_loss_does_not_compile_with_a_metric_that_nobody_declares(kind, name):
    def without_it(result):
        return result._replace(**{kind: {key: value for key, value in getattr(result, kind).items() if key != name}})

    with declaring(without_it), pytest.raises(CompilationError) as refused:
        compile_case("sm_90", "token loss")
    inner = refused.value.__cause__  # the outer error shows only the kernel's line
    assert str(inner).endswith(f"\nthe loss kernel stores {name}, which dapo_loss does not declare with this config")
