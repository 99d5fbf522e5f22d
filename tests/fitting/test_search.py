"""The search alone, on known predicates."""

from __future__ import annotations

from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from pipefit.largest.search import PATIENCE, edge

RANGES = st.builds(
    lambda start, count, step: range(start, start + count * step, step),
    st.integers(1, 50),
    st.integers(1, 400),
    st.integers(1, 7),
)


@given(numbers=RANGES, limit=st.integers(0, 3000), refused=st.sets(st.integers(1, 3000)))
def test_the_edge_is_that_of_looking_at_every_number(numbers: range, limit: int, refused: set[int]) -> None:
    """The last number that holds and the first that fails are those of a walk over all accepted numbers."""
    gaps = refused if len(refused) < PATIENCE else set()
    accepted = [number for number in numbers if number not in gaps]
    found = edge(lambda number: None if number in gaps else number <= limit, numbers)
    assert found.holds == max((number for number in accepted if number <= limit), default=None)
    assert found.fails == min((number for number in accepted if number > limit), default=None)


def test_every_set_of_refusals() -> None:
    """Of nine numbers, with every edge and every set of refused ones, the edge is that of a walk."""
    numbers = range(1, 10)
    for refused in chain.from_iterable(combinations(numbers, count) for count in numbers):
        accepted = [number for number in numbers if number not in refused]
        for limit in (0, *numbers):
            found = edge(lambda number: None if number in refused else number <= limit, numbers)  # noqa: B023
            assert found.holds == max((number for number in accepted if number <= limit), default=None)
            assert found.fails == min((number for number in accepted if number > limit), default=None)


@given(numbers=RANGES, limit=st.integers(0, 3000), heads=st.integers(1, 16))
def test_refusals_at_every_turn_change_nothing(numbers: range, limit: int, heads: int) -> None:
    """If only multiples are accepted, as hidden sizes among heads, the edge lies between two multiples."""
    accepted = [number for number in numbers if number % heads == 0]
    found = edge(lambda number: number <= limit if number % heads == 0 else None, numbers)
    assert found.holds == max((number for number in accepted if number <= limit), default=None)
    assert found.fails == min((number for number in accepted if number > limit), default=None)


@given(
    numbers=RANGES,
    limit=st.integers(0, 3000),
    heads=st.integers(1, 5),
    guesses=st.lists(st.integers(-9, 4000)),
)
def test_guesses_change_no_answer(numbers: range, limit: int, heads: int, guesses: list[int]) -> None:
    """Guesses, wrong or right, in the range or beyond, change no answer and cost a few judgements at most."""
    accepted, judged, left = [number for number in numbers if number % heads == 0], set[int](), iter(guesses)

    def judge(number: int) -> bool | None:
        judged.add(number)
        return number <= limit if number % heads == 0 else None

    found = edge(judge, numbers, lambda low: next(left, low))
    assert found.holds == max((number for number in accepted if number <= limit), default=None)
    assert found.fails == min((number for number in accepted if number > limit), default=None)
    if heads == 1:
        assert len(judged) <= 2 * len(numbers).bit_length() + 2 + 6


@given(limit=st.integers(1, 1 << 20), wrong=st.integers(-1, 1))
def test_a_good_guess_spares_the_search_for_the_edge(limit: int, wrong: int) -> None:
    """A guess that is one off leaves a few numbers to judge, each at most sixteen times the last true one."""
    judged: set[int] = set()

    def judge(number: int) -> bool:
        judged.add(number)
        return number <= limit

    assert edge(judge, range(1, 1 << 60), lambda _: limit + wrong) == (limit, limit + 1)
    assert len(judged) <= limit.bit_length() / 4 + 5
    assert max(judged) <= max(16 * limit, limit + 2)


def test_a_wild_guess_is_followed_in_steps() -> None:
    """Numbers far beyond the edge may be slow to judge: each is at most sixteen times the last that holds."""
    judged = list[int]()

    def judge(number: int) -> bool:
        judged.append(number)
        return number <= 100

    assert edge(judge, range(1, 100_000), lambda _: 90_000) == (100, 101)
    assert max(judged) <= 16 * 100


def test_a_guess_beyond_what_is_refused_hides_nothing() -> None:
    """If all numbers near a guess are refused, the numbers before it are still judged."""
    assert edge(lambda number: number <= 40 if number <= 60 else None, range(1, 1 << 20), lambda _: 900) == (
        40,
        41,
    )


@given(limit=st.integers(1, 1 << 20))
def test_few_are_judged(limit: int) -> None:
    """A search takes about twice the logarithm of the answer, each number counted once."""
    judged: set[int] = set()

    def judge(number: int) -> bool:
        judged.add(number)
        return number <= limit

    found = edge(judge, range(1, 1 << 60))
    assert found == (limit, limit + 1)
    assert len(judged) <= 2 * limit.bit_length() + 2
    assert max(judged) <= 2 * limit + 2


def test_a_model_that_refuses_everything_is_left_in_peace() -> None:
    """After a run of refusals the search stops, without an edge."""
    asked: list[int] = []
    assert edge(asked.append, range(1, 1 << 40)) == (None, None)  # append returns None: a refusal
    assert len(asked) == PATIENCE


def test_nothing_but_divisors() -> None:
    """If the accepted numbers end, as the divisors of a hidden size do, the last of them is the answer."""
    assert edge(lambda number: True if 24 % number == 0 else None, range(1, 1 << 20)) == (24, None)
