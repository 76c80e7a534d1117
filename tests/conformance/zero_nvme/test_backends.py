"""Every backend, with and without O_DIRECT, on one path and striped over several, through suites.py."""

import pytest

import zero_nvme
from tests.conformance.zero_nvme.suites import FileSuite, SlabSuite

pytestmark = pytest.mark.promise("slab-protocol")


class TestSlab(SlabSuite):
    @pytest.fixture
    def make_slab(self, variant, tmp_path):
        return lambda **options: zero_nvme.Slab(tmp_path, **{**variant, **options})


class TestStripedSlab(SlabSuite):
    @pytest.fixture
    def make_slab(self, variant, tmp_path):
        folders = [tmp_path / name for name in ("a", "b", "c")]
        for folder in folders:
            folder.mkdir()
        return lambda **options: zero_nvme.Slab(folders, **{"weights": [2, 1, 1], **variant, **options})


class TestFile(FileSuite):
    @pytest.fixture
    def open_file(self, variant):
        return lambda *arguments, **options: zero_nvme.File(*arguments, **{**variant, **options})
