"""The README's lines run as they stand, and a parameter moves."""

import re
from pathlib import Path
from typing import Any

import torch

README = Path(__file__).parents[3] / "packages" / "zero-optim-cpu" / "README.md"


def test_the_five_lines_run() -> None:
    code = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(code) == 1 and len([line for line in code[0].splitlines() if line.strip()]) == 5
    names: dict[str, Any] = {}
    exec(code[0], names)
    for parameter in names["model"].parameters():
        state = names["optimizer"].state[parameter]
        assert state["step"] == 1 and torch.count_nonzero(state["exp_avg"]) > 0
