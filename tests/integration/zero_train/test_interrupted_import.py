"""Ctrl-C while the commands import torch: exit code 130 and one line, even where a library catches everything."""

import subprocess
import sys

import pytest

FINDER = """
import os, runpy, signal, sys

class Pressing:
    def find_spec(self, name, *_):
        if name == "torch":
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                pass  # as a library does that tries whether another one is there

sys.meta_path.insert(0, Pressing())
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[1:] = {words}
runpy.run_module("{module}", run_name="__main__")
"""


@pytest.mark.promise("ctrl-c-import")
@pytest.mark.parametrize(("module", "words"), [("zero_train", ["recipe=tiny", "run.dry=true"]), ("zero_hf", ["merge"])])
def test_ctrl_c_while_torch_is_imported_ends_the_command_with_one_line(tmp_path, module, words):
    """Fails if torch is imported before the command answers Ctrl-C, or if the command goes on or prints more."""
    pytest.importorskip(module)
    program = FINDER.format(module=module, words=words)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "interrupted\n", "")


def test_a_mistyped_key_costs_no_import_of_torch():
    program = "import sys; from zero_train.cli.app import main; print(main(['run.stepps=3']), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "2 False\n" and "did you mean 'run.steps'?" in done.stderr
