"""The bill of model calls, and limits on their own."""

from __future__ import annotations

import json

import agentlightning as agl
from agentlightning.chat.bill import BillLine


def test_bills_are_merged_by_purpose_and_model() -> None:
    one, two = agl.Bill(), agl.Bill()
    one.add(BillLine("critique", "big", calls=2, retries=1, prompt_tokens=10, completion_tokens=5, cost=0.5))
    two.add(BillLine("critique", "big", calls=1, failed_calls=1, prompt_tokens=1, completion_tokens=1, cost=0.25))
    two.add(BillLine("edit", "small", calls=1, seconds=2.0))
    both = one.merge(two)
    assert [(line.purpose, line.model, line.calls) for line in both.lines] == [
        ("critique", "big", 3),
        ("edit", "small", 1),
    ]
    assert (both.calls, both.failed_calls, both.retries, both.requests, both.tokens) == (4, 1, 1, 6, 17)
    assert (both.cost, both.seconds) == (0.75, 2.0)
    assert str(both) == "4 calls, 1 failed, 1 retry, 11 + 6 tokens, cost 0.7500"
    assert one.calls == 2, "what is merged stays as it was"


def test_a_bill_goes_through_json_and_has_no_cost_where_a_model_has_no_price() -> None:
    bill = agl.Bill()
    bill.add(BillLine("critique", "priced", cost=1.0), BillLine("critique", "m", calls=3, seconds=1.5, cost=None))
    assert bill.cost is None
    assert agl.Bill.from_json(json.loads(json.dumps(bill.as_json()))) == bill
