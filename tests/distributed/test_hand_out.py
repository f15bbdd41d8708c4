"""A step goes from rank 0 to the other ranks once per data-parallel rank."""

from pathlib import Path

import pytest
import torch

from tests.distributed.hand_out_worker import LAYOUTS, part_of
from tests.forked_ranks import run_ranks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, tuple[list[dict], list]]:
    out = tmp_path_factory.mktemp("hand_out") / "answers.pt"
    run_ranks(Path(__file__).with_name("hand_out_worker.py"), 4, str(out))
    return torch.load(out, weights_only=False)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_gets_the_part_of_its_data_parallel_rank_sent_once(answers, name):
    ranks, replicas = answers[name]
    for rank in ranks:
        assert rank["got"] == part_of(rank["coordinates"].dp).tolist()
    num_sent = [rank["num_sent"] for rank in ranks]
    assert num_sent == [sum(len(part_of(dp_rank)) for dp_rank in range(1, len(replicas))), 0, 0, 0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_ranks_that_hold_a_model_together_have_one_data_parallel_rank(answers, name):
    ranks, replicas = answers[name]
    of_dp = [tuple(i for i, rank in enumerate(ranks) if rank["coordinates"].dp == dp) for dp in range(len(replicas))]
    assert [tuple(each) for each in replicas] == of_dp


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_batch_that_rank_0_cannot_cut_is_the_same_error_on_all_ranks(answers, name):
    ranks, _ = answers[name]
    refused = ranks[0]["refused"]
    assert [rank["refused"] for rank in ranks] == [refused] * 4
    kind, sentence = refused
    assert kind == "SharedUserError"
    assert "does not fit into actor_rollout_ref.actor.max_tokens_per_microbatch=8: raise it to at least" in sentence
