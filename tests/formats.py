"""Which files of other libraries are read and written, on one rank and on two: runs the tests that compare values.

    python -m tests.formats          all; writes docs/formats.md

A cell says "equal" if its tests passed: the losses, weights or bits of the other library. "skipped" names what a test
lacks. DeepSpeed and PEFT's beginnings need the packages that `nox -s formats` installs.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

PAGE = Path(__file__).parents[1] / "docs" / "formats.md"
HEAD = """\
# Formats of other libraries

`nox -s formats` wrote this page. Each cell is a test on that number of ranks against the library itself. A format is
read if the run goes on with the library's next losses, or with its weights, and written if the library goes on so
with ours. A dash: not done. DeepSpeed's files are those of two ranks. Adapters that began as EVA, CorDA, LoftQ or
LoRA-GA are not in it: they need data, or a quantised base, to begin.
"""
COLUMNS = ("read, 1 rank", "read, 2 ranks", "written, 1 rank", "written, 2 ranks")
ONE = "tests/unit/zero_core/test_checkpoint.py::"
WORLDS = "tests/integration/zero_core/test_checkpoint_worlds.py::"
DEEPSPEED = "tests/integration/zero_deepspeed/test_checkpoints.py::test_the_next_ten_losses_are_deepspeeds"
HF = "tests/integration/zero_hf/test_"
STOCK = f"{HF}trainer_checkpoints.py::test_a_checkpoint_of_the_stock_trainer_is_resumed_with_its_moments"
ACCELERATE = (
    f"{HF}accelerate_resume.py::test_a_run_of_stock_accelerate_goes_on_sharded",
    f"{HF}accelerate.py::test_weights_are_saved_as_stock_saves_them",
)
BEGUN = f"{HF}trainer_peft.py::test_an_adapter_of_each_beginning_is_read_and_written_as_in_the_stock_trainer"
BEGINNINGS = ("True", "False", "gaussian", "orthogonal", "mica", "pissa", "pissa_niter_4", "olora")


def both(test: str, case: str) -> tuple[str, ...]:
    """The cases of a test that reads and writes, for the four columns."""
    return (f"{test}[1-{case}]", f"{test}[2-{case}]") * 2


ROWS: dict[str, tuple[str | None, ...]] = {  # the tests of each column; None: not done
    "zero_core.checkpoint": (
        f"{WORLDS}test_four_ranks_stage_3_load_anywhere[1-3]",
        f"{WORLDS}test_four_ranks_stage_3_load_anywhere[2-2]",
        f"{ONE}test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit[adamw-dtype0]",
        f"{WORLDS}test_the_same_world_and_stage_resume_bit_for_bit[1-None]",
    ),
    "torch.distributed.checkpoint, FSDP2": both(f"{WORLDS}test_and_in_fsdp2_and_back", "False"),
    "the same, flattened": both(f"{WORLDS}test_and_in_fsdp2_and_back", "True"),
    "torchtitan's keys": (*(f"{ONE}test_flattened_options_are_read_and_written_as_torch_does[torchtitan]", None) * 2,),
    **{
        f"DeepSpeed, stage {stage}": (*(f"{DEEPSPEED}[2-{stage}-{size}]" for size in (1, 2)), None, None)
        for stage in (1, 2, 3)
    },
    "transformers' Trainer": (
        f"{STOCK}[1]",
        f"{STOCK}[2]",
        f"{HF}trainer_checkpoints.py::test_what_is_saved_is_what_transformers_loads",
        f"{HF}trainer_checkpoints.py::test_at_another_world_size_it_goes_on_with_the_states_that_were_saved",
    ),
    "accelerate": tuple(f"{test}[{size}]" for test in ACCELERATE for size in (1, 2)),
    **{f"PEFT, init_lora_weights={init}": both(BEGUN, init) for init in BEGINNINGS},
}


def outcomes(tests: list[str]) -> dict[str, str]:
    """Runs the tests. Returns for each "equal", "differs", or why it was skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        subprocess.run([*command, *tests], check=False)
        found = {}
        for case in ElementTree.parse(report).iter("testcase"):
            said = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
            told = "equal" if said is None else "differs"
            if said is not None and said.tag == "skipped":
                told = f"skipped: {said.get('message')}"
            found[f"{case.get('file')}::{case.get('name')}"] = told
    return found


def page(found: dict[str, str]) -> str:
    """The Markdown of docs/formats.md."""
    lines = [HEAD, f"| format | {' | '.join(COLUMNS)} |", f"|{'---|' * (len(COLUMNS) + 1)}"]
    for name, tests in ROWS.items():
        cells = ["-" if test is None else found.get(test, "not found") for test in tests]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    wanted = list(dict.fromkeys(test for tests in ROWS.values() for test in tests if test is not None))
    PAGE.write_text(page(outcomes(wanted)), encoding="utf-8")
