"""What several unit tests share: the ranks of one process, a small model, a folder of a rollout."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def layout() -> Iterator:
    """The ranks of one process; imported here, since most tests need no Megatron-core."""
    from megatron_dapo.platform.parallel import ParallelLayout

    yield ParallelLayout.initialize()
    ParallelLayout.shutdown()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny_models import make_tiny

    return make_tiny(tmp_path_factory.mktemp("tiny"), "qwen3", layers=2, hidden=32, heads=4)


@pytest.fixture
def short_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan's step is simulated with some of its requests: its time is another, and found at once."""
    monkeypatch.setattr("megatron_dapo.commands.plan.step_time.SIMULATED_REQUESTS", 200)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """For a controller and scripted servers: prompts and importable rewards, with short waits."""
    from tests.fake_rollout import rollout_folder

    yield from rollout_folder(tmp_path, monkeypatch)
