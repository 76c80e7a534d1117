"""Errors of a run. Fails if a chain of causes that leads back to itself is followed for ever."""

from zero_train.errors import chain


def test_a_chain_that_leads_back_to_itself_ends():
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__context__ = second, first
    assert list(chain(first)) == [first, second]
    assert list(chain(second)) == [second, first]
