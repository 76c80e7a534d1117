"""PEFT's LoRA on stacked experts (`target_parameters`), a group at a time: PEFT's results, in a group's memory."""

import copy
import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zero_core.moe.expert_groups import find_stacks, make_groups, replace

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.promise("experts-lora")

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 16, "num_experts_per_tok": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2}
QWEN = transformers.Qwen3MoeConfig(**SIZES, intermediate_size=32, moe_intermediate_size=24, num_experts=8)
GPT_OSS = transformers.GptOssConfig(**SIZES, intermediate_size=24, num_local_experts=8, pad_token_id=0)
NAMES = ["experts.gate_up_proj", "experts.down_proj"]
IDS = torch.randint(2, 64, (2, 12), generator=torch.Generator().manual_seed(0))


def adapted(config=QWEN, implementation: str = "grouped_mm"):
    """A model with adapters on the parameters of its experts, whose values are not the initial zeros."""
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    make = transformers.AutoModelForCausalLM.from_config
    model = make(config, experts_implementation=implementation, attn_implementation="eager")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=NAMES))
    draw(model, "lora_")
    return model.eval()


def draw(model, of):
    for name, parameter in model.named_parameters():
        if of in name:
            torch.nn.init.normal_(parameter, 0, 0.2)


def in_groups(model, size: int = 3):
    found = {}
    for path, stack in find_stacks(model).items():
        edges = [(a, min(a + size, stack.experts)) for a in range(0, stack.experts, size)]
        found[path] = stack, make_groups(stack, edges)
        replace(stack, found[path][1], edges)
    assert len(found) == 2
    return found


def gradients(model):
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def same(ours, theirs):
    torch.testing.assert_close(ours[0], theirs[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(ours[1], theirs[1], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("config", [QWEN, GPT_OSS], ids=["rows", "transposed"])
def test_loss_and_gradients_of_adapters_are_pefts(config, implementation):
    model = adapted(config, implementation)
    twin = copy.deepcopy(model)
    in_groups(twin)
    expected = gradients(model)
    assert all(g.abs().max() > 0 for name, g in expected[1].items() if "experts" in name)
    same(gradients(twin), expected)


def test_adapters_that_are_off_or_several_or_merged():
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(r=2, target_parameters=NAMES))
    draw(model, "second")
    twin = copy.deepcopy(model)
    in_groups(twin)

    def compare():
        with torch.no_grad():
            wanted, found = (each(input_ids=IDS, use_cache=False).logits for each in (model, twin))
        torch.testing.assert_close(found, wanted)
        return round(float(wanted.sum()), 3)

    seen = {compare()}
    for adapters in ("second", ["default", "second"]):
        for each in (model, twin):
            each.base_model.set_adapter(adapters)
        seen.add(compare())
    with model.disable_adapter(), twin.disable_adapter():
        seen.add(compare())
    assert len(seen) == 4
    for each in (model, twin):
        each.merge_adapter()
    compare()


def test_also_where_the_experts_themselves_are_trained_or_blocks_are_recomputed():
    for recompute in (False, True):
        model = adapted()
        twin = copy.deepcopy(model)
        for each in (model, twin):
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(parameter.requires_grad or "down_proj" in name)
            if recompute:
                each.train()
                each.gradient_checkpointing_enable({"use_reentrant": False})
        groups = in_groups(twin)
        expected, found = gradients(model), gradients(twin)
        for path, (_, of_stack) in groups.items():
            cut = torch.cat([group.down_proj.grad for group in of_stack])
            found[1][f"{path}.down_proj"] = cut
        same(found, expected)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor)]
        fresh = [t.numel() for t in made if t._base is None and t.dim() == 3 and t.shape[-2:].numel() > 256]
        self.elements = max([self.elements, *fresh])
        return out


def test_what_adapters_add_is_made_for_one_group_and_not_kept():
    """PEFT makes the whole stack's before the stack runs, and autograd keeps it until backward."""
    model = adapted()
    groups = in_groups(model, size=1)
    stack, of_stack = next(iter(groups.values()))
    for group in of_stack:
        group.register_forward_hook(lambda *_: None)
    one = stack.module.gate_up_proj[0].numel()
    with Largest() as largest:
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        gc.collect()
        kept = [
            t for t in gc.get_objects()
            if isinstance(t, torch.Tensor) and t.dim() == 3 and t.numel() == one and t._base is None
            and t.shape[1:] == stack.module.gate_up_proj.shape[1:] and not isinstance(t, torch.nn.Parameter)
        ]  # fmt: skip
        assert not kept
        loss.backward()
    assert largest.elements <= one


def test_a_change_between_forward_and_backward_is_noticed_as_by_torch():
    model = adapted()
    in_groups(model)
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name and "lora_A" in name:
                parameter.add_(1)
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        loss.backward()


def test_tensors_that_are_saved_go_to_the_hooks_around():
    """Offloaded activations and non-reentrant checkpoints install such hooks, of which torch asks the innermost."""
    model = adapted()
    in_groups(model)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.shape, t.clone()), lambda kept: kept[1]):
        found = gradients(model)
    same(found, gradients(adapted()))
