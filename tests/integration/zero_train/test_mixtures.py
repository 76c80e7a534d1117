"""Mixtures of experts through zero-train: QLoRA beside TRL alone, and what runs of recipes hold beside their plans."""

import shutil

import pytest

pytest.importorskip("trl")

import signal

import torch
import transformers
from safetensors.torch import load_file

import zero_core
from tests.integration.zero_offload.test_plan_holds import compare
from tests.integration.zero_train.helpers import begun, printed
from tests.integration.zero_train.test_finetune import STEPS, chats, four_bits, losses, main, stock, words
from zero_core.moe.expert_groups import find_stacks
from zero_train.model import dtypes, pretrained
from zero_train.run import assemble, planning
from zero_train.run.ranks import Ranks
from zero_train.settings import compose

pytestmark = pytest.mark.usefixtures("own_cache")

EXPERTS = 8


@pytest.fixture(scope="module")
def mixture(model, tmp_path_factory):
    """A folder as `model`'s, with a mixture in it: an expert has 12,288 values."""
    folder = tmp_path_factory.mktemp("mixture")
    shutil.copytree(model, folder, dirs_exist_ok=True)
    vocabulary = transformers.AutoConfig.from_pretrained(model).vocab_size
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": EXPERTS, "num_experts_per_tok": 2}
    shape = {"head_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    made = transformers.Qwen3MoeConfig(**sizes, **shape, vocab_size=vocabulary)
    (folder / "model.safetensors").unlink()
    transformers.Qwen3MoeForCausalLM(made).save_pretrained(folder)
    return folder


def in_four_bits(folder):
    """transformers' model of 4 bits, whose stacks are quantised and dequantised as wholes."""
    bnb = pytest.importorskip("bitsandbytes")
    found = transformers.AutoModelForCausalLM.from_pretrained(folder, **four_bits())
    for parameter in (p for stack in find_stacks(found).values() for p in stack.parameters.values()):
        packed, state = bnb.functional.quantize_4bit(parameter.data, blocksize=64, quant_type="nf4")
        parameter.data = bnb.functional.dequantize_4bit(packed, state)
    return found


@pytest.mark.promise("recipes-mixtures")
@pytest.mark.parametrize("targets", ["all-linear", "[q_proj,v_proj]"])
def test_a_qlora_of_a_mixture_has_the_losses_of_trl_over_dequantised_stacks(mixture, tmp_path, targets):
    """Fails if experts are quantised in another way, or adapters of the experts see other values. Host and NVMe have
    the same bits."""

    data = chats(tmp_path / "chats.jsonl")
    adapted = {} if targets == "all-linear" else {"target_modules": targets.strip("[]").split(",")}
    wanted = stock(mixture, tmp_path / "stock", data, adapter="qlora", network=in_four_bits(mixture), **adapted)
    found = {}
    for place in ("host", "nvme"):
        more = ("adapter=qlora", "adapter.rank=4", f"adapter.targets={targets}", f"offload={place}")
        more += ("zero.expert_bytes=150000", "io.allow_memory=true")
        assert main(words(mixture, data, tmp_path / place, *more)) == 0
        found[place] = losses(tmp_path / place)
    assert len(wanted) == STEPS and wanted[-1] < wanted[0]
    assert found["nvme"] == found["host"] == pytest.approx(wanted, rel=1e-4, abs=0)


@pytest.mark.promise("recipes-mixtures")
@pytest.mark.parametrize(
    ("recipe", "place"),
    [
        ("lora_30b_a3b_1x24gib", "host"),
        ("qlora_30b_a3b_laptop_16gib", "nvme"),
        ("full_moe_4b_16gib", "nvme"),
        ("lora_deepseek_v3_8x80gib", "nvme"),
    ],
)
def test_a_scaled_down_run_of_a_recipe_holds_what_is_planned_from_its_config(recipe, place, mixture, tmp_path):
    """Fails if the plan, from config.json alone, cuts experts into other groups, or packs them into other bytes."""
    if recipe.startswith("qlora"):
        pytest.importorskip("bitsandbytes")
    given = [f"recipe={recipe}", "hardware=detect", f"offload={place}", "io.allow_memory=true", "offload.slots=6"]
    given += [f"run.dir={tmp_path}", f"model.path={mixture}", "zero.expert_bytes=50000", "run.micro_batch=1"]
    if "deepseek" in recipe:
        given.append("adapter.targets=[q_proj,v_proj]")
    plans = []
    for dry in ("true", "false"):
        composed = compose.compose([*given, f"run.dry={dry}"])
        dtypes.resolve(composed, torch.device("cpu"))
        draft = assemble.draft(composed, model=pretrained.build(mixture, composed))
        plans.append(planning.make(composed, draft.model, Ranks(), draft.step))
    with assemble.assembled(draft, plans[0], composed, Ranks(), clips=False, steady=False) as ready:
        names = [unit.name for unit in zero_core.units(ready.model) if "experts[" in unit.name]
        assert len({name.split("]")[0] for name in names}) == 2 * EXPERTS / 2
        compare(plans[0], ready.store.describe())
        tokens = torch.arange(16).view(1, 16)
        for _ in range(2):
            ready.model(input_ids=tokens, labels=tokens).loss.backward()
            ready.optimizer.step()
            ready.optimizer.zero_grad()
        ready.wait()
        assert ready.store.stats()["host_bytes"] == plans[0].total("host")


@pytest.mark.promise("mixture-killed", "finetune-killed")
@pytest.mark.parametrize("dense", [False, True])
def test_a_run_that_was_killed_or_interrupted_ends_in_the_same_bits(dense, model, mixture, tmp_path):
    """kill -9 after step 5, then Ctrl-C after step 7; the checkpoints are of steps 3, 6 and the one of Ctrl-C.

    Fails if experts in groups go on with values of another step, or of another expert.
    """
    data, network = chats(tmp_path / "chats.jsonl"), model if dense else mixture
    more = ["offload=nvme", "io.allow_memory=true", "run.checkpoint_every=3"]
    more += [] if dense else ["zero.expert_bytes=150000"]
    assert main(words(network, data, tmp_path / "whole", *more)) == 0
    given = words(network, data, tmp_path / "stopped", *more, "run.resume=auto")
    for until, number, codes in (
        ("step 5/", signal.SIGKILL, [-signal.SIGKILL]),
        ("step 7/", signal.SIGINT, [130, 0]),  # 0: it was the last step's turn already
    ):
        printed(process := begun(tmp_path, *given), until, number)
        assert process.returncode in codes
    for _ in range(2):  # the second time, nothing is left to train
        assert main(given) == 0
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    whole, stopped = (load_file(tmp_path / name / "pretrained" / "model.safetensors") for name in ("whole", "stopped"))
    assert dense or len(whole) > 2 * EXPERTS
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
