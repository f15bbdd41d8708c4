"""Tests on a CUDA GPU, skipped without one. `make test-gpu`, or with only torch, triton,
numpy and pytest

python -m pytest -c tests/gpu/pytest.ini tests/gpu
"""

import os

import pytest

from megatron_dapo.common.child_environment import set_rank_defaults

# before torch and Transformer Engine are imported, as in a rank: one cuDNN for both
set_rank_defaults(os.environ)

import torch  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("gpu")
        needed = marker.kwargs.get("count", 1) if marker else 0
        if needed > torch.cuda.device_count():
            item.add_marker(pytest.mark.skip(reason=f"{needed} CUDA GPU(s) needed, {torch.cuda.device_count()} here"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", 0)
