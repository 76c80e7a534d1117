"""No code asks for a tier by its name, but for the modules that are listed here with the reason."""

import ast
from pathlib import Path

PACKAGES = Path(__file__).parents[2] / "packages"
NAMES = {"device", "host", "nvme"}
SETTINGS, PUBLIC = "keys of settings", "names and defaults that users know"
ALLOWED = {
    "zero_offload/tier": "here the names are given",
    "zero_offload/planning/hardware": SETTINGS,
    "zero_offload/planning/probing": SETTINGS,
    "zero_offload/planning/planner": PUBLIC,
    "zero_offload/store/arguments": PUBLIC,
    "zero_offload/store/tiered_store": PUBLIC,
    "zero_offload/memory/transfers": PUBLIC,
    "zero_offload/activations/__init__": PUBLIC,
    "zero_hf/config": SETTINGS,
    "zero_hf/sharding": PUBLIC,
    "zero_hf/trainer/adam_8bit": SETTINGS,
    "zero_hf/trainer/trl": PUBLIC,
    "zero_deepspeed/keys": SETTINGS,
    "zero_deepspeed/translation": SETTINGS,
    "zero_deepspeed/sharding": SETTINGS,
    "zero_train/settings/checks": SETTINGS,
    "zero_train/run/assemble": PUBLIC,
    "zero_train/settings/extras": "names of extras",
    "zero_train/tune/finetune": SETTINGS,
    "zero_train/model/dtypes": SETTINGS,
    "zero_train/settings/placement": SETTINGS,
    "zero_train/run/planning": SETTINGS,
    "zero_train/report/picture": PUBLIC,
    "zero_train/schema": SETTINGS,
    "zero_train/run/train": SETTINGS,
    "zero_train/cli/unused_keys": SETTINGS,
}


def named(text: str) -> set[str]:
    """The tiers that a module names: as a string, or nvme as `Tier.NVME`. Docstrings do not count.

    `Tier.DEVICE` and `Tier.HOST` are the two memories that there always are, as `torch.device("cpu")` is.
    """
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and node.value in NAMES:
            found.add(node.value)
        if isinstance(node, ast.Attribute) and node.attr == "NVME":
            found.add("nvme")
    return found


def modules() -> dict[str, Path]:
    roots = [PACKAGES / f"zero-{name}" / "src" for name in ("offload", "deepspeed", "hf", "train")]
    return {path.relative_to(root).with_suffix("").as_posix(): path for root in roots for path in root.rglob("*.py")}


def test_only_listed_modules_name_a_tier() -> None:
    naming = {name for name, path in modules().items() if named(path.read_text(encoding="utf-8"))}
    assert naming == set(ALLOWED)
