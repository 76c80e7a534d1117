"""Puts the Hydra tree into what is built: from the repository's root, or from the sdist that already carries it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ConfTree(BuildHookInterface):
    """Adds conf/ as `zero_train/conf` to a wheel, and as `conf` to an sdist; an editable install reads the root's."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the forced include; raises FileNotFoundError where neither place has the tree."""
        if version == "editable":
            return
        here = Path(self.root)
        tree = next((folder for folder in (here / "conf", here.parent.parent / "conf") if folder.is_dir()), None)
        if tree is None:
            raise FileNotFoundError(f"no conf/ beside {here} or at the root of its repository")
        if self.target_name == "wheel":
            build_data["force_include"][str(tree)] = "zero_train/conf"
        elif tree.parent != here:
            build_data["force_include"][str(tree)] = "conf"
