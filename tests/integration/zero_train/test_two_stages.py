"""task=sft, task=dpo on what it merged, and generate: TRL's losses and its answer; which folder a stage takes."""

import shlex

import pytest

pytest.importorskip("trl")

from examples.two_stages import QUESTION
from tests.integration.zero_train import two_stages
from tests.integration.zero_train.test_finetune import (  # noqa: F401
    _cache,
    chats,
    losses,
    model,
)
from zero_hf import commands
from zero_train.cli.app import main

pytestmark = pytest.mark.promise("two-stage-commands")

STEPS = 6


def test_two_commands_have_the_losses_of_trl_alone_and_its_answer(model, tmp_path, capsys):  # noqa: F811
    """Fails if a stage begins with other values than the one before has merged, or an answer is another model's."""
    wanted, answer = two_stages.alone(tmp_path, model, STEPS)
    begun, data = model, dict(zip(("sft", "dpo"), two_stages.rows(tmp_path), strict=True))
    for task, file in data.items():
        line = two_stages.words(task, begun, file, tmp_path / task, STEPS, "offload=nvme", "io.allow_memory=true")
        assert main([*line, "run.threads=1"]) == 0
        assert losses(tmp_path / task) == pytest.approx(wanted[task], rel=1e-5, abs=0)
        begun = tmp_path / task / "merged"
    for folder in (tmp_path / "dpo", begun):  # with the adapter beside what SFT has merged, and merged
        capsys.readouterr()
        assert main(["generate", f"run.dir={folder}", f"generate.prompt={QUESTION}", "generate.tokens=24"]) == 0
        assert capsys.readouterr().out.strip() == answer


@pytest.mark.advice(
    "is the folder of a run; name its exported model",
    "name {}, which has both",
    "write both as one model with `zero-hf merge",
)
def test_a_stage_takes_the_folder_that_it_is_told(model, tmp_path, capsys):  # noqa: F811
    """Fails if a run folder or an adapter, given as a model, ends in a message that leads nowhere."""
    data = chats(tmp_path / "chats.jsonl")

    def checked(folder, *more):
        line = two_stages.words("sft", folder, data, tmp_path / "next", 1, "offload=host", "run.dry=true", *more)
        code = main(line)
        return code, capsys.readouterr().err

    def trained(name, adapted):
        line = two_stages.words("sft", model, data, tmp_path / name, 1, "offload=host", "run.threads=1")
        left_out = "adapter.merge=" if adapted else "adapter"
        assert main([word for word in line if not word.startswith(left_out)]) == 0
        return tmp_path / name

    whole = trained("whole", adapted=False)
    code, said = checked(whole)
    assert code == 2 and f"is the folder of a run; name its exported model, {whole / 'pretrained'}" in said
    assert checked(whole / "pretrained")[0] == 0
    alone = trained("alone", adapted=True)
    for given in (alone, alone / "pretrained"):
        code, said = checked(given)
        assert code == 2 and f"model.path={given} has an adapter, and not the model" in said
        command = said.partition("`")[2].partition("`")[0]
    assert commands.main(shlex.split(command)[1:]) == 0
    assert checked(said.strip().rpartition(" and name ")[2])[0] == 0
    code, said = checked(alone)
    assert code == 2 and f"name {alone / 'merged'}, which has both" in said
