"""The change test of tiers, from the command line: a YAML file of the user's names a class that no package knows."""

import re

import pytest

from tests.integration.zero_train.helpers import COMMON, trained
from zero_train.cli import app

DRAWER = """# @package _global_
offload:
  tiers:
    drawer:
      _target_: tests.conformance.zero_offload.test_new_tier.Drawer
      drawers: 65536
hardware:
  tiers:
    drawer: {gib: 0.5, read_gbps: 1, write_gbps: 1}
"""
PLACED = ("offload=host", "offload.parameters=drawer", "offload.optimizer={host: 0.5, drawer: 0.5}")


@pytest.fixture
def found(tmp_path):
    """The override that lets Hydra find the file."""
    (tmp_path / "conf" / "tier").mkdir(parents=True)
    (tmp_path / "conf" / "tier" / "drawer.yaml").write_text(DRAWER)
    return f"hydra.searchpath=[file://{tmp_path / 'conf'}]"


@pytest.mark.promise("tier-in-one-class", "compressed-memory")
@pytest.mark.parametrize("tier", ["drawer", "compressed"])
def test_a_file_and_a_class_are_a_tier_with_the_bits_of_host_memory(tmp_path, found, tier):
    """Fails if any package asked for a tier by name."""
    if tier == "compressed":
        pytest.importorskip("zstandard")
    all_there = ("offload=host", *(f"offload.{kind}={tier}" for kind in ("parameters", "gradients", "optimizer")))
    placed = PLACED if tier == "drawer" else all_there
    host = trained(tmp_path / "host", "offload=host", "run.steps=3")
    there = trained(tmp_path / "there", found, f"tier={tier}", *placed, "run.steps=3")
    assert there.losses == host.losses and there.digest == host.digest


@pytest.mark.promise("unknown-tier")
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("offload.tiers.drawer.drawers=1",), "bytes wanted, and there are 1 drawers"),
        (("offload.tiers.drawer._target_=no.such.Class",), "offload.tiers.drawer: No module named 'no'"),
        (("hardware.tiers.drawer.gib=0.0001",), "hardware.tiers.drawer.gib"),
        (("offload.optimizer=host", "offload.parameters=host"), "tier is given, but nothing uses it"),
    ],
)
def test_what_cannot_run_is_refused_by_one_line(tmp_path, found, capfd, words, text):
    code = app.main([*COMMON, found, "tier=drawer", *PLACED, *words, f"run.dir={tmp_path / 'run'}"])
    assert code == 2 and re.search(text, capfd.readouterr().err)
