"""The cut of packed segments over context-parallel ranks, by hand;
layout tests compare the results."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_dapo.algorithms.dapo_loss import LossConfig, TokenBatch
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.schema.actor_rollout_ref import MegatronConfig
from megatron_dapo.data.packing import collate
from megatron_dapo.huggingface.spec_reader import model_spec
from megatron_dapo.kernels.fused_head import HeadLoss
from megatron_dapo.models import build, context_parallel
from megatron_dapo.models.build import build_model
from megatron_dapo.models.context_parallel import ContextCut, rank_places
from megatron_dapo.models.log_prob_head import LossTask
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.training.schedule import packed_seq_params
from tests.model_json import MODEL_JSON
from tests.unit.test_packing import make_samples

pytestmark = pytest.mark.unit


class Group:
    """A process group as far as a cut asks, without any traffic."""

    def __init__(self, rank: int, size: int) -> None:
        self.numbers = rank, size

    def rank(self) -> int:
        return self.numbers[0]

    def size(self) -> int:
        return self.numbers[1]


def test_each_rank_has_an_early_and_a_late_chunk_of_every_segment():
    # chunks of 2 tokens: 01|23|45|67, and of 1: 8|9|10|11; rank 0 has the first and the last, rank
    # 1 those between
    assert rank_places((8, 4), 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert rank_places((8, 4), 1, 2).tolist() == [2, 3, 4, 5, 9, 10]
    # three ranks: chunks 0 and 5, 1 and 4, 2 and 3
    assert [rank_places((6,), rank, 3).tolist() for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


def test_a_segment_that_was_not_padded_for_the_cut_is_refused():
    with pytest.raises(AssertionError, match="6 tokens cannot be cut into 4 chunks"):
        rank_places((8, 6), 0, 2)


def test_segments_are_padded_for_the_cut_and_megatron_gets_their_padded_lengths():
    batch = collate(make_samples([5, 4, 2]), pad_multiple=8, segment_multiple=4)
    assert batch.widths == (8, 4, 4) and batch.tokens.size(1) == 16
    packed = packed_seq_params(batch, is_cut=True)
    assert (packed.qkv_format, packed.max_seqlen_q, packed.max_seqlen_kv) == ("thd", 8, 8)
    for offsets in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        assert getattr(packed, offsets).tolist() == [0, 8, 12, 16]
    assert packed_seq_params(batch).cu_seqlens_q_padded is None
    # the samples are found behind the padding of those before them
    assert {i: row.tolist() for i, row in batch.by_sample(batch.tokens).items()} == {
        0: [1000, 1001, 1002, 1003, 1004], 1: [2000, 2001, 2002, 2003], 2: [3000, 3001],
    }  # fmt: skip


def test_the_ranks_parts_together_are_the_row():
    values = torch.arange(16.0)[None]
    cuts = [ContextCut.make((8, 4, 4), Group(rank, 2), torch.device("cpu")) for rank in range(2)]
    parts = torch.cat([cut.part(values)[0] for cut in cuts])
    assert all(torch.equal(parts[cut.order], values[0]) for cut in cuts)


def test_every_counted_token_is_asked_of_one_rank_and_the_count_once():
    batch = collate(make_samples([5, 4, 2]), pad_multiple=8, segment_multiple=4)
    tokens = TokenBatch(
        weights=batch.loss_mask,
        count=batch.loss_mask.sum(),
        advantages=batch.advantages,
        old_log_probs=None,
        ref_log_probs=None,
        rollout_log_probs=batch.rollout_log_probs,
        is_current=batch.loss_mask != 0,
    )
    task = LossTask(batch.targets, batch.counted_rows, 1.0, tokens=tokens, loss=LossConfig())
    asked = [ContextCut.make(batch.widths, Group(rank, 2), torch.device("cpu")).task(task) for rank in range(2)]
    assert [float(part.tokens.count) for part in asked] == [float(batch.loss_mask.sum()), 0.0]
    targets = [part.targets_BS[0, part.counted_rows].tolist() for part in asked]
    assert sorted(sum(targets, [])) == batch.targets[0, batch.counted_rows].sort().values.tolist()
    # of the first sample, tokens 0 1 | 2 3 | 4 . | . .: the last one predicts nothing
    assert targets[0][:2] == [1001, 1002] and targets[1][:2] == [1003, 1004]
    for part in asked:
        assert part.tokens.weights.shape == part.targets_BS.shape == (1, 8)
        assert np.array_equal(np.flatnonzero(part.tokens.weights[0]), part.counted_rows)
    assert task.targets_BS.shape == (1, 16)


def test_a_rank_without_counted_rows_is_not_the_one_that_has_the_count():
    """Of a segment of eight, places 0, 1, 6 and 7 are the first rank's: no answer is in them."""
    (sample,) = make_samples([5])
    batch = collate([sample], pad_multiple=8, segment_multiple=4)
    rows = np.array([2, 3])
    weights = torch.zeros_like(batch.loss_mask)
    weights[0, rows] = 1
    tokens = TokenBatch(
        weights=weights,
        count=weights.sum(),
        advantages=batch.advantages,
        old_log_probs=None,
        ref_log_probs=None,
        rollout_log_probs=batch.rollout_log_probs,
        is_current=weights != 0,
    )
    task = LossTask(batch.targets, rows, 1.0, tokens=tokens, loss=LossConfig())
    asked = [ContextCut.make(batch.widths, Group(rank, 2), torch.device("cpu")).task(task) for rank in range(2)]
    assert [len(part.counted_rows) for part in asked] == [0, 2]
    assert [float(part.tokens.count) for part in asked] == [0.0, 2.0]


def test_the_layers_of_a_micro_batch_share_its_cut():
    first, second = (ContextCut.make((8, 4, 4), Group(0, 2), torch.device("cpu")) for _ in range(2))
    assert first.order is second.order and first.on_device is second.on_device and first.places is second.places
    other = ContextCut.make((8, 4, 4), Group(1, 2), torch.device("cpu"))
    assert not torch.equal(first.on_device, other.on_device)


@pytest.mark.parametrize(("report_stale", "num_gathers"), [(False, 0), (True, 1)])
def test_log_probs_are_put_together_only_for_the_comparison_that_reads_them(monkeypatch, report_stale, num_gathers):
    """For a loss summed by the heads, only every other micro-batch needs two sums over the
    ranks."""
    gathered = []

    def gather(parts: torch.Tensor, part: torch.Tensor, group: Group) -> None:
        gathered.append(part)
        parts.copy_(torch.cat([part, torch.zeros_like(part)]))

    monkeypatch.setattr(context_parallel.dist, "all_gather_into_tensor", gather)
    monkeypatch.setattr(context_parallel.dist, "all_reduce", lambda values, group, op=None: None)
    batch = collate(make_samples([5, 4, 2]), pad_multiple=8, segment_multiple=4)
    cut = ContextCut.make(batch.widths, Group(0, 2), torch.device("cpu"))
    tokens = TokenBatch(batch.loss_mask, batch.loss_mask.sum(), batch.advantages, None, None, batch.advantages, None)
    loss = replace(LossConfig(), report_stale=report_stale)
    asked = LossTask(batch.targets, batch.counted_rows, 1.0, tokens=tokens, loss=loss)
    own_rows = cut.task(asked).counted_rows
    own = torch.arange(1.0, len(own_rows) + 1)
    answer = HeadLoss(torch.zeros(()), own, own, torch.tensor(3.0), torch.zeros(2, 2), torch.zeros(1))
    whole = cut.answer(answer, asked)
    assert len(gathered) == num_gathers and whole.entropy is None
    if report_stale:
        row = torch.zeros(batch.tokens.size(1))
        row[cut.places[own_rows]] = own
        assert torch.equal(whole.log_probs, row[batch.counted_rows])
    else:
        assert whole.log_probs is None


@pytest.fixture(scope="module")
def layout():
    yield replace(ParallelLayout.initialize(), cp=2)
    ParallelLayout.shutdown()


def test_megatron_gets_the_size_and_without_transformer_engine_a_gpu_refuses(layout, monkeypatch):
    assert (layout.segment_multiple, layout.sequence_multiple) == (4, 4)
    assert replace(layout, tp=2, sp=True).sequence_multiple == 8
    spec = model_spec(MODEL_JSON)
    config = build_model(spec, layout, MegatronConfig()).config
    # Megatron's default: p2p
    assert config.context_parallel_size == 2 and config.cp_comm_type is None
    monkeypatch.setattr(build, "is_gpu", lambda: True)
    with pytest.raises(UserError) as error:
        build_model(spec, layout, MegatronConfig())
    (sentence,) = error.value.sentences
    assert "context_parallel_size is 2" in sentence and "Transformer Engine" in sentence
