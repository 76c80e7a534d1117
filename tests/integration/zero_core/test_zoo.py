"""The zoo's models of torch and transformers, four steps beside plain torch: `nox -s zoo` trains those of all packages.

A test fails if a way into a model besides its call meets memory that is not there, or an old value.
"""

import pytest

from tests.zoo.models import ZOO
from tests.zoo.one import compared

HERE = [name for name, entry in ZOO.items() if entry.package.split("==")[0] in ("torch", "transformers")]


@pytest.mark.promise("zoo")
@pytest.mark.parametrize("name", HERE)
def test_a_model_trains_as_plain_torch(name):
    told = compared(name)
    assert told["result"] == "equal", told["told"]


def test_there_are_as_many_models_and_packages_as_the_page_says():
    assert len(HERE) == 7
    assert len(ZOO) == 40
    assert len({entry.package for entry in ZOO.values()}) == 32
