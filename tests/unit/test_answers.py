"""avg@n, pass@k, maj@n and their intervals, against implementations that share nothing with
ours."""

import statistics
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.algorithms.answer_metrics import Estimate, estimates, majority, pass_at_k, pass_ks, scores

pytestmark = pytest.mark.unit

SMALL = settings(max_examples=60, deadline=None)
TABLE = st.lists(st.tuples(st.sampled_from(["1", "2", "3", "7", None]), st.booleans()), min_size=1, max_size=10)


def share_of_subsets_with_a_right_answer(right: list[bool], k: int) -> Fraction:
    """pass@k by its definition: every choice of k of the answers."""
    chosen = list(combinations(right, k))
    return Fraction(sum(any(some) for some in chosen), len(chosen))


def published_estimator(n: int, c: int, k: int) -> float:
    """As Chen et al. 2021 print it (figure 3 of arXiv 2107.03374)."""
    if n - c < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def share_of_draws_that_are_right(table: list[tuple[str | None, bool]]) -> Fraction:
    """maj@n as a game: draw one of the modes, then one of the answers that gave it."""
    given_answers = [vote for vote, _ in table if vote is not None]
    if not given_answers:
        return Fraction(0)
    modes = statistics.multimode(given_answers)
    total = Fraction(0)
    for mode in modes:
        verdicts = [is_right for vote, is_right in table if vote == mode]
        total += Fraction(sum(verdicts), len(verdicts)) / len(modes)
    return total


@SMALL
@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_answers(right, data):
    k = data.draw(st.integers(1, len(right)))
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(float(share_of_subsets_with_a_right_answer(right, k)))


@SMALL
@given(st.integers(1, 300), st.data())
def test_pass_at_k_is_the_published_estimator_of_any_size(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    assert pass_at_k(n, c, k) == pytest.approx(published_estimator(n, c, k), rel=1e-10, abs=1e-12)


def test_pass_at_k_is_reported_for_1_4_8_and_so_on_to_n():
    assert [pass_ks(n) for n in (1, 2, 4, 8, 10, 64)] == [
        [1], [1, 2], [1, 4], [1, 4, 8], [1, 4, 8, 10], [1, 4, 8, 16, 32, 64],
    ]  # fmt: skip


@SMALL
@given(TABLE)
def test_the_majority_is_as_right_as_a_fair_draw_among_the_modes(table):
    votes, right = [vote for vote, _ in table], [is_right for _, is_right in table]
    assert majority(votes, right) == pytest.approx(float(share_of_draws_that_are_right(table)))


def test_ties_count_by_halves_and_no_answer_is_no_vote():
    assert majority(["5", "5", "6", "6"], [True, True, False, False]) == 0.5
    assert majority([None, None, "5"], [False, False, True]) == 1.0
    assert majority([None, None], [False, False]) == 0.0


@SMALL
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=2, max_size=4))
def test_intervals_are_those_of_all_resamples_that_there_are(rows):
    """With up to four prompts all resamples can be written down. A bound of 10 000 random ones lies
    between the exact quantiles a little below and above. The share of resamples below a value has
    the deviation sqrt(0.025 * 0.975 / 1e4) = 0.0016. So five of them miss once in a million."""
    got = estimates([{"a": float(a), "b": float(b)} for a, b in rows])
    for column, name in enumerate("ab"):
        values = [row[column] for row in rows]
        means = sorted(statistics.fmean(drawn) for drawn in product(values, repeat=len(values)))
        assert got[name].value == pytest.approx(statistics.fmean(values))
        for bound, share in ((got[name].low, 0.025), (got[name].high, 0.975)):
            around = [means[min(len(means) - 1, max(0, int((share + off) * len(means))))] for off in (-0.008, 0.008)]
            assert around[0] - 1e-9 <= bound <= around[1] + 1e-9


def test_an_interval_covers_the_truth_about_as_often_as_it_says():
    """95 % of intervals; percentiles of 60 prompts cover a little less. Of 200: deviation 1.7 %."""
    generator = np.random.default_rng(5)
    tables = generator.random((200, 60, 4)) < 0.3
    # each table is a column
    rows = [dict(enumerate(of_prompt.tolist())) for of_prompt in tables.mean(axis=2).T]
    hits = sum(estimate.low <= 0.3 <= estimate.high for estimate in estimates(rows).values())
    assert 0.87 <= hits / 200 <= 0.99


def test_columns_come_with_every_prompt_and_one_prompt_has_no_interval():
    assert scores(["5", "5", "6", None], [True, True, False, False]) == {
        "avg@4": 0.5, "pass@4": 1.0, "maj@4": 1.0,
    }  # fmt: skip
    assert scores(["5"], [True]) == {"avg@1": 1.0}
    assert estimates([{"avg@1": 1.0}]) == {"avg@1": Estimate(1.0)} and estimates([]) == {}
    rows = [{"avg@1": float(number % 3 == 0)} for number in range(50)]
    assert estimates(rows) == estimates(rows)
