"""Checks for protocols, yours included: `check_protocol` drives one through random rounds and asserts the contract.

    from safa.testing import check_protocol
    from my_package import MyProtocol

    def test_my_protocol() -> None:
        check_protocol(lambda sizes: MyProtocol(sizes, fraction=0.3))

Every check raises `AssertionError` with a sentence that says which promise was broken, and after which seed.
"""

from safa.testing.conformance import check_protocol, check_refusals, check_rounds, check_splitting

__all__ = ["check_protocol", "check_refusals", "check_rounds", "check_splitting"]
