"""The benchmark beside TRL: CPU time of whole process trees, between the right steps, by part."""

import pytest

from benchmarks.bench_trl import (
    CASES,
    our_overrides,
)
from examples.arithmetic.problems import write_files
from examples.demo_run import config_path, prompt_files
from megatron_dapo.checks.run_checks import load_and_validate

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_makes_the_demo_equal_to_trls_run_is_a_valid_config(case, tmp_path):
    overrides = our_overrides(case, "examples/arithmetic/base", tmp_path)
    config = load_and_validate(
        str(config_path("demo.yaml")), [*overrides, *prompt_files(*write_files(tmp_path / "prompts"))]
    )
    assert config.trainer.total_training_steps == case.num_steps > case.warm_up
    assert not config.algorithm.dynamic_sampling.enable
