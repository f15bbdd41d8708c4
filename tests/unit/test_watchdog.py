"""Who is blamed for a hang, and what counts as silence."""

from pathlib import Path

import pytest

from megatron_dapo.platform import watchdog
from megatron_dapo.platform.watchdog import Place, missing, sentence

pytestmark = pytest.mark.unit


def place(entered: int, beats: int = 0, waits: bool = False, **more: object) -> Place:
    return Place("node1", 7, step=3, phase="update", entered=entered, beats=beats, waits=waits, **more)


@pytest.mark.parametrize(
    ("places", "silent", "blamed"),
    [
        ({0: place(5), 2: place(4)}, {1}, [1]),  # one that does not answer, wherever the others are
        ({0: place(5, waits=True), 1: place(4), 2: place(5, waits=True)}, set(), [1]),  # has not come to the phase
        ({0: place(5, 9, waits=True), 1: place(5, 9), 2: place(5, 9, waits=True)}, set(), [1]),  # in no collective
        ({0: place(5, 3, waits=True), 1: place(5, 4)}, set(), [1]),  # the first pipeline stage, ahead and stuck
        ({0: place(5, 9), 1: place(5, 8), 2: place(5, 8)}, set(), [1, 2]),  # did fewer micro-batches
        ({0: place(4, waits=True), 1: place(4), 2: place(5, waits=True)}, set(), [1]),
        ({0: place(5, 9)}, set(), [0]),
        ({0: place(5, 9), 1: place(5, 9)}, set(), []),  # all alike
        ({0: place(5, 9, waits=True), 1: place(5, 9, waits=True)}, set(), []),
    ],
)
def test_the_missing_ranks_are_those_that_the_others_wait_for(places, silent, blamed):
    assert missing(places, silent) == blamed


def test_where_no_rank_stands_out_every_place_is_told_up_to_a_number():
    said = sentence(
        "why", {rank: place(5, at="megatron_dapo/x.py:3") for rank in range(20)}, {}, set(), Path("logs/hang")
    )
    assert "\n" not in said and said.startswith("Hang: why; no rank stands out: rank 0 is in `update` of step 3 at ")
    assert "rank 7 " in said and "rank 8 " not in said and "and 12 more" in said and said.endswith("logs/hang")


def test_a_rank_that_has_left_is_told_from_one_that_does_not_answer():
    last = {1: place(4, has_left=True), 2: place(4)}
    said = sentence("why", {0: place(5)}, last, {1, 2}, Path("hang"))
    assert "rank 1 (process 7 on node1) has left, last in" in said
    assert "rank 2 (process 7 on node1) does not answer, last in" in said


def test_the_time_in_which_the_whole_process_was_stopped_is_no_silence(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    clock = watchdog._Clock()
    assert clock.age("rank 1", 1) == 0.0
    now[0] = 1.0
    clock.tick()
    assert clock.age("rank 1", 1) == 1.0
    now[0] = 3600.0
    clock.tick()
    assert clock.age("rank 1", 1) == 3.0
    assert clock.age("rank 1", 2) == 0.0


def test_a_phase_within_a_phase_gives_way_to_the_outer_one_again():
    here = watchdog._here
    with watchdog.phase("rollout"):
        began = here.entered
        with watchdog.phase("weight_sync"):
            watchdog.beat()
            assert (here.phase, here.entered, here.beats) == ("weight_sync", began + 1, 1)
        assert (here.phase, here.entered, here.beats) == ("rollout", began + 2, 0)
    assert here.phase == ""
