"""Checks for protocols and aggregators, yours included: they are driven through random rounds and steps.

    from safa.testing import check_aggregator, check_protocol
    from my_package import MyAggregator, MyProtocol

    def test_my_protocol() -> None:
        check_protocol(lambda sizes: MyProtocol(sizes, fraction=0.3))

    def test_my_aggregator() -> None:
        check_aggregator(lambda: MyAggregator(strength=0.3))

Every check raises `AssertionError` with a sentence that says which promise was broken, and after which seed.
"""

from safa.testing.aggregators import TakenStep, check_aggregator
from safa.testing.conformance import (
    check_protocol,
    check_record_so_far,
    check_refusals,
    check_rounds,
    check_splitting,
    check_work,
)

__all__ = [
    "TakenStep",
    "check_aggregator",
    "check_protocol",
    "check_record_so_far",
    "check_refusals",
    "check_rounds",
    "check_splitting",
    "check_work",
]
