"""moe/expert_groups.py: which modules are stacks, how they are cut, and that groups compute what the stack does."""

import copy
import itertools
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero_core import ZeroError
from zero_core.moe.expert_groups import find_lists, find_stacks, make_groups, replace, restore, run_groups
from zero_core.moe.nested_checkpoint import Hooks, Part

pytestmark = pytest.mark.promise("experts-groups")

transformers = pytest.importorskip("transformers")

from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts  # noqa: E402

EXPERTS, WIDTH = 6, 16


def experts(implementation: str = "eager", kind: type[nn.Module] = Qwen3MoeExperts) -> nn.Module:
    sizes = {"hidden_size": WIDTH, "moe_intermediate_size": 8, "intermediate_size": 8}
    if kind is GptOssExperts:
        config = transformers.GptOssConfig(num_local_experts=EXPERTS, **sizes)
    else:
        config = transformers.Qwen3MoeConfig(num_experts=EXPERTS, **sizes)
    config._experts_implementation = implementation
    torch.manual_seed(0)
    made = kind(config)
    for parameter in made.parameters():
        nn.init.normal_(parameter, 0, 0.3)
    return made


def batch(index: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    chosen = torch.tensor(index)
    return torch.randn(len(index), WIDTH, requires_grad=True), chosen, torch.rand(chosen.shape, requires_grad=True)


ONE_UNUSED = [[0, 1], [5, 0], [1, 4], [4, 4], [0, 5]]  # nobody asks for 2 and 3; one token asks twice for 4


def grouped(stack_module: nn.Module, sizes: tuple[int, ...]) -> tuple[tuple[nn.Module, ...], list[tuple[int, int]]]:
    stack = find_stacks(stack_module)[""]
    edges = list(pairwise([sum(sizes[:n]) for n in range(len(sizes) + 1)]))
    return make_groups(stack, edges), edges


def everything(run, module, groups, x, index, weights):
    """The result and all gradients of one forward and backward."""
    y = run(x, index, weights)
    y.square().sum().backward()
    names = [name for name, _ in module.named_parameters()]
    if groups:
        stacked = [torch.cat([g._parameters[name].grad for g in groups]) for name in names]
    else:
        stacked = [p.grad for p in module.parameters()]
    return [y.detach(), x.grad, weights.grad, *stacked]


NO_EXPERT = [[0, EXPERTS], [EXPERTS, 3], [EXPERTS, EXPERTS], [2, 5]]


@pytest.mark.parametrize(
    ("kind", "implementation", "sizes", "slots"),
    [
        *itertools.product(
            [Qwen3MoeExperts, GptOssExperts],
            ["eager", "batched_mm", "grouped_mm"],
            [(6,), (3, 3), (2, 2, 2), (1,) * 6],
            [ONE_UNUSED],
        ),
        (Qwen3MoeExperts, "eager", (2, 2, 2), NO_EXPERT),
    ],
)
def test_groups_compute_what_the_stack_does(kind, implementation, sizes, slots):
    """The eager forward of transformers drops the index that is one past the last expert: it adds nothing."""
    module = experts(implementation, kind)
    twin = copy.deepcopy(module)
    expected = everything(twin, twin, None, *batch(slots))
    groups, edges = grouped(module, sizes)
    found = everything(lambda *given: run_groups(groups, edges, *given), module, groups, *batch(slots))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


NONE = torch.zeros(0, WIDTH), torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2)


@pytest.mark.parametrize("trained", [True, False])
def test_a_group_without_tokens_has_zeros_as_gradients_and_its_hooks_run_forward_and_backward(trained):
    """Also where only the inputs are trained, else ranks that have tokens for it would wait; and without any token."""
    groups, edges = grouped(experts().requires_grad_(trained), (2, 2, 2))
    seen = []
    for at, group in enumerate(groups):
        group.register_forward_hook(lambda *_, at=at: seen.append(at))
        group.register_full_backward_hook(lambda *_, at=at: seen.append(at))
    run_groups(groups, edges, *batch(ONE_UNUSED)).sum().backward()
    assert seen == [0, 1, 2, 2, 1, 0]
    if trained:
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in groups[1].parameters())
        for cut in ((6,), (2, 2, 2)):
            groups, edges = grouped(experts(), cut)
            y = run_groups(groups, edges, *NONE)
            y.sum().backward()
            assert y.shape == (0, WIDTH)
            assert all(torch.equal(p.grad, torch.zeros_like(p)) for group in groups for p in group.parameters())


def test_a_negative_index_is_refused():
    groups, edges = grouped(experts(), (3, 3))
    with pytest.raises(ZeroError, match=r"top_k_index has negative entries \(1 of 4\)"):
        run_groups(groups, edges, *batch([[0, -1], [1, 2]]))


def test_without_gradients_only_the_groups_that_are_wanted_are_called():
    module = experts()
    groups, edges = grouped(module, (2, 2, 2))
    called, told = [], []
    for at, group in enumerate(groups):
        group.register_forward_hook(lambda *_, at=at: called.append(at))
    given = batch(ONE_UNUSED)
    with torch.no_grad():
        expected = module(*given)
        for also in (False, True):

            def agree(here, also=also):
                told.append(here)
                return [each or also for each in here]

            torch.testing.assert_close(run_groups(groups, edges, *given, agree), expected, atol=1e-6, rtol=1e-5)
    assert told == [[True, False, True]] * 2 and called == [0, 2, 0, 1, 2]


class Block(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.experts = module


def test_groups_are_in_no_tree_and_the_forward_can_be_given_back():
    """What is set on the stack later, its implementation and its mode, holds in its groups."""

    def names():
        return [list(model.state_dict()), *([n for n, _ in f()] for f in (model.named_parameters, model.named_modules))]

    model = Block(experts())
    before = names()
    stack = find_stacks(model)["experts"]
    edges = stack.cut(1)
    assert edges == [(n, n + 1) for n in range(EXPERTS)]
    groups = make_groups(stack, edges)
    x, index, weights = batch(ONE_UNUSED)
    expected = model.experts(x, index, weights)
    replace(stack, groups, edges)
    called = []
    groups[0].register_forward_hook(lambda *_: called.append(0))
    torch.testing.assert_close(model.experts(x, top_k_weights=weights, top_k_index=index), expected)
    assert called == [0]
    assert names() == before
    assert list(find_stacks(model)) == ["experts"]
    model.eval()
    model.experts.config._experts_implementation = "nothing that exists"
    with pytest.raises(KeyError, match="nothing that exists"):
        model.experts(x, index, weights)
    assert not any(group.training for group in groups)
    model.experts.config._experts_implementation = "eager"
    restore(stack)
    assert torch.equal(model.experts(x, index, weights), expected)
    assert called == [0] and "forward" not in model.experts.__dict__


@pytest.mark.parametrize(
    ("budget", "sizes"), [(1, [1] * 6), (3 * 1536, [3, 3]), (4 * 1536, [3, 3]), (5 * 1536, [3, 3]), (10**9, [6])]
)
def test_cut_makes_as_few_groups_as_the_budget_allows_and_their_sizes_differ_by_one_at_most(budget, sizes):
    module = experts()
    assert sum(p.nbytes for p in module.parameters()) == EXPERTS * 1536
    assert [b - a for a, b in find_stacks(module)[""].cut(budget)] == sizes


class Sorted(Qwen3MoeExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states.sort(0).values


def left_whole() -> dict[str, nn.Module]:
    replaced = experts()
    replaced.forward = lambda *_: None
    parallel = experts()
    parallel._is_expert_parallel = True
    tied = nn.ModuleList([experts(), experts()])
    tied[1].down_proj = tied[0].down_proj
    unsure, alone = (
        Qwen3MoeExperts(transformers.Qwen3MoeConfig(hidden_size=6, moe_intermediate_size=8, num_experts=number))
        for number in (6, 1)
    )
    unsure.register_buffer("scale", torch.ones(6))  # one for each expert, or one for each feature?
    own = Sorted(experts().config)
    return {"own": own, "replaced": replaced, "parallel": parallel, "tied": tied, "unsure": unsure, "alone": alone}


@pytest.mark.parametrize("why", list(left_whole()))
def test_what_may_not_be_cut_stays_whole(why):
    assert not find_stacks(left_whole()[why])


def test_a_buffer_of_one_row_for_each_expert_is_cut_with_them():
    module = experts()
    module.register_buffer("scale", torch.arange(6.0)[:, None])
    groups, edges = grouped(module, (2, 4))
    assert [group.scale.flatten().tolist() for group in groups] == [[0, 1], [2, 3, 4, 5]]


@pytest.mark.promise("experts-listed")
def test_lists_of_experts_are_found_inside_blocks_only():
    """Blocks themselves, lists of unlike modules and tied experts are no lists of experts."""

    def block(*children: nn.Module) -> nn.Module:
        return nn.ModuleDict({"gate": nn.Linear(4, 4), "experts": nn.ModuleList(children)})

    tied = [nn.Linear(4, 8), nn.Linear(4, 8)]
    tied[1].weight = tied[0].weight
    model = nn.Module()
    model.heads = nn.ModuleList([nn.Linear(4, 8), nn.Linear(4, 8)])
    model.layers = nn.ModuleList([Block(block(*(nn.Linear(4, 8) for _ in range(5))))])
    model.layers.append(Block(block(nn.Linear(4, 8), nn.Linear(8, 4))))
    model.layers.append(Block(block(*tied)))
    model.layers.append(Block(block(nn.Identity(), nn.Identity())))
    ((path, found),) = find_lists(model).items()
    assert path == "layers.0.experts.experts"
    assert list(found) == [f"{path}.{n}" for n in range(5)]
    assert all(model.get_submodule(name) is module for name, module in found.items())


class Between(nn.Module):
    """A block with a layer before its experts. squared: it saves something after them, too."""

    def __init__(self, squared: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.before, self.experts, self.squared = nn.Linear(WIDTH, WIDTH), experts(), squared

    def forward(self, x, index, weights):
        x = self.before(x).tanh()
        y = self.experts(x, index, weights)
        return x + (y * y.detach() if self.squared else y)


def in_three(block):
    stack = find_stacks(block)["experts"]
    edges = [(0, 2), (2, 4), (4, 6)]
    groups = make_groups(stack, edges)
    replace(stack, groups, edges)
    calls = []
    for at, group in enumerate(groups):
        group.register_forward_pre_hook(lambda *_, at=at: calls.append(at))
        group.register_full_backward_hook(lambda *_, at=at: calls.append(f"back {at}"))
    return groups, calls


@pytest.mark.promise("experts-recomputed")
@pytest.mark.parametrize("squared", [False, True])
def test_groups_in_a_checkpoint_run_again_one_at_a_time_and_have_the_same_gradients(squared):
    """Fails if a recomputed block runs all of its groups before the first one's backward."""
    plain, block = Between(squared), Between(squared)
    groups, calls = in_three(block)
    for number in range(3):
        results = []
        for module in (plain, block):
            x, index, weights = batch(ONE_UNUSED)
            y = checkpoint(module, x, index, weights, use_reentrant=False)
            y.square().sum().backward()
            results.append((y.detach(), x.grad, weights.grad))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
        one_at_a_time = [0, 1, 2, 2, "back 2", 1, "back 1", 0, "back 0"]
        together = [0, 1, 2, 0, 1, 2, "back 2", "back 1", "back 0"]
        if not squared:
            assert calls == one_at_a_time
        elif number == 0:  # it is noticed here
            assert calls == [0, 1, 2, 0, 1, 2, *one_at_a_time[3:]]
        else:
            assert calls == together
        calls.clear()
    for name, parameter in plain.experts.named_parameters():
        found = torch.cat([group._parameters[name].grad for group in groups])
        torch.testing.assert_close(found, parameter.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.promise("experts-recomputed")
@pytest.mark.parametrize("trained", [True, False])
def test_graphs_made_before_it_was_noticed_run_as_they_were_made(trained):
    """Two forwards before the first backward, of a block that saves something after its experts.

    Frozen with everything before them, they have no graph that would say whether the checkpoint's is still there.
    """
    blocks = Between(True), Between(True)
    in_three(blocks[1])
    inputs = [tuple(t.detach() for t in batch(index)) for index in (ONE_UNUSED, [[0, 1], [2, 3]], ONE_UNUSED)]
    gates = [nn.Parameter(torch.full((WIDTH,), 0.5)) for _ in blocks]
    for block, gate in zip(blocks, gates, strict=True):
        block.requires_grad_(trained)

        def gated(*given, block=block, gate=gate):
            return block(*given) * gate.sigmoid()

        first, second = (checkpoint(gated, *each, use_reentrant=False) for each in inputs[:2])
        first.square().sum().backward()
        third = checkpoint(gated, *inputs[2], use_reentrant=False)
        second.square().sum().backward()
        third.square().sum().backward()
    torch.testing.assert_close(gates[1].grad, gates[0].grad, atol=1e-5, rtol=1e-5)
    if trained:
        torch.testing.assert_close(*(block.before.weight.grad for block in blocks), atol=1e-5, rtol=1e-5)


@pytest.mark.promise("experts-recomputed")
def test_a_graph_that_is_kept_can_be_run_twice_and_dropout_repeats():
    block = Between(False)
    in_three(block)
    for group in block.experts.forward.groups:
        group.register_forward_hook(lambda module, args, y: nn.functional.dropout(y, 0.5))
    x, index, weights = batch(ONE_UNUSED)
    y = checkpoint(block, x, index, weights, use_reentrant=False).square().sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y, x)[0], first)


@pytest.mark.promise("experts-recomputed")
def test_an_input_that_was_changed_before_backward_is_refused():
    part = Part(lambda x: x * 2, [torch.ones(3, requires_grad=True)])
    kept = []
    part.keep(Hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor))
    part.run()
    kept[0].add_(1)
    with pytest.raises(ZeroError, match="was changed in place before backward: change a copy"):
        part.run()
