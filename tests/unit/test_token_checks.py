"""Possible samples of a model: token ids of its vocabulary, float32 log-probs; others are named."""

import asyncio
import gzip
import json
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.rollout_errors import RolloutError
from megatron_dapo.data.samples import RolloutBatch
from megatron_dapo.data.token_arrays import LOG_PROB, TOKEN, token_array
from megatron_dapo.huggingface.spec_reader import read_vocab_size
from megatron_dapo.rollout.batch_files import write_batch
from megatron_dapo.rollout.batch_replay import BatchReplay
from megatron_dapo.rollout.controller import Controller
from megatron_dapo.rollout.token_checks import HIGHEST_LOG_PROB, LOWEST_LOG_PROB, find_fault
from megatron_dapo.storage.run_folder import batch_file
from tests.fake_rollout import WORDS, FakeServer, Script, make_config
from tests.synthetic import synthetic_groups

pytestmark = pytest.mark.unit

VOCABULARY = 64
IMPOSSIBLE = {
    "an id beyond the vocabulary": ((3, 10**6), (-1.0, -1.0), "token id 1000000, outside .* vocabulary of 64"),
    "the first id beyond it": ((3, 64), (-1.0, -1.0), "token id 64"),
    "a negative id": ((-1, 3), (-1.0, -1.0), "token id -1"),
    "an id that is no whole number": ((3, 7.5), (-1.0, -1.0), "token id 7.5, no whole number"),
    "a log-prob of -1e30": ((3, 4), (-1e30, -1.0), "log-prob -1e[+]30"),
    "below what is drawn": ((3, 4), (-1.0, -112.0), "log-prob -112"),
    "above 0": ((3, 4), (-1.0, 0.01), "log-prob 0.01"),
    "NaN": ((3, 4, 5), (-1.0, math.nan, -1.0), "log-prob nan"),
    "infinite": ((3, 4), (-math.inf, -1.0), "log-prob -inf"),
    "none": ((3, 4), (-1.0, None), "log-prob None"),
    "too few": ((3, 4), (-1.0,), "2 tokens, but 1 log-probs"),
}


def fault(tokens, log_probs) -> str | None:
    """As of a server's answer: values that no array can hold are refused when the arrays are
    made."""
    try:
        arrays = token_array(tokens, TOKEN, "token id"), token_array(log_probs, LOG_PROB, "log-prob")
    except ValueError as error:
        return str(error)
    return find_fault(*arrays, VOCABULARY)


@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_a_number_that_cannot_be_is_named(kind):
    tokens, log_probs, words = IMPOSSIBLE[kind]
    assert re.search(words, fault(tokens, log_probs))


@given(
    st.lists(st.tuples(st.integers(0, VOCABULARY - 1), st.floats(LOWEST_LOG_PROB, HIGHEST_LOG_PROB)), max_size=20),
    st.integers(0, 19),
    st.one_of(st.integers(max_value=-1), st.integers(VOCABULARY)),
)
def test_one_wrong_id_is_found_among_any_right_ones(pairs, place, wrong):
    tokens, log_probs = [token for token, _ in pairs], [value for _, value in pairs]
    assert fault(tokens, log_probs) is None
    if pairs:
        tokens[place % len(pairs)] = wrong
        assert f"token id {wrong}," in fault(tokens, log_probs)


@pytest.mark.parametrize("scale", [0.1, 10.0, 100.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_drawn_from_logits_of_any_scale_is_within_the_bounds(scale, dtype):
    """Drawn by softmax in float32, its log-prob by either formula; a certain token and the most
    unlikely ones too."""
    logits = scale * torch.randn(50, 500, generator=torch.Generator().manual_seed(1))
    probabilities = logits.softmax(-1)
    drawn = torch.multinomial(probabilities, 20, replacement=True, generator=torch.Generator().manual_seed(2))
    drawable = probabilities > 0
    by_softmax = logits.log_softmax(-1).to(dtype).float()
    by_difference = logits - logits.logsumexp(-1, keepdim=True)
    for log_probs in (by_softmax, by_difference):
        for values in (log_probs.gather(-1, drawn), log_probs[drawable]):
            values = values.flatten().tolist()
            assert fault([3] * len(values), values) is None


def replayed(tmp_path, **changes):
    """A batch with the second group's third sample changed in the file."""
    write_batch(tmp_path, 3, RolloutBatch(tuple(synthetic_groups(VOCABULARY)), {}))
    path = batch_file(tmp_path, 3)
    batch = json.loads(gzip.decompress(path.read_bytes()))
    batch["groups"][1]["samples"][2] |= changes
    path.write_bytes(gzip.compress(json.dumps(batch).encode()))
    return BatchReplay(tmp_path, VOCABULARY).next_batch(3, 2)


@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_a_batch_with_a_number_that_cannot_be_is_named_with_the_sample(tmp_path, kind):
    tokens, log_probs, words = IMPOSSIBLE[kind]
    per_token = {"loss_mask": (1,) * len(tokens), "weight_versions": (0,) * len(tokens)}
    with pytest.raises(UserError, match=words) as caught:
        replayed(tmp_path, response_tokens=tokens, rollout_log_probs=log_probs, **per_token)
    assert str(batch_file(tmp_path, 3)) in str(caught.value) and "group group1, sample 3 has" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_tokens": (3, 99)}, "token id 99"),
        ({"reward": math.nan}, "reward nan"),
        ({"raw_reward": math.inf}, "before shaping inf"),
        ({"loss_mask": ()}, "tokens in its response, loss mask and weight versions"),
    ],
)
def test_the_other_numbers_of_a_batch_are_looked_at_too(tmp_path, changes, words):
    with pytest.raises(UserError, match=f"group group1, sample 3 has .*{words}"):
        replayed(tmp_path, **changes)


class Nonsense(FakeServer):
    """Answers with a log-prob that no token has."""

    def _answer(self, fields, aborted):
        answer = super()._answer(fields, aborted)
        answer["meta_info"]["output_token_logprobs"][0][0] = -1e30
        return answer


def first_batch(folder, *kinds):
    async def scenario():
        servers = [await kind(Script()).start() for kind in kinds]
        controller = Controller(make_config(folder, servers, "actor_rollout_ref.rollout.max_retries=2"))
        try:
            await controller.start()
            return servers, await controller.next_batch(1, 1)
        except RolloutError as error:
            return servers, error
        finally:
            await controller.close()
            for server in servers:
                await server.stop()

    return asyncio.run(scenario())


def test_an_answer_that_cannot_be_is_asked_for_again_at_another_server(folder):
    servers, batch = first_batch(folder, Nonsense, FakeServer)
    assert len(batch.groups) == 4 and batch.metrics["rollout/num_retries"] == len(servers[0].requests) > 0
    log_probs = {value for group in batch.groups for each in group.samples for value in each.rollout_log_probs}
    assert log_probs == {-0.5}


def test_where_every_server_answers_nonsense_the_rollout_ends_and_names_one(folder):
    (server,), error = first_batch(folder, Nonsense)
    assert f"failed 3 times: {server.url}: its answer has the log-prob -1e+30" in str(error)
    assert len(server.requests) <= 3 * 8


def test_the_vocabulary_is_the_models(folder, tmp_path):
    assert read_vocab_size(folder) == len(WORDS)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config\.json has no vocab_size"):
        read_vocab_size(tmp_path)
