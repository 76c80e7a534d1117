"""Whether a value changed: counts of changes, stamps of several values, and autograd's own counter."""

import torch

from zero_core.runtime.versions import Stamp, Version


def test_a_stamp_is_current_until_one_of_its_values_changes():
    versions = [Version(), Version()]
    both, first = Stamp(versions), Stamp(versions[:1])
    versions[1].wrote()
    assert not both.current() and both.alive()
    assert first.current() and first.alive()


def test_a_value_that_ended_has_changed():
    version = Version()
    stamp = Stamp([version])
    version.ended()
    assert not stamp.current() and not stamp.alive()


def test_who_writes_himself_renews_his_own_stamp_alone():
    version = Version()
    mine, other = Stamp([version]), Stamp([version])
    version.wrote()
    mine.renew()
    assert mine.current() and not other.current()


def test_a_write_that_autograd_does_not_count_moves_its_counter():
    weight = torch.ones(2, requires_grad=True)
    product = (weight * weight).sum()
    Version().wrote()
    Version().wrote(weight)
    try:
        product.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        raise AssertionError("autograd did not see the change")
