"""The rules of a fleet: seats, picks, factors, moves; by hand, and for every fleet."""

import math
from dataclasses import replace
from statistics import median_low

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.servers.fleet import (
    TOKEN_TIME,
    Move,
    RequestUnderWay,
    ServerLoad,
    TokenTime,
    moves,
    next_factor,
    pick,
    seats,
    usual_factor,
)

pytestmark = pytest.mark.unit

FACTORS = st.one_of(st.none(), st.sampled_from([1.0, 2.0, 4.0, 10.0]), st.floats(0.01, 100.0))
TIMES = st.builds(TokenTime, st.floats(0.1, 100.0), st.floats(0.01, 10.0))
SIZES = st.integers(1, 300)


@st.composite
def fleets(draw) -> tuple[list[ServerLoad], list[RequestUnderWay]]:
    """Up to 6 servers with some requests; a few groups share them."""
    most = draw(st.integers(1, 12))
    factors = {name: draw(FACTORS) for name in "abcdef"[: draw(st.integers(1, 6))]}
    num_seats = seats(factors, most)
    requests = [
        RequestUnderWay(
            f"{server}{number}",
            server,
            draw(st.integers(0, 90)),
            draw(st.integers(1, 40_000)),
            draw(st.sampled_from([0.0, 59.0, 60.0, math.inf])),
        )
        for server in factors
        for number in range(draw(st.integers(0, 16)))
    ]
    loads = [
        ServerLoad(name, factor or 1.0, sum(request.server == name for request in requests), num_seats[name])
        for name, factor in factors.items()
    ]
    return loads, requests


# ------------------------------------------------------------------------------------------- seats


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        # at most 2 x (66 + 128) = 388 units a token: f (66 + r) <= 388
        (0.5, 128),
        (1.0, 128),
        (2.0, 128),
        (2.5, 89),  # 155.2 - 66
        (4.0, 31),  # 97 - 66
        (5.8, 0),  # 66.9 - 66
        (10.0, 0),
        (None, 128),  # not measured yet
    ],
)
def test_a_slow_servers_tokens_take_at_most_twice_as_long(factor, expected):
    factors = {str(number): 1.0 for number in range(3)} | {"slow": factor}
    assert seats(factors, 128) == {"0": 128, "1": 128, "2": 128, "slow": expected}


def test_of_two_servers_the_faster_is_the_usual_one():
    assert seats({"a": 10.0, "b": 1.0}, 128) == {"a": 0, "b": 128}


def test_nobody_is_slow_before_the_first_measurement():
    assert seats({"a": None, "b": None}, 7) == {"a": 7, "b": 7}
    assert seats({}, 7) == {}


@given(st.dictionaries(st.text(max_size=3), FACTORS, min_size=1), SIZES, TIMES)
def test_seats_are_many_for_the_usual_and_quick_for_all(factors, most, time):
    granted = seats(factors, most, time)
    assert granted.keys() == factors.keys()
    assert all(0 <= number <= most for number in granted.values())
    assert most in granted.values(), "somebody takes requests"
    measured = [factor for factor in factors.values() if factor is not None]
    for name, factor in factors.items():
        if factor is None or factor <= 2 * median_low(measured):
            assert granted[name] == most
        elif granted[name]:
            own = factor * (time.base + time.per_request * granted[name])
            assert own <= 2 * median_low(measured) * (time.base + time.per_request * most) * (1 + 1e-9)


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6), SIZES, st.floats(0.01, 100.0))
def test_only_ratios_of_factors_matter(factors, most, unit):
    """Up to a seat: products are rounded."""
    one = seats({str(number): factor for number, factor in enumerate(factors)}, most)
    other = seats({str(number): factor * unit for number, factor in enumerate(factors)}, most)
    for number, factor in enumerate(factors):
        is_at_the_edge = math.isclose(factor, 2 * median_low(factors), rel_tol=1e-6)
        assert is_at_the_edge or abs(one[str(number)] - other[str(number)]) <= 1


# ------------------------------------------------------------------------------------------- picks


def load(name: str, factor: float, num_requests: int, num_seats: int = 128) -> ServerLoad:
    return ServerLoad(name, factor, num_requests, num_seats)


@pytest.mark.parametrize(
    ("servers", "expected"),
    [
        # 4 x (66 + 1) = 268, more than 66 + 101 = 167
        ([load("slow", 4.0, 0, 31), load("usual", 1.0, 100)], "usual"),
        # 268 < 66 + 203: only a fleet with more requests has a use for it
        ([load("slow", 4.0, 0, 31), load("usual", 1.0, 202, 300)], "slow"),
        ([load("slow", 4.0, 30, 31), load("usual", 1.0, 128)], "slow"),
        ([load("slow", 10.0, 0, 0), load("usual", 1.0, 128)], None),
        ([], None),
    ],
)
def test_a_request_goes_where_its_tokens_take_least_time(servers, expected):
    assert pick(servers) == expected


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.floats(0.01, 100.0))
def test_of_equal_servers_the_first_with_the_fewest_requests_is_picked(numbers, factor):
    servers = [load(str(index), factor, number, 9) for index, number in enumerate(numbers)]
    expected = None if min(numbers) == 9 else str(numbers.index(min(numbers)))
    assert pick(servers) == expected


def test_a_server_with_the_cached_prefix_is_preferred_and_one_that_failed_avoided():
    servers = [load("a", 1.0, 0), load("b", 1.0, 5), load("full", 1.0, 128)]
    assert pick(servers, prefer="b") == "b"
    assert pick(servers, prefer="full") == "a"
    assert pick(servers, avoid={"a"}) == "b"
    assert pick(servers, avoid={"a", "b"}) == "a", "better than none"
    assert pick(servers, avoid={"b"}, prefer="b") == "a"


@given(fleets(), TIMES)
def test_a_pick_has_a_free_seat_and_no_other_is_quicker(fleet, time):
    servers, _ = fleet
    free = [server for server in servers if server.num_requests < server.num_seats]
    name = pick(servers, time)
    assert (name is None) == (not free)
    (chosen,) = [server for server in free if server.name == name] or [None]
    if chosen:
        quickest = min(each.factor * (time.base + time.per_request * (each.num_requests + 1)) for each in free)
        assert chosen.factor * (time.base + time.per_request * (chosen.num_requests + 1)) == quickest


# ----------------------------------------------------------------------------------------- factors


def test_a_factor_is_the_time_of_a_token_over_the_usual_one():
    # 34 requests at 3.4 tokens a second: 10 s each, where 66 + 34 = 100 units are usual
    assert TOKEN_TIME.factor(num_requests=34, tokens_per_s=3.4) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("factor", "measured", "usual", "expected"),
    [
        (1.0, 4.0, 1.0, 2.5),
        (4.0, 4.0, 1.0, 4.0),
        (None, 4.0, None, 4.0),  # the first of the fleet sets the scale
        (None, 4.0, 2.0, 3.0),  # one that joins is usual before
        (10.0, None, 1.0, 9.1),  # idle
        (None, None, 1.0, None),
        (10.0, None, None, 10.0),
    ],
)
def test_a_factor_follows_measurements_and_forgets_them_when_idle(factor, measured, usual, expected):
    assert next_factor(factor, measured, usual) == (None if expected is None else pytest.approx(expected))


def test_a_drained_server_is_tried_again_within_two_minutes():
    factors: dict[str, float | None] = {"a": 1.0, "b": 1.0, "slow": 10.0}
    num_looks = 0
    while not seats(factors, 128)["slow"]:
        factors["slow"] = next_factor(factors["slow"], None, usual_factor(factors.values()))
        num_looks += 1
    assert 0 < num_looks < 12
    # and one that is well again has all its seats 30 s later
    for _ in range(3):
        factors["slow"] = next_factor(factors["slow"], 1.0, usual_factor(factors.values()))
    assert seats(factors, 128)["slow"] == 128


# ------------------------------------------------------------------------------------------- moves


def under_way(server: str, number: int, num_tokens: int = 1000) -> list[RequestUnderWay]:
    """Requests of one server; each of a group of its own, the first is the oldest."""
    return [RequestUnderWay(f"{server}{index:03}", server, index, num_tokens) for index in range(number)]


def test_a_server_with_too_many_requests_loses_its_oldest_ones():
    servers = [load("slow", 4.0, 42, 31), load("usual", 1.0, 90)]
    made = moves(servers, under_way("slow", 42), blocked=False)
    assert made == [Move(f"slow{index:03}", "slow", "usual") for index in range(11)]
    # 1.25 x 31 + 2 = 40.75: so many may stay
    assert not moves([replace(servers[0], num_requests=40), servers[1]], under_way("slow", 40), blocked=False)


def test_without_a_free_seat_a_moved_request_is_the_first_in_line():
    servers = [load("slow", 10.0, 3, 0), load("usual", 1.0, 128)]
    made = moves(servers, under_way("slow", 3), blocked=False)
    assert made == [Move(f"slow{index:03}", "slow", None) for index in range(3)]


def test_a_request_that_blocks_the_run_stays_until_a_seat_is_free():
    servers = [load("slow", 4.0, 30, 31), load("usual", 1.0, 128)]
    assert not moves(servers, under_way("slow", 30), blocked=True)


def test_while_the_run_is_blocked_the_oldest_groups_leave_slow_servers():
    servers = [load("slow", 2.0, 10), load("usual", 1.0, 10)]
    requests = under_way("slow", 10) + under_way("usual", 10)
    assert not moves(servers, requests, blocked=False)
    # here 2 x (66 + 10 - n) units a token, there 66 + 11 + n: 1.5 times as long up to n = 10
    assert moves(servers, requests, blocked=True) == [Move(f"slow{n:03}", "slow", "usual") for n in range(10)]
    assert not moves([replace(servers[0], factor=1.5), servers[1]], requests, blocked=True)


def test_only_the_64_oldest_groups_count_as_blocking():
    servers = [load("slow", 4.0, 1), load("usual", 1.0, 64)]
    others = [RequestUnderWay(f"o{number}", "usual", number, 10) for number in range(64)]
    assert not moves(servers, [*others, RequestUnderWay("late", "slow", 64, 10)], blocked=True)
    assert moves(servers, [*others, RequestUnderWay("in time", "slow", 63, 10)], blocked=True)


def test_a_server_reads_a_second_and_a_half_of_moved_text_and_one_request_more():
    servers = [load("slow", 10.0, 9, 0), load("usual", 1.0, 0)]
    assert len(moves(servers, under_way("slow", 9, num_tokens=7500), blocked=False)) == 4
    assert len(moves(servers, under_way("slow", 9, num_tokens=30_000), blocked=False)) == 1


def test_a_look_moves_32_requests_at_most_and_one_request_once_a_minute():
    servers = [load("slow", 10.0, 50, 0), load("usual", 1.0, 0)]
    requests = under_way("slow", 50, num_tokens=1)
    assert len(moves(servers, requests, blocked=True)) == 32
    assert not moves(servers, [replace(request, moved_s=59.0) for request in requests], blocked=True)
    assert len(moves(servers, [replace(request, moved_s=60.0) for request in requests], blocked=True)) == 32


@given(st.lists(st.integers(0, 16), min_size=1, max_size=6), st.integers(16, 32), st.booleans())
def test_equal_servers_filled_by_picks_move_nothing(numbers, most, blocked):
    """Whatever ends there: at 66 : 1 the emptiest is less than 1.5 times as quick."""
    servers = [load(str(index), 1.0, number, most) for index, number in enumerate(numbers)]
    requests = [request for server in servers for request in under_way(server.name, server.num_requests)]
    assert moves(servers, requests, blocked) == []


@settings(max_examples=300)
@given(fleets(), st.booleans())
def test_moves_keep_their_limits_in_every_fleet(fleet, blocked):
    servers, requests = fleet
    of = {request.name: request for request in requests}
    made = moves(servers, requests, blocked)
    assert len({move.request for move in made}) == len(made) <= 32
    num_requests = {server.name: server.num_requests for server in servers}
    num_read = dict.fromkeys(num_requests, 0)
    num_seats = {server.name: server.num_seats for server in servers}
    for move in made:
        assert of[move.request].server == move.source != move.target
        assert of[move.request].moved_s >= 60
        is_surplus = num_requests[move.source] > num_seats[move.source]
        assert is_surplus or blocked
        num_requests[move.source] -= 1
        if move.target:
            num_requests[move.target] += 1
            assert num_requests[move.target] <= num_seats[move.target], "a granted seat"
            assert num_read[move.target] <= 22_500
            num_read[move.target] += of[move.request].num_tokens
