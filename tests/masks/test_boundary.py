"""Schedules: the paper's formulas, the segments cut from them, and their plain-data form."""

import itertools
import math
from bisect import bisect_right

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smat import schedules
from smat.masks import SMatMask, doubling, kept, none, rebuilt, schedule_from_dict, window

LENGTHS = st.integers(1, 300)
SCHEDULES = st.one_of(
    st.just(none()),
    st.just(doubling()),
    st.integers(0, 200).map(kept),
    st.integers(1, 100).map(window),
)


def paper_boundary(schedule, t):
    """n(t) as the paper writes it, t counted from 1."""
    if schedule.kind == "doubling":
        return math.floor(2.0 ** (math.floor(math.log2(t)) - 1))
    if schedule.kind == "window":
        return max(0, ((t - 1) // schedule.step - 1) * schedule.step)
    return schedule.num_distant if t > schedule.num_distant else 0


@settings(deadline=None)
@given(SCHEDULES, LENGTHS)
def test_closed_form_is_the_papers(schedule, length):
    expected = [paper_boundary(schedule, t) for t in range(1, length + 1)]
    assert [schedule.boundary_at(position) for position in range(length)] == expected


@settings(deadline=None)
@given(SCHEDULES, LENGTHS)
def test_segments_spell_out_the_closed_form(schedule, length):
    segments = schedule.segments(length)
    spelled = [s.boundary for s in segments for _ in range(s.start, s.stop)]
    assert spelled == [schedule.boundary_at(position) for position in range(length)]
    assert [s.start for s in segments] == [0, *(s.stop for s in segments[:-1])]
    assert all(s.start < s.stop for s in segments)
    assert segments[-1].stop == length
    assert all(early.boundary < late.boundary for early, late in itertools.pairwise(segments))
    assert all(s.boundary <= s.start for s in segments)


EVERY_KIND = [
    none(), doubling(), *map(kept, (1, 2, 64, 1000, 2999, 5000)),
    *map(window, (1, 2, 3, 64, 100, 1500, 3000, 7000)),
]  # fmt: skip


@pytest.mark.parametrize("schedule", EVERY_KIND, ids=lambda schedule: schedule.describe())
def test_segments_and_edges_by_number_are_those_of_the_definition(schedule):
    """Cut 3,000 queries where the paper's n(t) changes, and compare every number."""
    length = 3000
    boundary = [paper_boundary(schedule, t) for t in range(1, 4 * length + 1)]
    starts = [0] + [t for t in range(1, len(boundary)) if boundary[t] != boundary[t - 1]]
    edges = [boundary[start] for start in starts]
    for position in range(length):
        index = schedule.segment_index(position)
        assert index == bisect_right(starts, position) - 1
        assert schedule.segment_start(index) == starts[index]
        assert schedule.segment_boundary(index) == boundary[position]
        # All boundaries up to a position belong to segments that begin before four times as many.
        assert schedule.edge_index(position) == bisect_right(edges, position) - 1
    if schedule.num_segments is not None:
        assert not schedule.moves
        assert schedule.num_segments == (2 if schedule.num_distant else 1)


@pytest.mark.parametrize("position", [10**6, 10**15, 10**15 + 7, 2**62 - 1, 2**62, 10**30])
@pytest.mark.parametrize(
    "schedule",
    [none(), kept(512), kept(10**15), doubling(), window(1), window(256), window(10**15)],
    ids=lambda schedule: schedule.describe(),
)
def test_a_huge_position_answers_at_once(schedule, position):
    index = schedule.segment_index(position)
    boundary = schedule.segment_boundary(index)
    if schedule.kind == "doubling":
        assert boundary == 2 ** (len(bin(position + 1)) - 4)
    else:
        assert boundary == paper_boundary(schedule, position + 1)
    assert schedule.boundary_at(position) == boundary <= position
    assert schedule.segment_start(index) <= position
    is_last = index + 1 == schedule.num_segments
    assert is_last or position < schedule.segment_start(index + 1)
    edge = schedule.edge_index(position)
    assert schedule.segment_boundary(edge) <= position
    assert edge + 1 == schedule.num_segments or position < schedule.segment_boundary(edge + 1)


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(0, 500))
def test_window_holds_one_to_two_steps(step, position):
    schedule = window(step)
    num_recent = position + 1 - schedule.boundary_at(position)
    assert num_recent <= 2 * step
    assert num_recent > step or position < step


@pytest.mark.parametrize(("seq_len", "chunk_size"), [(1024, 64), (1000, 64), (100, 64), (7, 1)])
def test_rebuilt_is_half_the_length_in_whole_chunks(seq_len, chunk_size):
    num_distant = chunk_size * (seq_len // (2 * chunk_size))
    assert rebuilt().resolve(seq_len, chunk_size) == kept(num_distant)
    assert SMatMask(seq_len, 1, chunk_size, boundary=rebuilt()).num_distant == num_distant


def test_rebuilt_alone_asks_for_a_horizon():
    with pytest.raises(ValueError, match="horizon"):
        rebuilt().segments(64)
    with pytest.raises(ValueError, match="horizon"):
        rebuilt().boundary_at(3)
    for method in ("segment_index", "segment_start", "segment_boundary", "edge_index"):
        with pytest.raises(ValueError, match="horizon"):
            getattr(rebuilt(), method)(3)
    with pytest.raises(ValueError, match="horizon"):
        _ = rebuilt().num_segments


@pytest.mark.parametrize(
    ("schedule", "moves", "horizon_free"),
    [
        (none(), False, True),
        (kept(4), False, True),
        (rebuilt(), False, False),
        (doubling(), True, True),
        (window(4), True, True),
    ],
)
def test_what_moves_and_what_needs_a_horizon(schedule, moves, horizon_free):
    assert (schedule.moves, schedule.horizon_free) == (moves, horizon_free)


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (none(), "none()"),
        (kept(4), "kept(4)"),
        (rebuilt(), "rebuilt()"),
        (doubling(), "doubling()"),
        (window(4), "window(step=4)"),
    ],
)
def test_descriptions_and_plain_data(schedule, text):
    assert schedule.describe() == text
    assert schedule_from_dict(schedule.to_dict()) == schedule


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kind": "sliding"}, "sliding"),
        ({"kind": "window"}, "window"),
        ({"kind": "window", "step": 4, "size": 8}, "size"),
        ({"kind": "window", "step": 0}, "0"),
        ({"kind": "window", "step": 2.5}, r"2\.5"),
        ({}, "None"),
    ],
)
def test_unknown_plain_data_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        schedule_from_dict(data)


def test_bad_numbers_are_repeated():
    with pytest.raises(ValueError, match="-3"):
        kept(-3)
    with pytest.raises(ValueError, match="-1"):
        kept(-1)
    with pytest.raises(ValueError, match="-2"):
        window(-2)
    with pytest.raises(ValueError, match="0"):
        doubling().segments(0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: window(float("nan")), "step.*nan"),
        (lambda: window(2.5), r"step.*2\.5"),
        (lambda: window(True), "step.*True"),
        (lambda: window(None), "step.*None"),
        (lambda: kept(3.0), r"num_distant.*3\.0"),
        (lambda: kept(False), "num_distant.*False"),
        (lambda: kept("3"), "num_distant.*'3'"),
    ],
)
def test_what_is_no_integer_is_refused(build, message):
    with pytest.raises(TypeError, match=message):
        build()


def test_schedules_are_public_in_a_module_of_their_own():
    assert schedules.window(256) == window(256)
    assert {schedules.none(), schedules.kept(0)} == {none()}
    assert (schedules.rebuilt(), schedules.doubling()) == (rebuilt(), doubling())
