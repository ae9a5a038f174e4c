"""One reading of `Retry-After` for all clients: seconds, with or without a fraction, or a date; always finite."""

from __future__ import annotations

import pytest

from agentlightning.utils.backoff import LONGEST_RETRY_AFTER, retry_after_seconds

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
