"""A key's package.module:attribute is looked up in the source files, and nothing of them runs."""

import pytest

from megatron_dapo.checks.known_mistakes import known_mistakes
from megatron_dapo.checks.machine_checks import MACHINE_CHECKS
from megatron_dapo.checks.run_checks import validate
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.import_path import fault_without_import
from megatron_dapo.config.loader import load_config

pytestmark = pytest.mark.unit

LOSS = "actor_rollout_ref.actor.loss_function"
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
ENDS = "raise SystemExit('this ran')\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of a run's start, with code that ends any process running it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_pkg").mkdir()
    (tmp_path / "own_pkg" / "__init__.py").write_text(f"import absent_package\n{ENDS}")
    (tmp_path / "own_pkg" / "scorers.py").write_text(f"import absent_package\n{ENDS}def score(sequences): ...\n")
    (tmp_path / "own_pkg" / "inner_dir").mkdir()
    (tmp_path / "own_pkg" / "inner_dir" / "scorers.py").write_text("def score(): ...\n")
    (tmp_path / "own_dir").mkdir()
    (tmp_path / "own_dir" / "scorers.py").write_text("def score(): ...\n")
    return tmp_path


@pytest.mark.parametrize(
    "binding",
    [
        "def score(): ...",
        "async def score(): ...",
        "class score: ...",
        "score = print",
        "(other, [*score]) = 1, [2]",
        "score: object = print",
        "import os.path as score",
        "from os.path import join as score",
        "try:\n    from fast import score\nexcept ImportError:\n    score = None",
        "if True:\n    for score in (): ...",
        "with open('x') as score: ...",
        "print(score := 1)",
    ],
)
def test_a_name_that_the_top_level_binds_is_there(folder, binding):
    (folder / "own.py").write_text(f"{ENDS}{binding}\n")
    assert fault_without_import("own:score") is None
    assert "defines no scored" in fault_without_import("own:scored")
    assert "nearest is score." in fault_without_import("own:scored")


@pytest.mark.parametrize(
    "source", ["def f():\n    score = 1", "class C:\n    def score(self): ...", "print(score)", ""]
)
def test_a_name_bound_elsewhere_or_only_read_is_not(folder, source):
    (folder / "own.py").write_text(source)
    assert "the module own defines no score;" in fault_without_import("own:score")


@pytest.mark.parametrize(
    "source",
    [
        "from os.path import *",
        "def __getattr__(name): ...",
        "globals()['score'] = 1",
        "def f():\n    global score\n    score = 1",
        "import sys\nsys.modules[__name__] = object()",
        "exec('score = 1')",
    ],
)
def test_where_only_running_it_would_tell_nothing_is_said(folder, source):
    (folder / "own.py").write_text(source)
    assert fault_without_import("own:score") is None


def test_a_package_is_searched_without_running_it(folder):
    assert fault_without_import("own_pkg.scorers:score") is None
    assert fault_without_import("own_dir.scorers:score") is None
    assert fault_without_import("own_pkg.inner_dir.scorers:score") is None
    assert "the module own_pkg.score is not found" in fault_without_import("own_pkg.score:score")
    assert "the module own_pkg.scorers.deep is not found" in fault_without_import("own_pkg.scorers.deep:score")
    assert "the module absent is not found" in fault_without_import("absent.scorers:score")
    assert "the module own_dir defines no score;" in fault_without_import("own_dir:score")
    (folder / "own_pkg" / "__init__.py").write_text("__path__.append('/elsewhere')")
    assert fault_without_import("own_pkg.elsewhere:score") is None


def test_invalid_python_is_a_fault_but_missing_source_is_not(folder):
    (folder / "own.py").write_text("x = 1\ndef score(:\n")
    assert (
        fault_without_import("own:score")
        == "but the module own is not Python: invalid syntax (own, line 2); correct it."
    )
    for content in (b"\xff", b"\0"):
        (folder / "own.py").write_bytes(content)
        assert "the module own is not Python: " in fault_without_import("own:score")
    assert fault_without_import("math:no_such_function") is None


@pytest.mark.parametrize(
    ("key", "switches"),
    [
        (LOSS, []),
        ("reward.function", []),
        (f"{MULTI_TURN}.environment", [f"{MULTI_TURN}.enable=true"]),
    ],
)
def test_validation_names_key_value_and_cure(key, switches):
    def sentences(path):
        with pytest.raises(UserError) as caught:
            validate(load_config(None, [f"{key}={path}", *switches]), None)
        return [sentence for sentence in caught.value.sentences if sentence.startswith(f"{key} ")]

    assert sentences("own_pkg.scorers:score") == []
    (sentence,) = sentences("own_pkg.scorers:scroe")
    assert sentence == (
        f"{key} is own_pkg.scorers:scroe, but the module own_pkg.scorers defines no scroe; correct the name, "
        f"the nearest is score."
    )
    (sentence,) = sentences("own_pkg.scoers:score")
    assert "the module own_pkg.scoers is not found" in sentence


def test_a_replayed_run_needs_neither_reward_nor_environment():
    switches = ["reward.function=absent:score", f"{MULTI_TURN}.enable=true", f"{MULTI_TURN}.environment=absent:Env"]

    def keys(*overrides):
        config = load_config(None, [*switches, *overrides])
        return {text.partition(" is ")[0] for text in known_mistakes(MACHINE_CHECKS, config) if "absent" in text}

    assert keys() == {"reward.function", f"{MULTI_TURN}.environment"}
    assert keys("trainer.replay=batches") == set()
