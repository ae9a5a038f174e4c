"""`Retry-After` read in one way by all clients, and when something that does not answer is given up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agentlightning.utils.backoff import LONGEST_RETRY_AFTER, Outage, retry_after_seconds

UNREADABLE = ("inf", "Infinity", "-inf", "nan", "1e400", "9" * 400, "0x10", "", "soon", "\x80\xff", ",,,")
ODD_DATES = ("Fri, 31 Dec 99999 23:59:59 GMT", "Fri, 31 Foo 2030 25:61:61 GMT", "Thu, 1 Jan 1970 00:00:00 +999999999")


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        *[(None, None), ("7", 7.0), (" 7 ", 7.0), ("2.5", 2.5), ("-1", 0.0), ("-0", 0.0)],
        *[("1e308", LONGEST_RETRY_AFTER), ("86401", LONGEST_RETRY_AFTER)],
        *[("Thu, 01 Jan 1970 00:00:00 GMT", 0.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0)],
        ("Fri, 31 Dec 9999 23:59:59 GMT", LONGEST_RETRY_AFTER),
        *[(value, None) for value in (*UNREADABLE, *ODD_DATES)],
    ],
)
def test_a_time_to_wait_is_read_as_seconds_or_as_a_date_and_is_finite(
    header: str | None, seconds: float | None
) -> None:
    assert retry_after_seconds(header) == seconds


class Clock:
    """Stands where it is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def failed_tries(outage: Outage, clock: Clock, *, seconds: float, pause: float = 0.0) -> Callable[[], bool]:
    """Return a function that lets a try of so many seconds fail, and says whether it is given up."""

    def fail() -> bool:
        began = clock.now
        outage.expect(seconds)
        clock.now += seconds
        given_up = outage.failed(began, pause)
        clock.now += pause
        return given_up

    return fail


def test_an_outage_is_several_failed_tries_over_the_whole_time() -> None:
    clock = Clock()
    fail = failed_tries(Outage(60, clock), clock, seconds=10.0, pause=2.0)
    assert [fail() for _ in range(5)] == [False, False, False, False, True]


def test_one_failed_try_is_no_outage_however_long_it_took() -> None:
    clock = Clock()
    outage = Outage(60, clock)
    fail = failed_tries(outage, clock, seconds=70.0)
    assert [fail(), fail()] == [False, True]


def test_an_answer_ends_an_outage() -> None:
    clock = Clock()
    outage = Outage(60, clock)
    fail = failed_tries(outage, clock, seconds=25.0)
    fails = [fail(), fail()]
    outage.answered()
    assert ([*fails, fail(), fail(), fail()], outage.tries) == ([False, False, False, False, True], 3)


@pytest.mark.parametrize("where", ["within a try", "within a pause"])
def test_a_process_that_stood_still_begins_the_outage_anew(where: str) -> None:
    clock = Clock()
    outage = Outage(60, clock)
    fail = failed_tries(outage, clock, seconds=10.0)
    assert [fail() for _ in range(5)] == [False] * 5
    if where == "within a try":
        began = clock.now
        outage.expect(10.0)
        clock.now += 90.0
        assert not outage.failed(began), "the try took 80 seconds longer than it may"
    else:
        clock.now += 90.0
    assert [fail() for _ in range(6)] == [False] * 5 + [True], "the whole time again"


def test_each_try_gets_twice_the_time_of_the_one_before_and_all_fill_the_whole() -> None:
    clock = Clock()
    outage = Outage(60, clock)
    limits: list[float] = []
    for _ in range(3):
        limits.append(outage.try_seconds)
        failed_tries(outage, clock, seconds=limits[-1])()
    assert limits == [10.0, 20.0, 30.0]
