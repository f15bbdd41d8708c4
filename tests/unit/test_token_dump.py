"""Token records of the responses shown to people."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from examples.arithmetic.problems import BASE
from megatron_dapo.config.loader import load_config
from megatron_dapo.data.batching import assemble
from megatron_dapo.data.packing import collate
from megatron_dapo.data.token_dump import TokenDump, TokenTexts
from megatron_dapo.data.tokenizer import load_tokenizer
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.training.distribute import StepShard
from megatron_dapo.training.token_dumps import TokenDumps
from tests.synthetic import synthetic_groups, with_branches

pytestmark = pytest.mark.unit


@pytest.fixture
def groups():
    return synthetic_groups(14, num_groups=3, n=2)


def micro_batches(groups, packed: bool, filter_truncated: bool = False) -> list[list]:
    """Two mini-batches; the trainer's log-probs are the server's and a hundredth of the sample's
    number on top."""
    samples = assemble(groups, estimator="grpo", normalize_by_std=True, filter_truncated=filter_truncated)
    batches = [collate(part, packed=packed, pad_multiple=4) for part in (samples[3:], samples[:3])]
    scored = []
    for batch in batches:
        above = batch.from_samples(
            {
                i: batch.rollout_log_probs.new_full((length,), i / 100)
                for i, length in zip(batch.sample_ids, batch.lengths, strict=True)
            }
        )
        scored.append([batch.with_log_probs(old=batch.rollout_log_probs + above)])
    return scored


class OneRank(SimpleNamespace):
    rank, is_last_stage, counts_tokens = 0, True, True

    def gather(self, value):
        return [value]

    def collect(self, own, senders):
        assert list(senders) == [0]
        return [own]


def written(folder, groups, mini_batches, num_groups: int = 2) -> TokenDump | None:
    keys = [f"actor_rollout_ref.rollout.dump_samples={num_groups}", "actor_rollout_ref.rollout.n=2"]
    config = load_config(None, [f"actor_rollout_ref.model.path={BASE}", *keys])
    run = RunFolder(folder)
    num_shown = sum(len(sample.branches) for group in groups[:num_groups] for sample in group.samples)
    TokenDumps(config, OneRank(), run).write(1, groups, StepShard(mini_batches, {}, num_shown=num_shown))
    return TokenDump.read(run.rollout_tokens(1))


@pytest.mark.parametrize("packed", [True, False])
def test_each_token_of_a_kept_response_has_the_trainers_values(tmp_path, groups, packed):
    dump = written(tmp_path, groups, micro_batches(groups, packed))
    samples = [sample for group in groups[:2] for sample in group.samples]
    advantages = {
        i: t.advantage
        for i, t in enumerate(assemble(groups, estimator="grpo", normalize_by_std=True, filter_truncated=False))
    }
    assert dump.lengths.tolist() == [sample.num_response_tokens for sample in samples]
    assert dump.tokens.tolist() == [token for sample in samples for token in sample.response_tokens]
    start = 0
    for number, sample in enumerate(samples):
        part, start = slice(start, start + sample.num_response_tokens), start + sample.num_response_tokens
        own = sample.loss_mask == 1
        assert np.array_equal(dump.loss_mask[part], sample.loss_mask)
        # float16 has 11 bits; the server's own log-probs, near -4.5, lie in float32
        np.testing.assert_allclose(dump.rollout_log_probs[part], sample.rollout_log_probs, rtol=2**-11)
        np.testing.assert_allclose(dump.log_prob_diffs[part][own], number / 100, atol=1e-5, rtol=2**-11)
        np.testing.assert_allclose(dump.advantages[part][own], advantages[number], rtol=2**-10)
        assert np.isnan(dump.advantages[part][~own]).all() and np.isnan(dump.log_prob_diffs[part][~own]).all()


def test_every_branch_of_a_kept_trajectory_has_its_own_values(tmp_path, groups):
    """Two groups of trajectories with branches; a token's values stand where it counts."""
    groups = with_branches(groups)
    dump = written(tmp_path, groups, micro_batches(groups, packed=True))
    rows = [row for group in groups[:2] for sample in group.samples for row in sample.branches]
    assert len(rows) > 4 and dump.lengths.tolist() == [len(row.response_tokens) for row in rows]
    advantages = [row.advantage for row in assemble(groups)]
    ends = np.cumsum(dump.lengths)
    for number, (row, end) in enumerate(zip(rows, ends, strict=True)):
        part, own = slice(end - len(row.response_tokens), end), row.loss_mask == 1
        assert np.array_equal(dump.tokens[part], row.response_tokens)
        np.testing.assert_allclose(dump.log_prob_diffs[part][own], number / 100, atol=1e-5, rtol=2**-11)
        np.testing.assert_allclose(dump.advantages[part][own], advantages[number], rtol=2**-10)
        assert np.isnan(dump.advantages[part][~own]).all() and np.isnan(dump.log_prob_diffs[part][~own]).all()


def test_without_log_probs_before_the_update_there_is_no_difference(tmp_path, groups):
    scored = micro_batches(groups, packed=True)
    bare = [[replace(batch, old_log_probs=None) for batch in batches] for batches in scored]
    dump = written(tmp_path, groups, bare)
    assert np.isnan(dump.log_prob_diffs).all() and not np.isnan(dump.advantages).all()


def test_a_run_that_keeps_no_groups_writes_nothing(tmp_path, groups):
    assert written(tmp_path, groups, micro_batches(groups, packed=True), num_groups=0) is None
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_ends_no_run(tmp_path, groups, caplog):
    (tmp_path / "rollouts").write_text("in the way")
    assert written(tmp_path, groups, micro_batches(groups, packed=True)) is None
    assert "the tokens of step 1 cannot be written" in caplog.text


def test_a_damaged_file_counts_as_none(tmp_path, groups):
    written(tmp_path, groups, micro_batches(groups, packed=True))
    path = RunFolder(tmp_path).rollout_tokens(1)
    content = path.read_bytes()
    for cut in (0, 1, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:cut])
        assert TokenDump.read(path) is None


def test_flipped_bytes_raise_nothing(tmp_path, groups):
    """Of a file of a few kB: heads of the zip's members and of its directory,
    with most bytes meaningful."""
    written(tmp_path, groups, micro_batches(groups, packed=True))
    path = RunFolder(tmp_path).rollout_tokens(1)
    content = path.read_bytes()
    starts = [at for at in range(len(content)) if content[at : at + 2] == b"PK"]
    for start in (starts[0], starts[1], starts[len(starts) // 2], starts[-2], starts[-1]):
        for at in range(start, min(start + 60, len(content))):
            path.write_bytes(content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :])
            TokenDump.read(path)


def test_a_cut_response_that_training_leaves_out_has_neither_advantage_nor_difference(tmp_path, groups):
    cut, whole = groups[0].samples[:2]
    first = replace(groups[0], samples=[replace(cut, is_truncated=True), replace(whole, is_truncated=False)])
    groups = [first, *groups[1:]]
    mini_batches = micro_batches(groups, packed=True, filter_truncated=True)
    for batches in mini_batches:
        for number, batch in enumerate(batches):  # as scoring leaves rows that do not count
            batches[number] = replace(batch, old_log_probs=batch.old_log_probs * batch.loss_mask)
    dump = written(tmp_path, groups, mini_batches)
    part = slice(0, cut.num_response_tokens)
    assert np.isnan(dump.log_prob_diffs[part]).all() and np.isnan(dump.advantages[part]).all()
    assert not np.isnan(dump.advantages[part.stop :][dump.loss_mask[part.stop :] == 1]).all()


def test_the_texts_of_tokens_joined_are_the_text():
    tokenizer = load_tokenizer(BASE)
    tokens, _ = tokenizer.encode_prompt("45+38=83 well let me see", False)
    texts = TokenTexts(tokenizer).of(np.array(tokens))
    assert "".join(texts[token] for token in tokens) == tokenizer.decode(tokens, skip_special_tokens=False)


class DropsFirstSpace:
    """As SentencePiece: the space that begins a text is not in it."""

    def decode(self, tokens, skip_special_tokens):
        return "".join({1: " a", 2: "b"}[token] for token in tokens).removeprefix(" ")


def test_a_token_keeps_its_space_even_if_the_tokenizer_drops_a_texts_first():
    assert TokenTexts(DropsFirstSpace()).of(np.array([1, 2, 1])) == {1: " a", 2: "b"}
