"""What our messages advise: texts of the packages that name a setting, a function or a command, or say what to do.

`python -m tests.advice` prints the advices that no test follows. tests/unit/test_advice.py says what is asked of them.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
PACKAGES = ("zero_core", "zero_offload", "zero_nvme", "zero_optim_cpu", "zero_hf", "zero_train")

# Advices, by a part of their text, that a test follows: it does what the message says, and that works.
FOLLOWED = {
    # ---- zero_core
    "write `optimizer = zero_core.shard(model, optimizer, ...)`": "test_the_optimizer_that_shard_returned_is_called",
    "call optimizer.step() or zero_grad() before": "test_gradients_before_shard_are_used_or_dropped",
    "give shard() the inner one": "test_the_inner_optimizer_is_given",
    "run the model once on a sample": "test_a_lazy_model_runs_once_on_a_sample",
    "use TiledLinear.from_linear": "test_a_linear_layer_is_tiled_as_a_class",
    "checkpoint.save(folder, model, optimizer) writes": "test_states_are_saved_by_the_calls_that_an_error_names",
    "Call optimizer.zero_grad() after each step()": "test_gradients_are_zeroed_after_each_step",
    "call it after the first step()": "test_a_state_is_written_after_the_first_step",
    "Call it between backward() and step()": "test_a_gradient_is_written_between_backward_and_step",
    "leave assign at False": "test_a_state_dict_is_loaded_by_copying",
    "has nowhere to put its bytes": "test_a_store_in_host_memory_sleeps_in_a_byte_store",
    "step() while the store sleeps": "test_a_store_in_host_memory_sleeps_in_a_byte_store",
    "name all models in one block": "test_models_that_a_block_runs_are_named_together",
    "name those that the block runs": "test_models_that_a_block_runs_are_named_together",
    "Set it back; what shall hold from the first step on": "unit/zero_core/test_options.py::"
    "test_a_change_that_torch_cannot_make_is_refused_before_the_step",
    "it needs whole parameters, and a rank has slices of them": "test_the_optimizers_that_are_named_run",
    "or use AdamW, Adam, SGD or Adagrad of torch.optim": "test_the_optimizers_that_are_named_run",
    "or pass param_dtype=": "integration/zero_core/test_bad_input.py::"
    "test_parameters_that_a_float32_master_cannot_hold",
    "lies over the memory of the parameter": "integration/zero_core/test_shared_memory.py::"
    "test_the_advice_against_shared_memory_works",
    "has the strides {}, with which several": "integration/zero_core/test_shared_memory.py::"
    "test_the_advice_against_shared_memory_works",
    "To let the other show its values": "integration/zero_core/test_shared_memory.py::"
    "test_the_advice_against_shared_memory_works",
    # ---- zero_offload
    "stages 0 to 2 keep every unit in memory": "test_stages_that_keep_units_get_room_for_them",
    "a second gradient of {} before step()": "test_gradients_that_accumulate_get_the_memory_that_an_error_asks_for",
    "or raise host_bytes": "test_the_arena_gets_the_bytes_that_are_missing",
    "the gradient norm's chunk; use": "test_a_tile_has_the_size_that_an_error_names",
    "TorchStep cannot do": "test_an_option_without_an_update_is_left_off",
    "raise capacity_bytes": "test_a_byte_store_in_memory_gets_the_room_that_an_error_asks_for",
    "for which the store has no memory. Give the optimizer": "unit/zero_offload/test_step_probe.py::"
    "test_the_advice_for_a_momentum_that_comes_later",
    "use one rank and a tile_numel that no unit exceeds": "unit/zero_offload/test_step_probe.py::"
    "test_a_step_that_uses_norms_of_segments_gets_whole_parameters_or_is_refused",
    # ---- zero_nvme and zero_optim_cpu
    "numpy.ascontiguousarray(x)": "test_buffers_are_made_contiguous_and_extents_get_room",
    "pass tensor.contiguous()": "test_buffers_are_made_contiguous_and_extents_get_room",
    "pass a bytearray": "test_buffers_are_made_contiguous_and_extents_get_room",
    "mode 'w' creates it": "test_a_file_is_created_and_opened_in_the_mode_that_an_error_names",
    "open it with 'r+' to write": "test_a_file_is_created_and_opened_in_the_mode_that_an_error_names",
    "has no CPU kernel; set it to False": "test_an_option_without_an_update_is_left_off",
    # ---- zero_hf
    "has no update on the host": "integration/zero_hf/test_trainer_use.py::"
    "test_the_optimizers_that_a_refusal_names_train_on_nvme_as_in_the_stock_trainer",
    "keep all on the device with offload: none": "integration/zero_hf/test_trainer_use.py::"
    "test_the_optimizers_that_a_refusal_names_train_on_nvme_as_in_the_stock_trainer",
    # ---- zero_train
    "set precision.states=fp32 or precision=bf16": "test_settings_that_zero_train_names_pass",
    "set optim.max_grad_norm=null or zero.update_in_backward": "test_settings_that_zero_train_names_pass",
    "set run.accumulate=1 or zero.update_in_backward=false": "test_settings_that_zero_train_names_pass",
    "or choose zero.stage=2, which reduces": "test_settings_that_zero_train_names_pass",
    "set offload.activations=recompute, or choose offload=host": "test_settings_that_zero_train_names_pass",
    "set offload.activations=recompute, host{} or auto": "test_settings_that_zero_train_names_pass",
    "set one of them to null or false": "test_settings_that_zero_train_names_pass",
    "lower optim.warmup_steps, leave it out": "test_settings_that_zero_train_names_pass",
    "was saved with {}; set {}, or leave run.resume out": "integration/zero_train/test_run_folder.py::"
    "test_the_way_out_that_is_named_works",
    "of run.steps={}; raise run.steps": "integration/zero_train/test_run_folder.py::"
    "test_the_way_out_that_is_named_works",
    "holds a run already": "integration/zero_train/test_run_folder.py::test_the_way_out_that_is_named_works",
}
FOLLOWED = {part: test if "::" in test else f"unit/test_followed_advice.py::{test}" for part, test in FOLLOWED.items()}

# Advices that no test can follow here.
EXEMPT = {
    "faulty, restore a checkpoint": "a drive that returns wrong bytes is replaced, not configured",
}

# How many advices of each module are checked for the names in them alone: nobody has followed these yet. It is a debt.
# A module may not get more; where a test follows one, its number goes down. `python -m tests.advice` counts.
NOT_FOLLOWED: dict[str, int] = {
    "zero_core/averaging.py": 1,
    "zero_core/building/deferred.py": 4,
    "zero_core/building/init.py": 6,
    "zero_core/building/overlaps.py": 3,
    "zero_core/building/parts.py": 4,
    "zero_core/building/replay.py": 2,
    "zero_core/checkpoint/__init__.py": 2,
    "zero_core/checkpoint/files.py": 2,
    "zero_core/checkpoint/match.py": 3,
    "zero_core/checkpoint/pretrained.py": 3,
    "zero_core/checkpoint/safetensors.py": 2,
    "zero_core/checkpoint/shards.py": 1,
    "zero_core/comm/patience.py": 2,
    "zero_core/comm/ranks.py": 1,
    "zero_core/device.py": 1,
    "zero_core/full_values.py": 2,
    "zero_core/gathering.py": 3,
    "zero_core/memory.py": 1,
    "zero_core/optim/backward_updates.py": 1,
    "zero_core/optim/carried.py": 3,
    "zero_core/optim/device_store.py": 6,
    "zero_core/optim/elementwise.py": 2,
    "zero_core/optim/full_states.py": 4,
    "zero_core/optim/handover.py": 1,
    "zero_core/optim/optimizer.py": 5,
    "zero_core/runtime/attaching.py": 6,
    "zero_core/runtime/calls.py": 2,
    "zero_core/runtime/gradient.py": 1,
    "zero_core/runtime/gradient_access.py": 8,
    "zero_core/runtime/held.py": 4,
    "zero_core/runtime/hooks.py": 8,
    "zero_core/runtime/outputs.py": 1,
    "zero_core/runtime/parameter.py": 12,
    "zero_core/runtime/place.py": 4,
    "zero_core/runtime/scaling.py": 1,
    "zero_core/runtime/snapshots.py": 1,
    "zero_core/runtime/unit.py": 1,
    "zero_core/runtime/whole.py": 1,
    "zero_core/runtime/writes.py": 1,
    "zero_core/sharding.py": 12,
    "zero_core/sleeping.py": 1,
    "zero_core/unequal.py": 2,
    "zero_hf/accelerating.py": 9,
    "zero_hf/commands.py": 2,
    "zero_hf/config.py": 6,
    "zero_hf/deepspeed/checkpoint.py": 2,
    "zero_hf/deepspeed/convert.py": 1,
    "zero_hf/deepspeed/engine.py": 14,
    "zero_hf/deepspeed/files.py": 14,
    "zero_hf/deepspeed/keys.py": 38,
    "zero_hf/deepspeed/optimizers.py": 17,
    "zero_hf/deepspeed/pickles.py": 5,
    "zero_hf/deepspeed/reading.py": 7,
    "zero_hf/deepspeed/schedules.py": 1,
    "zero_hf/deepspeed/translation.py": 18,
    "zero_hf/deepspeed/zero.py": 4,
    "zero_hf/loading.py": 13,
    "zero_hf/merging.py": 8,
    "zero_hf/sharding.py": 5,
    "zero_hf/trainer.py": 16,
    "zero_hf/trl.py": 4,
    "zero_nvme/buffers.py": 1,
    "zero_nvme/doctor.py": 2,
    "zero_nvme/errors.py": 2,
    "zero_nvme/extents.py": 1,
    "zero_nvme/file.py": 1,
    "zero_nvme/filesystem.py": 1,
    "zero_nvme/options.py": 3,
    "zero_nvme/probe.py": 2,
    "zero_nvme/slab.py": 2,
    "zero_nvme/ticket.py": 1,
    "zero_nvme/tune.py": 2,
    "zero_offload/activations/__init__.py": 7,
    "zero_offload/activations/buffers.py": 4,
    "zero_offload/activations/cutting.py": 6,
    "zero_offload/activations/logits.py": 3,
    "zero_offload/activations/mixing.py": 6,
    "zero_offload/activations/nvme_spill.py": 2,
    "zero_offload/activations/spill.py": 1,
    "zero_offload/arena.py": 2,
    "zero_offload/asleep.py": 2,
    "zero_offload/compressed_store.py": 3,
    "zero_offload/device.py": 1,
    "zero_offload/host_budget.py": 1,
    "zero_offload/monitor.py": 1,
    "zero_offload/planning/automatic.py": 1,
    "zero_offload/planning/budgets.py": 3,
    "zero_offload/planning/hardware.py": 2,
    "zero_offload/planning/planner.py": 2,
    "zero_offload/running/pipeline.py": 1,
    "zero_offload/step_probe.py": 1,
    "zero_offload/store.py": 2,
    "zero_offload/streams.py": 1,
    "zero_offload/tier.py": 1,
    "zero_offload/tiles/footprint.py": 2,
    "zero_offload/tiles/gradients.py": 3,
    "zero_offload/tiles/parameters.py": 1,
    "zero_optim_cpu/dispatch.py": 1,
    "zero_optim_cpu/kernels.py": 3,
    "zero_optim_cpu/optimizer.py": 1,
    "zero_optim_cpu/rules.py": 1,
    "zero_optim_cpu/step.py": 1,
    "zero_optim_cpu/tensors.py": 4,
    "zero_train/answers.py": 2,
    "zero_train/checks.py": 11,
    "zero_train/config.py": 5,
    "zero_train/conversations.py": 12,
    "zero_train/data.py": 6,
    "zero_train/deepspeed.py": 6,
    "zero_train/explain.py": 2,
    "zero_train/finetune.py": 7,
    "zero_train/generate.py": 4,
    "zero_train/loop.py": 1,
    "zero_train/models.py": 4,
    "zero_train/planning.py": 4,
    "zero_train/pretrained.py": 2,
    "zero_train/probing.py": 2,
    "zero_train/resume.py": 3,
    "zero_train/row_files.py": 5,
    "zero_train/rows.py": 3,
    "zero_train/run_folder.py": 1,
    "zero_train/schema.py": 7,
    "zero_train/tokens.py": 1,
    "zero_train/train.py": 3,
    "zero_train/unused_keys.py": 1,
}

_VERBS = (
    "add|allow|build|call|cast|check|choose|close|convert|copy|cut|delete|divide|drop|export|fetch|fix|free|give|install|"
    "keep|launch|leave|let|load|make|move|name|open|pack|pass|pip install|place|put|raise|remove|rename|restore|resume|"
    "run|save|set|shard|start|take|train|turn|unset|update|use|wait|write"
)
_ADVICE = re.compile(rf"(?:[:;,.(]|\bor|\band|\bthen)\s+(?:{_VERBS})\b", re.IGNORECASE)


@dataclass(frozen=True)
class Text:
    """A text of a source file. `{}` stands for a value."""

    package: str
    module: str  # the path below src
    line: int
    text: str

    @property
    def advises(self) -> bool:
        """Whether it says what to do."""
        return _ADVICE.search(self.text) is not None


def texts() -> Iterator[Text]:
    """Every text of our packages that is a message, or a part of one: of four words and more, and no docstring."""
    for package in PACKAGES:
        source = ROOT / "packages" / package.replace("_", "-") / "src"
        for path in sorted(source.rglob("*.py")):
            if "testing" in path.parts:
                continue
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for line, text in _texts(tree, _constants(tree)):
                if len(re.findall(r"\w\w+", text)) >= 4:
                    yield Text(package, str(path.relative_to(source)), line, text)


def advices() -> list[Text]:
    """The texts that say what to do."""
    return [text for text in texts() if text.advises]


def unfollowed() -> list[Text]:
    """The advices that are neither followed by a test nor exempted."""
    known = (*FOLLOWED, *EXEMPT)
    return [advice for advice in advices() if not any(part in advice.text for part in known)]


def _constants(tree: ast.Module) -> dict[str, str]:
    """Texts of the module that have a name, for messages that end in one."""
    return {
        target.id: _rendered(node.value, {})
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value, (ast.Constant, ast.JoinedStr, ast.BinOp))
    }


def _texts(node: ast.AST, constants: dict[str, str]) -> Iterator[tuple[int, str]]:
    body = getattr(node, "body", None)
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and body:
        first = body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            body = body[1:]
        for child in body:
            yield from _texts(child, constants)
        return
    if isinstance(node, (ast.Constant, ast.JoinedStr)) or (
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
    ):
        text = _rendered(node, constants)
        if text:
            yield node.lineno, text
            return
    for child in ast.iter_child_nodes(node):
        yield from _texts(child, constants)


def _rendered(node: ast.AST, constants: dict[str, str]) -> str:
    """The text of an expression: `{}` for its values, and both sides of a conditional one."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_rendered(value, constants) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return _rendered(node.value, constants) or "{}"
    if isinstance(node, ast.BinOp):
        return _rendered(node.left, constants) + _rendered(node.right, constants)
    if isinstance(node, ast.IfExp):
        return f"{_rendered(node.body, constants)} / {_rendered(node.orelse, constants)}"
    return constants.get(node.id, "") if isinstance(node, ast.Name) else ""


# -- the names in a text -----------------------------------------------------------------------------------------------

# Arguments and functions that belong to others, by whose they are.
OTHERS = {
    "torch": "fullgraph max_norm set_to_none sparse assign Work.wait torch.load torch.save nn.Embedding nn.Parameter "
    "torch.device torch.no_grad torch.autograd.grad torch.distributed.init_process_group weights_only block.compile "
    "layer.compile",
    "numpy": "numpy.ascontiguousarray",
    "gc": "gc.disable",
    "transformers, TRL, PEFT and accelerate": "activation_checkpointing gradient_checkpointing use_cache "
    "ignore_mismatched_sizes tie_word_embeddings device_map safe_serialization optimizers packing tokenizer "
    "num_training_steps mixed_precision ds3_gather_for_generation distributed_config merge_and_unload from_config "
    "save_pretrained gradient_checkpointing_disable gradient_checkpointing_enable prepare join_uneven_inputs train "
    "evaluate gradient_accumulation_steps bf16 deepspeed",
    "DeepSpeed": "communication_data_type mics_shard_size mpu modifier_rank custom_load_fn exclude_frozen_parameters "
    "with_flops bias_correction train_batch_size init_distributed set_requires_grad zero_pp_rank_ mp_rank_ _mp_rank_",
    "Hydra": "dir",  # hydra.run.dir=
}
_OTHERS = {name for names in OTHERS.values() for name in names.split()}
_TORCH = (torch, torch.nn, torch.nn.Module, torch.Tensor, torch.optim.Optimizer, torch.distributed, builtins)


def unknown(text: Text) -> list[str]:
    """What the text names and does not exist."""
    sources, wrong = _sources(), []
    for name in re.findall(r"\bzero_(?:\w+)(?:\.[A-Za-z_]\w*)+", text.text):
        if name.partition(".")[0] in PACKAGES and not _imported(name):
            wrong.append(name)
    for name in re.findall(r"(?<![\w.\[}])([a-z_]\w*)=(?!=)", text.text):
        if name not in sources.arguments and name not in _OTHERS:
            wrong.append(f"{name}=")
    for name in re.findall(r"([A-Za-z_][\w.]*)\((?=[\w\"'.=\[\]{}, /*-]*\))", text.text):
        last = name.rpartition(".")[2]
        theirs = name in _OTHERS or last in _OTHERS or any(hasattr(each, last) for each in _TORCH)
        if last not in sources.functions and not theirs:
            wrong.append(f"{name}()")
    if text.package == "zero_train":
        wrong += [
            key for key in re.findall(r"(?<![\w./{}-])[a-z_]+(?:\.[a-z_0-9]+)+(?![\w(/])", text.text) if not _key(key)
        ]
        for group, choice in re.findall(r"(?<![\w.])([a-z]+)=([a-z]\w*)(?![\w.=(])", text.text):
            folder = ROOT / "conf" / group
            if folder.is_dir() and not (folder / f"{choice}.yaml").exists():
                wrong.append(f"{group}={choice}")
    wrong += [command for command in _COMMAND.findall(text.text) if not _command(command)]
    wrong += [name for name in re.findall(r"\bZERO_[A-Z_]+\b", text.text) if name not in sources.strings]
    return wrong


_COMMAND = re.compile(
    r"zero-hf (?:[a-z]+)(?= [A-Z{./-]| prints)|python -m zero_nvme [a-z]+|nox -s [\w-]+"
    r"|pip install [^.;:,]*'zero-[^']+'"
)


def _command(command: str) -> bool:
    words = command.split()
    if words[0] == "nox":
        return words[2] in re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    if words[0] == "pip":
        package, extra = re.search(r"'(zero-\w+)\[([^\]]*)\]'", command).groups()  # type: ignore[union-attr]
        project = (ROOT / "packages" / package / "pyproject.toml").read_text()
        return extra == "{}" or re.search(rf"^{extra} = \[", project, re.MULTILINE) is not None
    return words[-1] in _sources().strings  # the name of a subcommand


def _imported(name: str) -> bool:
    parts = name.split(".")
    found = importlib.import_module(parts[0])
    for depth, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(parts[:depth]))
            except ImportError:
                return False
        found = getattr(found, part)
    return True


def _key(key: str) -> bool:
    """Whether zero-train has this key, where it looks like one."""
    import typing

    from zero_train import schema

    first, *rest = key.split(".")
    kind: typing.Any = schema.Config
    for part in (first, *rest):
        if not dataclasses.is_dataclass(kind):
            return True  # a mapping of the user's
        hints = typing.get_type_hints(kind)
        if part not in hints:
            return part == first  # no key at all: the name of a file or of a module
        kind = next((a for a in typing.get_args(hints[part]) if a is not type(None)), hints[part])
    return True


@dataclass(frozen=True)
class Sources:
    """Names in the sources of our packages: of functions and classes, of arguments and fields, and whole texts."""

    functions: frozenset[str]
    arguments: frozenset[str]
    strings: frozenset[str]


@functools.cache
def _sources() -> Sources:
    functions, arguments, strings = set(), set(), set()
    for path in (ROOT / "packages").glob("*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                functions.add(node.name)
            if isinstance(node, ast.arg):
                arguments.add(node.arg)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                arguments.add(node.target.id)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.add(node.value)
    return Sources(*map(frozenset, (functions, arguments, strings)))


if __name__ == "__main__":
    left = unfollowed()
    for module, count in sorted(Counter(advice.module for advice in left).items()):
        print(f'    "{module}": {count},')
    print(f"{len(advices())} advices, of which no test follows {len(left)}")
    for advice in left:
        print(f"{advice.module}:{advice.line}: {' '.join(advice.text.split())}")
