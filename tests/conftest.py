"""Settings of every test: one thread per process, no network, unhurried property tests."""

import os

from megatron_dapo.child_environment import ONE_THREAD

# before torch and transformers are imported, by this process and by those that tests start
os.environ.update(ONE_THREAD)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from tests.helpers import free_port as find_free_port  # noqa: E402

torch.set_num_threads(1)
# no deadline: the first call of many functions imports, and the machine may be busy
hypothesis.settings.register_profile("megatron_dapo", deadline=None, max_examples=50, print_blob=True)
hypothesis.settings.load_profile("megatron_dapo")


@pytest.fixture
def free_port() -> int:
    return find_free_port()
