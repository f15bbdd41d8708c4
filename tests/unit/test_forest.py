"""Forests of answers: branches, counted tokens and seeds, by hand and over random forests."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.agents.forest import Forest, Node, up_to_stop
from megatron_dapo.servers.client import Generation

pytestmark = pytest.mark.unit


def generation(*tokens: int, version: int = 1, experts: tuple[int, ...] = ()) -> Generation:
    """An answer; the log-prob of token t is -t / 100, exact enough to tell tokens apart."""
    log_probs = tuple(-token / 100 for token in tokens)
    versions = (version,) * len(tokens)
    return Generation(tokens, log_probs, "stop", versions, servers=("u",), routed_experts=experts)


def add(forest: Forest, parent: int | None, suffix, answer: Generation, request: int, choice: int = 0) -> int:
    seed = forest.next_seed(parent, suffix)
    return forest.add(Node(parent, np.array(suffix, np.int32), answer, seed, request, choice))


def rows(forest: Forest, delivered=None) -> list[tuple]:
    kept, _ = forest.kept(range(len(forest.nodes)) if delivered is None else delivered)
    return [
        (branch.prompt_tokens.tolist(), branch.response_tokens.tolist(), branch.loss_mask.tolist())
        for branch in forest.branches(kept)
    ]


def test_a_conversation_that_goes_on_is_one_branch():
    forest = Forest(1)
    first = add(forest, None, [1, 2], generation(10, 11, version=3), 0)
    add(forest, first, [5], generation(12, version=4), 1)
    ((branch, *none),) = [forest.branches([0, 1])]
    assert not none
    assert branch.prompt_tokens.tolist() == [1, 2] and branch.response_tokens.tolist() == [10, 11, 5, 12]
    assert branch.loss_mask.tolist() == [1, 1, 0, 1] and branch.weight_versions.tolist() == [3, 3, 3, 4]
    assert np.allclose(branch.rollout_log_probs, [-0.1, -0.11, 0.0, -0.12])
    assert forest.tokens(1).tolist() == [1, 2, 10, 11, 5, 12] and forest.tokens(None).tolist() == []


def test_an_answer_in_two_branches_counts_in_the_earliest():
    forest = Forest(1)
    root = add(forest, None, [1], generation(10), 0)
    add(forest, root, [6], generation(30), 2)  # was there first, asked last
    add(forest, root, [5], generation(20), 1)
    assert rows(forest) == [([1], [10, 5, 20], [1, 0, 1]), ([1], [10, 6, 30], [0, 0, 1])]


def test_the_choices_of_one_request_are_no_twins():
    forest = Forest(1)
    for choice, token in enumerate((10, 11, 12)):
        add(forest, None, [1], generation(token), 0, choice)
    assert rows(forest) == [([1], [token], [1]) for token in (10, 11, 12)]


def test_the_last_branch_is_that_of_the_last_request():
    """A sub-agent in between has roots of its own; the main conversation ends the trajectory."""
    forest = Forest(1)
    main = add(forest, None, [1], generation(10), 0)
    add(forest, None, [2], generation(20), 1)
    add(forest, main, [3], generation(11), 2)
    assert rows(forest) == [([2], [20], [1]), ([1], [10, 3, 11], [1, 0, 1])]


def test_an_answer_asked_for_again_is_left_out_unless_the_agent_went_on_from_it():
    forest = Forest(1)
    dropped = add(forest, None, [1], generation(10, 11, 12), 0)
    used = add(forest, None, [1], generation(20), 1)
    add(forest, used, [5], generation(21), 2)
    last = add(forest, None, [1], generation(30), 3)
    kept, left_out = forest.kept([dropped, used, 2, last])
    assert kept == [used, 2, last] and left_out == {"tokens_undelivered": 0, "tokens_twins": 3}
    assert rows(forest) == [([1], [20, 5, 21], [1, 0, 1]), ([1], [30], [1])]


def test_an_undelivered_answer_is_left_out_unless_one_stands_behind_it():
    forest = Forest(1)
    add(forest, None, [1], generation(10, 11), 0)
    cut = add(forest, None, [2], generation(20), 1)
    behind = add(forest, cut, [3], generation(21), 2)
    kept, left_out = forest.kept([behind])
    assert kept == [cut, behind] and left_out == {"tokens_undelivered": 2, "tokens_twins": 0}
    assert forest.kept([]) == ([], {"tokens_undelivered": 4, "tokens_twins": 0}) and forest.branches([]) == []


def test_an_undelivered_repetition_does_not_push_out_the_delivered_answer():
    forest = Forest(1)
    first = add(forest, None, [1], generation(10), 0)
    add(forest, None, [1], generation(20), 1)
    assert forest.kept([first]) == ([first], {"tokens_undelivered": 1, "tokens_twins": 0})


def test_a_branch_has_the_experts_of_its_own_path():
    forest = Forest(1)
    root = add(forest, None, [1, 2], generation(10, experts=(1, 2)), 0)  # a number per token but the last
    add(forest, root, [5], generation(20, experts=(3, 4)), 1)
    add(forest, root, [6], generation(30, experts=(5, 6)), 2)
    first, second = forest.branches([0, 1, 2])
    assert (first.routed_experts.tolist(), second.routed_experts.tolist()) == ([1, 2, 3, 4], [1, 2, 5, 6])


def test_seeds_do_not_depend_on_the_order_of_different_questions():
    questions = [(None, [1, 2]), (None, [3]), (None, [3]), (None, [1, 2, 3])]
    forward, backward = Forest(7, "uid", 0), Forest(7, "uid", 0)
    seeds = [forward.next_seed(*question) for question in questions]
    turned = [backward.next_seed(*question) for question in reversed(questions)][::-1]
    assert len({*seeds}) == 4  # equal questions have different seeds
    assert sorted(seeds) == sorted(turned) and (seeds[0], seeds[3]) == (turned[0], turned[3])
    assert not {*seeds} & {Forest(7, "uid", 1).next_seed(*question) for question in questions}


def test_the_seed_of_a_later_answer_follows_from_its_path():
    def last_seed(first: int) -> int:
        forest = Forest(1)
        for token in (first, 10):
            add(forest, None, [token], generation(50), token)
        return forest.next_seed(0, [4])

    assert last_seed(1) == last_seed(1) != last_seed(2)


@st.composite
def forests(draw):
    """A forest with its delivered answers; each token is written once, and knows its answer."""
    forest, written = Forest(0), 0
    for request in range(draw(st.integers(0, 8))):
        parent = draw(st.sampled_from([None, *range(len(forest.nodes))]))
        suffix = [draw(st.sampled_from([1, 2]))]
        for choice in range(draw(st.integers(1, 2))):
            length = draw(st.integers(1, 3))
            tokens = tuple(range(100 + written, 100 + written + length))
            written += length
            add(forest, parent, suffix, generation(*tokens), request, choice)
    delivered = draw(st.sets(st.sampled_from(range(len(forest.nodes))))) if forest.nodes else set()
    return forest, delivered


@given(forests())
def test_each_written_token_counts_in_one_row_or_in_a_named_number(case):
    forest, delivered = case
    kept, left_out = forest.kept(delivered)
    branches = forest.branches(kept)
    counted = Counter(
        token
        for branch in branches
        for token, counts in zip(branch.response_tokens.tolist(), branch.loss_mask, strict=True)
        if counts
    )
    assert all(number == 1 for number in counted.values())
    num_written = sum(len(node.generation.tokens) for node in forest.nodes)
    assert len(counted) + sum(left_out.values()) == num_written
    for branch in branches:
        lengths = {len(branch.loss_mask), len(branch.rollout_log_probs), len(branch.weight_versions)}
        assert lengths == {len(branch.response_tokens)} and branch.loss_mask[-1] == 1
        is_written = branch.response_tokens >= 100  # prompts and suffixes are 1 and 2
        assert not branch.loss_mask[~is_written].any()
        assert np.allclose(branch.rollout_log_probs, np.where(is_written, -branch.response_tokens / 100, 0.0))


@given(forests(), st.randoms())
def test_branches_do_not_depend_on_the_order_in_which_answers_end(case, random):
    forest, _ = case
    order = list(range(len(forest.nodes)))
    random.shuffle(order)
    order.sort(key=lambda number: len(forest.path(number)))  # a parent ends before its child begins
    turned = Forest(0)
    new = {number: place for place, number in enumerate(order)}
    for number in order:
        node = forest.nodes[number]
        parent = None if node.parent is None else new[node.parent]
        turned.add(Node(parent, node.suffix, node.generation, node.seed, node.request, node.choice))
    assert rows(turned) == rows(forest)


def words(tokens, skip_special_tokens):
    return " ".join(map(str, tokens.tolist()))


def test_an_answer_of_several_servers_ends_at_its_first_stop_text():
    """The stop text `1 2` lies over the border of the parts, which no server could see."""
    tokens = (5, 1, 2, 3, 1, 2, 7)
    experts = np.arange(2 * (4 + 7 - 1), dtype=np.uint8)  # two per token, of four tokens read before
    whole = Generation(tokens, (-0.5,) * 7, "length", (1,) * 7, routed_experts=experts)
    cut = up_to_stop(whole, ("9", "1 2"), 4, words)
    assert cut.tokens.tolist() == [5, 1, 2] and cut.finish_reason == "stop"
    assert len(cut.log_probs) == len(cut.weight_versions) == 3
    assert cut.routed_experts.tolist() == list(range(2 * (4 + 3 - 1)))
    assert up_to_stop(whole, ("9",), 4, words) is whole
