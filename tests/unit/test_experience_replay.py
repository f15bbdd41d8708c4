"""The pool of experiences, by hand-computed cases and by laws for every recording."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.checkpointing.state_file import from_bytes, to_bytes
from megatron_dapo.checks.run_checks import validate
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.built_ins import estimators_with
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.exp_manager import ExperienceReplayConfig
from megatron_dapo.data.prompt_cursor import PromptCursor
from megatron_dapo.data.samples import Group, Prompt, Sample
from megatron_dapo.queue.experience_replay import (
    ExperiencePool,
    mean_entropy,
    replay_metrics,
)
from megatron_dapo.queue.prompt_draws import PromptDraws, next_prompts

pytestmark = pytest.mark.unit

N = 4


def make_pool(seed=1, **rules):
    keys = {"replay_start_ratio": 0.0, "max_pool_tokens": 10**6, **rules}
    group_size = keys.pop("group_size", N)
    return ExperiencePool(ExperienceReplayConfig(**keys), group_size, seed)


def sample(correct, *, log_probs=(-0.5, -0.5), mask=None, version=0, exp_mask=False, tag=5):
    size = len(log_probs)
    return Sample(
        uid="", prompt_tokens=(1, 2), response_tokens=(tag,) * size, rollout_log_probs=log_probs,
        loss_mask=mask or (1,) * size, weight_versions=(version,) * size, finish_reason="stop",
        raw_reward=float(correct), correct=correct, reward=float(correct), is_truncated=False, exp_mask=exp_mask,
    )  # fmt: skip


def group(prompt, *samples):
    return Group(f"uid{prompt}", Prompt(prompt, f"key{prompt}", (1, 2), "", "test", "0"), samples)


def record(pool, groups):
    """A step that generated these groups."""
    pool.record(groups)
    pool.end_step()


def of(prompt, num_right, n=N, **fields):
    return group(prompt, *(sample(i < num_right, **fields) for i in range(n)))


def prompts_of(experiences):
    return [prompt for prompt, _ in experiences]


# ------------------------------------------------------------------------------------------ records


def test_correct_responses_of_groups_that_are_not_solved_are_kept():
    pool = make_pool()
    record(pool, [of(0, 1), of(1, 0), of(2, 3)])
    # two tokens of prompt and two of response each
    assert pool.metrics() == {
        "replay/num_prompts": 2, "replay/num_trajectories": 4, "replay/num_tokens": 16, "replay/num_retired": 0,
    }  # fmt: skip


def test_a_trajectory_comes_back_as_it_was_recorded():
    recorded = sample(True, log_probs=(-0.1, 0.0, -0.3), mask=(1, 0, 1), version=7, tag=9)
    pool = make_pool()
    record(pool, [group(3, recorded, sample(False))])
    assert pool.draw(2) == [(3, recorded)]


def test_a_response_without_a_token_of_the_model_is_nothing_to_learn_from():
    pool = make_pool()
    record(pool, [group(0, sample(True, log_probs=()), sample(True, mask=(0, 0)), sample(False))])
    assert pool.draw(4) == []


def test_a_solved_prompt_is_retired_for_good():
    pool = make_pool(exp_ratio=1.0)
    record(pool, [of(0, 2), of(1, 2)])
    record(pool, [of(0, N)])
    record(pool, [of(0, 2)])  # forgotten again
    assert prompts_of(pool.draw(9)) == [1]
    assert pool.metrics()["replay/num_retired"] == 1 and pool.metrics()["replay/num_trajectories"] == 2


def test_a_replayed_sample_counts_among_the_successes_and_is_not_recorded_again():
    pool = make_pool(exp_ratio=1.0)
    record(pool, [of(0, 1)])
    borrowed = sample(True, exp_mask=True)
    record(pool, [group(0, borrowed, *(sample(False) for _ in range(N - 1)))])
    assert pool.metrics()["replay/num_trajectories"] == 1
    record(pool, [group(0, borrowed, *(sample(True) for _ in range(N - 1)))])
    assert pool.metrics()["replay/num_retired"] == 1


# -------------------------------------------------------------------------------------------- draws


def test_replay_begins_with_the_first_step_that_is_good_enough_and_goes_on():
    pool = make_pool(replay_start_ratio=0.5)
    record(pool, [of(0, 1), of(1, 2)])  # 3 of 8
    assert pool.draw(4) == []
    record(pool, [of(2, 3), of(3, 1)])  # 4 of 8
    assert len(pool.draw(4)) == 2
    record(pool, [of(4, 0)])
    assert len(pool.draw(4)) == 2


def test_replayed_samples_do_not_make_replay_begin():
    pool = make_pool(replay_start_ratio=0.5)
    borrowed = (sample(True, exp_mask=True) for _ in range(3))
    record(pool, [of(0, 1), group(1, *borrowed, sample(False))])  # fresh: 1 of 5
    assert pool.draw(4) == []


def test_a_share_of_the_gen_batch_is_replayed_rounded_down():
    pool = make_pool(exp_ratio=0.29)
    record(pool, [of(prompt, 1) for prompt in range(200)])
    assert [len(pool.draw(size)) for size in (1, 3, 4, 100, 103)] == [0, 0, 1, 29, 29]


def test_of_a_prompt_the_trajectory_of_least_entropy_is_replayed():
    pool = make_pool()
    unsure = sample(True, log_probs=(-0.9, -0.9), tag=11)
    # an environment's tokens have log-prob 0: over all tokens its mean would be the lowest
    diluted = sample(True, log_probs=(-1.2, 0.0, 0.0, 0.0), mask=(1, 0, 0, 0), tag=12)
    sure = sample(True, log_probs=(-0.2, -0.6, -0.1), tag=13)
    record(pool, [group(0, unsure, diluted, sure, sample(False))])
    assert pool.draw(2) == [(0, sure)] and mean_entropy(sure) == pytest.approx(0.3)


def test_buckets_are_drawn_by_the_normal_density_around_half_the_group():
    """Groups of 4, 2 or 1 or 3 successes: 1 : exp(-1/2) : exp(-1/2),
    with any number of prompts in each."""
    counts = Counter()
    for seed in range(3000):
        pool = make_pool(seed, exp_ratio=0.25)
        record(pool, [of(0, 2), of(10, 1), of(11, 1), of(12, 1), of(20, 3)])
        counts[min(pool.draw(4)[0][0] // 10, 2)] += 1
    total = 1.0 + 2 * math.exp(-0.5)
    shares = [counts[bucket] / 3000 for bucket in range(3)]
    # four deviations of a share near 0.3 to 0.45: 4 * sqrt(0.25 / 3000) = 0.037
    assert shares == pytest.approx([1 / total, math.exp(-0.5) / total, math.exp(-0.5) / total], abs=0.037)


def test_prompts_of_a_bucket_are_equally_likely_and_drawn_once():
    counts = Counter()
    for seed in range(1500):
        pool = make_pool(seed)
        record(pool, [of(prompt, 1) for prompt in range(3)])
        drawn = prompts_of(pool.draw(4))
        assert len(set(drawn)) == 2
        counts.update(drawn)
    assert [counts[prompt] / 1500 for prompt in range(3)] == pytest.approx([2 / 3] * 3, abs=0.05)


def test_no_prompt_is_replayed_twice_in_a_step_of_several_gen_batches():
    """A state saved in mid-step knows its draws; the next step may draw all of them again."""
    pool, other = make_pool(exp_ratio=0.5), make_pool(exp_ratio=0.5)
    record(pool, [of(prompt, 1) for prompt in range(3)])
    first = prompts_of(pool.draw(4))
    other.load_state_dict(from_bytes(to_bytes(pool.state_dict())))
    rest = prompts_of(pool.draw(4))
    assert sorted(first + rest) == [0, 1, 2] and pool.draw(4) == []
    assert prompts_of(other.draw(4)) == rest
    record(pool, [of(9, 0)])
    assert len(pool.draw(6)) == 3


def dealt(draws, number):
    """The replayed prompts among the next draws."""
    return [prompt for prompt, replayed in (draws.next() for _ in range(number)) if replayed is not None]


def test_no_prompt_is_replayed_twice_in_a_step_that_begins_with_the_rest_of_a_block():
    for seed in range(20):
        pool = make_pool(seed)
        record(pool, [of(prompt, 2) for prompt in range(6)])
        draws = PromptDraws(PromptCursor(100, 0, False, "x"), pool, 8)
        dealt(draws, 4)
        pool.end_step(draws.replayed_later)
        in_step = dealt(draws, 12)  # the rest of a block, and another block
        assert len(in_step) == len(set(in_step)) >= 4


def test_a_prompt_that_is_solved_after_its_block_was_made_is_not_replayed():
    pool = make_pool()
    record(pool, [of(prompt, 2) for prompt in range(4)])
    draws = PromptDraws(PromptCursor(100, 0, False, "x"), pool, 8)
    (first,) = dealt(draws, 2)
    solved = draws.replayed_later[0]
    pool.record([of(solved, N)])
    pool.end_step(draws.replayed_later)
    rest = dealt(draws, 5)  # of the six that are left one is left out
    assert sorted([first, solved, *rest]) == [0, 1, 2, 3]


def test_what_a_step_records_is_drawn_after_its_end_and_is_part_of_the_state_before():
    pool = make_pool(exp_ratio=1.0, replay_start_ratio=0.0)
    record(pool, [of(0, 1)])
    pool.record([of(1, 1)])
    pool.record([of(2, 3), of(3, N)])
    assert prompts_of(pool.draw(8)) == [0]
    other = make_pool(exp_ratio=1.0, replay_start_ratio=0.0)
    other.load_state_dict(from_bytes(to_bytes(pool.state_dict())))
    pool.forget_step()
    for each, prompts, num_retired in ((other, [0, 1, 2], 1), (pool, [0], 0)):
        each.end_step()
        assert sorted(prompts_of(each.draw(8))) == prompts and each.metrics()["replay/num_retired"] == num_retired


def test_far_buckets_of_large_groups_are_drawn_too():
    """exp(-(128 - 1)^2 / 2) is 0 in floating point."""
    pool = make_pool(group_size=256, exp_ratio=1.0)
    record(pool, [of(0, 1, n=256)])
    assert prompts_of(pool.draw(1)) == [0]


# ------------------------------------------------------------------------------------------- bounds


def test_of_a_prompt_the_newest_are_kept():
    pool = make_pool(max_trajectories_per_task=2)
    best = sample(True, log_probs=(-0.1,), tag=1)
    record(pool, [group(0, best, sample(False))])
    record(pool, [group(0, sample(True, tag=2), sample(True, log_probs=(-0.4,), tag=3), sample(False))])
    assert pool.metrics()["replay/num_trajectories"] == 2
    assert pool.draw(2)[0][1].response_tokens.tolist() == [3]


def test_beyond_the_tokens_what_was_recorded_first_leaves_first():
    pool = make_pool(max_pool_tokens=12, exp_ratio=1.0)
    record(pool, [of(0, 1), of(1, 1)])
    record(pool, [of(0, 1), of(2, 1)])
    assert pool.metrics()["replay/num_tokens"] == 12
    assert sorted(prompts_of(pool.draw(9))) == [0, 1, 2]
    record(pool, [of(3, 1)])  # prompt 1 goes: of prompt 0 the second trajectory is left
    assert sorted(prompts_of(pool.draw(9))) == [0, 2, 3]


# ------------------------------------------------------------------------- laws for every recording


@st.composite
def histories(draw):
    rules = dict(
        replay_start_ratio=draw(st.sampled_from([0.0, 0.2])),
        exp_ratio=draw(st.sampled_from([0.1, 0.5, 1.0])),
        max_trajectories_per_task=draw(st.integers(1, 3)),
        max_pool_tokens=draw(st.integers(8, 80)),
    )
    return rules, draw(st.integers(0, 2**32)), draw(st.integers(1, 8))


@settings(max_examples=150, deadline=None)
@given(histories())
def test_bounds_hold_retired_prompts_stay_away_and_a_saved_pool_goes_on(history):
    rules, seed, num_steps = history
    chance, pool, solved, written = random.Random(seed), make_pool(**rules), set(), set()
    for step in range(num_steps):
        size = chance.randint(1, 8)
        state = from_bytes(to_bytes(pool.state_dict()))
        other = make_pool(**rules)
        other.load_state_dict(state)
        drawn = pool.draw(size)
        assert other.draw(size) == drawn and other.metrics() == pool.metrics()
        pool = other if step % 2 else pool

        assert len(drawn) <= int(rules["exp_ratio"] * size + 1e-9)
        assert len(set(prompts_of(drawn))) == len(drawn) and not solved & set(prompts_of(drawn))
        assert all(each.correct and each in written for _, each in drawn)

        groups = []
        for prompt in chance.sample(range(6), chance.randint(1, 6)):
            log_probs = tuple(-chance.random() for _ in range(chance.randint(1, 6)))
            right = [chance.random() < 0.6 for _ in range(N)]
            groups.append(group(prompt, *(sample(ok, log_probs=log_probs, version=step) for ok in right)))
            written |= {each for each in groups[-1].samples if each.correct}
            solved |= {prompt} if all(right) else set()
        record(pool, groups)
        metrics = pool.metrics()
        assert metrics["replay/num_tokens"] <= rules["max_pool_tokens"] and metrics["replay/num_retired"] == len(solved)
        assert metrics["replay/num_trajectories"] <= metrics["replay/num_prompts"] * rules["max_trajectories_per_task"]


def test_the_seed_decides_and_draws_go_on_from_one_to_the_next():
    def draws(seed):
        pool = make_pool(seed, exp_ratio=0.5)
        record(pool, [of(prompt, 1) for prompt in range(50)])
        return [prompts_of(pool.draw(8)) for _ in range(3)]

    assert draws(1) == draws(1) != draws(2)
    assert len({tuple(each) for each in draws(1)}) == 3


# -------------------------------------------------------------------------------------- gen batches


def test_replayed_prompts_are_spread_among_the_new_ones_and_take_their_place():
    pool = make_pool(exp_ratio=0.5)
    record(pool, [of(prompt, 1) for prompt in range(100, 200)])
    cursor = PromptCursor(100, seed=1, shuffle=False)
    drawn = next_prompts(cursor, pool, 6)
    assert [number for number, replayed in drawn if not replayed] == [0, 1, 2]
    assert [replayed is not None for _, replayed in drawn] == [False, True] * 3
    assert all(100 <= number < 200 for number, replayed in drawn if replayed)
    assert [number for number, _ in next_prompts(cursor, None, 2)] == [3, 4]


def test_a_pool_with_few_prompts_leaves_the_rest_to_new_ones():
    pool = make_pool(exp_ratio=0.5)
    record(pool, [of(7, 1)])
    drawn = next_prompts(PromptCursor(100, seed=1, shuffle=False), pool, 8)
    assert [number for number, _ in drawn] == [0, 1, 2, 3, 4, 5, 6, 7] and drawn[-1][1] is not None


def test_prompts_are_dealt_one_by_one_and_what_is_left_of_a_block_is_state():
    def drawn_from(num_before_the_save):
        pool = make_pool(exp_ratio=0.5)
        record(pool, [of(prompt, 1) for prompt in range(100, 104)])
        draws = PromptDraws(PromptCursor(100, seed=1, shuffle=False), pool, 6)
        numbers = [draws.next() for _ in range(num_before_the_save)]
        other_pool = make_pool(exp_ratio=0.5)
        other_pool.load_state_dict(from_bytes(to_bytes(pool.state_dict())))
        other = PromptDraws(PromptCursor(100, seed=1, shuffle=False), other_pool, 6)
        other.load_state_dict(from_bytes(to_bytes(draws.state_dict())))
        return numbers + [other.next() for _ in range(12 - num_before_the_save)]

    expected = drawn_from(0)
    assert [replayed is not None for _, replayed in expected] == [False, True] * 3 + [False] * 5 + [True]
    assert [number for number, replayed in expected if not replayed] == list(range(8))
    assert all(drawn_from(number) == expected for number in (1, 4, 6, 8))


def test_without_a_pool_no_prompt_leaves_the_cursor_before_it_is_drawn():
    cursor = PromptCursor(100, seed=1, shuffle=False)
    draws = PromptDraws(cursor, None, 6)
    assert [draws.next() for _ in range(3)] == [(0, None), (1, None), (2, None)]
    assert draws.state_dict() == {"cursor": cursor.state_dict(), "block": []} and cursor.next(1) == [3]


def test_the_groups_trained_on_tell_how_much_and_how_old():
    groups = [group(0, sample(True, version=2, exp_mask=True), sample(False, version=9)), of(1, 1, version=9)]
    groups.append(group(2, sample(True, version=5, exp_mask=True), sample(False, version=9)))
    assert replay_metrics(groups, weight_version=9) == {"replay/num_replayed_groups": 2, "replay/age_mean": 5.5}
    assert replay_metrics(groups[1:2], weight_version=9) == {"replay/num_replayed_groups": 0}


# --------------------------------------------------------------------------------------- the config

REPLAY = "exp_manager.experience_replay"
ON = f"{REPLAY}.enable=true"
ACTOR = "actor_rollout_ref.actor"
MISTAKES = {
    **{
        f"{name} per token": ([ON, f"algorithm.adv_estimator={name}"], f"algorithm.adv_estimator is {name}")
        for name in estimators_with(per_token=True)
    },
    "groups of one": ([ON, "actor_rollout_ref.rollout.n=1"], "actor_rollout_ref.rollout.n is 1"),
    "nothing to replay": ([ON, f"{REPLAY}.exp_ratio=0.001"], f"{REPLAY}.exp_ratio 0.001 of the 512 prompts"),
    "a pool that holds nothing": ([ON, f"{REPLAY}.max_pool_tokens=3071"], f"{REPLAY}.max_pool_tokens is 3071"),
    "a rule without replay": ([f"{REPLAY}.exp_ratio=0.25"], f"{REPLAY}.exp_ratio is 0.25, but has no effect"),
    "a start without replay": ([f"{REPLAY}.replay_start_ratio=0.1"], f"{REPLAY}.replay_start_ratio is 0.1, but"),
    "a loss without replay": (
        [f"{ACTOR}.off_policy_shaping_mode=dapo_clip_higher"],
        f"{ACTOR}.off_policy_shaping_mode is dapo_clip_higher, but has no effect",
    ),
    "beta of another mode": (
        [ON, f"{ACTOR}.off_policy_shaping_mode=dapo_clip_higher", f"{ACTOR}.off_policy_shaping_beta=0.2"],
        f"{ACTOR}.off_policy_shaping_beta is 0.2, but has no effect while",
    ),
    "a clip of another mode": (
        [ON, f"{ACTOR}.off_policy_clip_ratio_high=0.6"],
        f"{ACTOR}.off_policy_clip_ratio_high is 0.6, but has no effect while",
    ),
    "a clip that narrows": (
        [ON, f"{ACTOR}.off_policy_shaping_mode=dapo_clip_higher", f"{ACTOR}.off_policy_clip_ratio_high=0.1"],
        f"{ACTOR}.off_policy_clip_ratio_high is 0.1, below",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_contradiction_is_named_alone(name):
    overrides, expected = MISTAKES[name]
    with pytest.raises(UserError) as error:
        validate(load_config(None, overrides), None, check_files=False)
    (sentence,) = error.value.sentences
    assert sentence.startswith(expected) or expected in sentence


def test_a_recipe_may_be_run_without_replay():
    settings = [f"{REPLAY}.exp_ratio=0.25", f"{ACTOR}.off_policy_shaping_mode=dapo_clip_higher"]
    validate(load_config(None, [*settings, f"{REPLAY}.enable=false"]), None, check_files=False)


@pytest.mark.parametrize("estimator", estimators_with(per_token=False))
def test_estimators_per_response_go_with_replay(estimator):
    validate(load_config(None, [ON, f"algorithm.adv_estimator={estimator}"]), None, check_files=False)
