"""A finished group without signal takes no place: more is drawn while older groups are open."""

import pytest

from megatron_dapo.checkpointing.state_file import from_bytes, to_bytes
from megatron_dapo.queue.group_filter import by_correctness
from megatron_dapo.queue.group_queue import GroupQueue, QueueLimits
from tests.unit.test_dynamic_sampling import MIXED, RIGHT, WRONG, draw_all, make_group, make_queue, prompts, unfinished

pytestmark = pytest.mark.unit


def full_queue(**limits) -> GroupQueue:
    """A queue that asks for its first step, of 2 groups, with K = 1: its places are taken."""
    queue = GroupQueue(QueueLimits(2, 4, max_num_gen_batches=0, max_staleness=1, **limits), by_correctness("strict"))
    queue.begin(1, weight_version=0)
    draw_all(queue, 0, 4, version=0)
    assert num_drawable(queue) == 0
    return queue


def num_drawable(queue) -> int:
    """Prompts that may be drawn now; they are."""
    first = queue.account.num_drawn
    while queue.may_start(queue.num_open, 0):
        queue.draw(prompts(queue.account.num_drawn, 1)[0], 0)
    return queue.account.num_drawn - first


def finish(queue, number, outcome, **overrides) -> None:
    (draw,) = [group for group in queue.open_groups if group.prompt.index == number]
    queue.add_finished(make_group(draw, outcome, version=draw.version, **overrides))
    queue.decide()


def test_a_prompt_is_drawn_for_each_group_without_signal_though_the_oldest_is_late():
    queue = full_queue()
    finish(queue, 1, WRONG)
    assert num_drawable(queue) == 1
    finish(queue, 2, MIXED)
    assert num_drawable(queue) == 0
    finish(queue, 3, RIGHT)
    assert num_drawable(queue) == 1 and queue.num_open == 6
    assert queue.num_ready == 0
    finish(queue, 0, MIXED)
    assert queue.num_ready == 2 and num_drawable(queue) == 0


def test_a_masked_group_keeps_its_place_in_the_step():
    queue = full_queue(masks=True)
    finish(queue, 1, WRONG)
    assert num_drawable(queue) == 0


def test_without_verdicts_a_group_keeps_its_place_as_it_may_be_sampled_again():
    """Else a reward function that fails would draw on and on behind a late group."""
    queue = full_queue()
    finish(queue, 1, WRONG, reward_error="exception: none")
    assert num_drawable(queue) == 0


def test_without_staleness_no_more_is_drawn_than_a_wave():
    queue = make_queue(train=2, gen=4, max_gen=0)
    queue.begin(1, weight_version=0)
    draw_all(queue, 0, queue.next_wave(), version=0)
    assert queue.is_held(0), "free slots wait for the wave's last answers"
    finish(queue, 1, WRONG)
    assert queue.next_wave() == 0 and queue.is_held(0)
    for number in (0, 2, 3):
        finish(queue, number, WRONG)
    assert not queue.is_held(0) and queue.next_wave() > 0


def test_free_slots_are_held_by_the_bound_and_by_nothing_else():
    queue = full_queue()
    assert queue.is_held(0)
    finish(queue, 1, WRONG)
    assert not queue.is_held(0)
    assert num_drawable(queue) == 1 and queue.is_held(0) and not queue.is_held(1)


def test_behind_a_late_head_the_open_draws_have_a_limit():
    """Prompts without signal, one after the other: 4 (K + 1) groups a step, here 16."""
    queue = full_queue()
    for number in range(1, 1000):
        if number >= queue.account.num_drawn:
            break
        finish(queue, number, WRONG)
        num_drawable(queue)
    assert queue.num_open == queue.account.num_drawn == 16
    finish(queue, 0, WRONG)
    assert queue.num_open == 0 and num_drawable(queue) == 4, "it was only late"


@pytest.mark.parametrize("with_samples", [True, False])
def test_a_resumed_run_draws_as_many_as_its_saved_groups_leave_room_for(with_samples):
    queue = full_queue()
    for number in (1, 2):
        finish(queue, number, WRONG)
    assert num_drawable(queue) == 2
    resumed = GroupQueue(queue.limits, by_correctness("strict"))
    resumed.load_state_dict(from_bytes(to_bytes(queue.state_dict(with_samples))))
    resumed.begin(1, weight_version=0)
    assert num_drawable(resumed) == 0
    # without samples all six are to be sampled again, and two of them are not near enough yet
    allowed = [position for position in range(6) if resumed.may_start(position, 0)]
    assert allowed == (list(range(6)) if with_samples else list(range(4)))
    finish(resumed, 3, WRONG)
    assert num_drawable(resumed) == (1 if with_samples else 0)


def test_a_group_behind_the_reach_of_the_bound_begins_anew():
    """Drawn behind two groups without signal, which a resume without samples does not know."""
    queue = full_queue()
    for number in (1, 2):
        finish(queue, number, WRONG)
    assert num_drawable(queue) == 2
    resumed = GroupQueue(queue.limits, by_correctness("strict"))
    resumed.load_state_dict(from_bytes(to_bytes(queue.state_dict(with_samples=False))))
    resumed.begin(2, weight_version=1)
    versions = [resumed.renew(group.uid, 1).version for group in resumed.open_groups]
    # the first four may be trained on in steps 2 and 3, with version 0 at most one behind in step 2
    assert versions == [0, 0, 1, 1, 1, 1]


def test_a_group_without_signal_is_not_sampled_again_however_old():
    """It trains nothing; draws behind it count on its place."""
    queue = full_queue()
    finish(queue, 1, WRONG)
    finish(queue, 2, MIXED)
    resumed = GroupQueue(queue.limits, by_correctness("strict"))
    resumed.load_state_dict(from_bytes(to_bytes(queue.state_dict())))
    resumed.begin(4, weight_version=3)
    assert [group.prompt.index for group in unfinished(resumed)] == [0, 2, 3]
