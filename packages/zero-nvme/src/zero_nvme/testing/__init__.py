"""Tests slabs and files by conformance suites. Subclass them and provide the fixtures.

    class TestMySlab(SlabSuite):
        @pytest.fixture
        def make_slab(self, tmp_path):
            return lambda **options: MySlab(tmp_path, **options)     # Slab's keywords; closed by the suite

Needs pytest, which the package does not.
"""

from zero_nvme.testing.suites import FileSuite, SlabSuite

__all__ = ["FileSuite", "SlabSuite"]
