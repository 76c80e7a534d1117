"""task=sft, task=dpo on what it merged, and generate: TRL's losses and its answer; which folder a stage takes."""

import shlex

import pytest

pytest.importorskip("trl")

import peft
import transformers

import zero_core
from examples.two_stages import QUESTION, answer, lora
from tests.integration.zero_train.test_finetune import chats, losses, preferences, stock, words
from zero_hf import commands
from zero_train.cli.app import main
from zero_train.model import pretrained
from zero_train.settings import compose

pytestmark = [pytest.mark.promise("two-stage-commands"), pytest.mark.usefixtures("own_cache")]

ADAPTED = ("adapter=lora", "adapter.rank=8", "adapter.alpha=16", "adapter.merge=true")


def adapted(network, folder, line):
    """`network` with adapters, whose values are those with which the run of this command begins."""
    drawn = pretrained.build(folder, compose.compose(line))
    zero_core.materialise(drawn)
    values = {name: value for name, value in drawn.state_dict().items() if "lora_" in name}
    network = peft.get_peft_model(network, lora())
    assert values and not network.load_state_dict(values, strict=False).unexpected_keys
    return network


def test_two_commands_have_the_losses_of_trl_alone_and_its_answer(model, tmp_path, capsys):
    """Fails if a stage begins with other values than the one before has merged, or an answer is another model's."""
    begun, network = model, transformers.AutoModelForCausalLM.from_pretrained(model)
    for task, rows in (("sft", chats), ("dpo", preferences)):
        data = rows(tmp_path / f"{task}.jsonl")
        line = words(begun, data, tmp_path / task, *ADAPTED, "offload=nvme", "io.allow_memory=true", task=task)
        network = adapted(network, model, line)
        wanted = stock(model, tmp_path / "alone", data, task, network=network)
        network = network.merge_and_unload()
        assert main(line) == 0
        assert losses(tmp_path / task) == pytest.approx(wanted, rel=1e-5, abs=0)
        begun = tmp_path / task / "merged"
    said = answer(network, transformers.AutoTokenizer.from_pretrained(model))
    for folder in (tmp_path / "dpo", begun):  # with the adapter beside what SFT has merged, and merged
        capsys.readouterr()
        assert main(["generate", f"run.dir={folder}", f"generate.prompt={QUESTION}", "generate.tokens=24"]) == 0
        assert capsys.readouterr().out.strip() == said


@pytest.mark.advice(
    "is the folder of a run; name its exported model",
    "name {}, which has both",
    "write both as one model with `zero-hf merge",
)
def test_a_stage_takes_the_folder_that_it_is_told(model, tmp_path, capsys):
    """Fails if a run folder or an adapter, given as a model, ends in a message that leads nowhere."""
    data = chats(tmp_path / "chats.jsonl")

    def checked(folder, *more):
        code = main(words(folder, data, tmp_path / "next", *ADAPTED, "offload=host", "run.dry=true", *more))
        return code, capsys.readouterr().err

    def trained(name, adapted):
        assert main(words(model, data, tmp_path / name, "offload=host", *(ADAPTED[:3] if adapted else ()))) == 0
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
