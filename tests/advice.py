"""What our messages advise: texts of the packages that name a setting, a function or a command, or say what to do.

A test that follows an advice makes the mistake, does what the message says, and sees that it helps. It quotes the
advice, or a part of it is in its `@pytest.mark.advice(...)`. `python -m tests.advice` prints the advices that no test
follows. tests/unit/test_advice.py says what is asked of them.
"""

import ast
import builtins
import dataclasses
import functools
import importlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
PACKAGES = ("zero_core", "zero_offload", "zero_nvme", "zero_optim_cpu", "zero_deepspeed", "zero_hf", "zero_train")

# Parts of advices that no test can follow here, and why.
EXEMPT = {
    "the link to its machine is cut. End all ranks": "all processes end; others load the checkpoint",
    "{} after Ctrl-C inside of a hook of": "all processes end; others load the checkpoint",
    "where the process group ({}) {}: start the group": "needs a second kind of device",
    "parameters on {}: move the model to one device": "needs a second device",
    "faulty, restore a checkpoint": "a drive that returns wrong bytes is replaced, not configured",
    "load this one with DeepSpeed 0.19 and save it again": "it needs a DeepSpeed of another version",
    "start one process per GPU, with torchrun": "needs two GPUs",
    "pip install 'transformers>=5.23,<6'": "installs another version of transformers",
    "use the version that made it, or a newer one": "there is no other version yet",
    "the aiofiles backend works; reinstall with a compiler": "builds the package anew",
    "# read {}, write {}, both at once": "figures that are printed",
    "MiB x {}: read {}, write {}": "figures that are printed",
    "set /sys/kernel/mm/transparent_hugepage/enabled": "changes the machine for everyone on it",
    "use the version that wrote the slab. Or delete the slab": "there is no other version yet",
    "may be lost; delete the slab with slab": "needs a start of the machine; deleting is followed above",
    "and the run cannot be continued; delete the slab": "needs damage that no crash leaves; deleting is followed above",
    "on every rank delete the slab": "needs a second damage, of the manifest before the last",
    "a device that torch has streams for, not on {}; leave": "needs a device without streams, such as mps",
    "returned {} on {}; end the process": "ends the process that would follow it",
    "so the store keeps its memory. End the process": "ends the process that would follow it",
    "move it with .cpu()": "needs a device besides the CPU",
    "upgrade it with pip install -U trl": "needs an old TRL",
    "# Measured by zero-train run.probe=true; save as": "the heading of a file that is printed",
    "ranks see different last checkpoints": "needs a second machine",
    "there is no validation loss: none of": "the TRL of today leaves out such rows, of which none is then left",
    "cannot run on the CPU: {}; change one": "no optim and precision.states of today are refused: it guards later ones",
}

_VERBS = (
    "add|allow|ask|assign|bring|build|call|cast|change|check|choose|close|compile|continue|convert|copy|cut|delete|"
    "dequantise|divide|drop|enable|end|evaluate|export|fetch|fix|free|freeze|gather|generate|give|index|initialise|"
    "install|keep|launch|leave|let|load|lower|make|merge|move|name|open|pack|pass|pip install|place|prepare|put|"
    "quantise|raise|reinstall|remove|rename|repeat|replace|restore|resume|round|run|save|script|see|set|shard|"
    "split|start|take|train|turn|unpack|unset|update|use|wait|write"
)
# A verb begins a text, or follows a punctuation mark or a conjunction. The name of a function or of a key is no verb at
# the beginning ("step() inside ...", "run.dir is ..."), nor is a noun ("update of each rank") or a participle
# ("flattened and split after"); `read` is one in "Read it before" only.
_ADVICE = re.compile(
    rf"^(?:{_VERBS})\b(?![(=.:]| of\b| O_DIRECT)|(?:[:;,.(]\s+|\b(?:or|and|then)\s+)(?:{_VERBS})\b(?! of\b| after\b)"
    r"|[:;.]\s+read (?:it|the|them|with)\b",
    re.IGNORECASE,
)


_WILDCARD = re.compile(r"\.[*+]\??|(?<!\\)\||\{\}|\\d\+")


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

    @property
    def quoted(self) -> bool:
        """Whether a test quotes three words of it in a row, with or behind one that says what to do."""
        verb = min((found.end() for found in _ADVICE.finditer(self.text)), default=len(self.text))
        return any(quote in self.text and self.text.rindex(quote) + len(quote) >= verb for quote in _quotes())


@functools.cache
def texts() -> tuple[Text, ...]:
    """Every message of our packages, or part of one, of four words and more. Docstrings and help are none."""
    return tuple(_messages())


def _messages() -> Iterator[Text]:
    for package in PACKAGES:
        source = ROOT / "packages" / package.replace("_", "-") / "src"
        for path in sorted(source.rglob("*.py")):
            if "testing" in path.parts:
                continue
            tree = ast.parse(path.read_text(encoding="utf-8"))
            keywords = (node for node in ast.walk(tree) if isinstance(node, ast.keyword))
            helps = {keyword.value.lineno for keyword in keywords if keyword.arg == "help"}
            for line, text in _texts(tree, _constants(tree)):
                if line not in helps and len(re.findall(r"\w\w+", text)) >= (3 if text[:1].islower() else 4):
                    yield Text(package, str(path.relative_to(source)), line, text)


def advices() -> list[Text]:
    """The texts that say what to do."""
    return [text for text in texts() if text.advises]


def unfollowed() -> list[Text]:
    """The advices that no test quotes or is marked with, and that are not exempted."""
    known = (*marked(), *EXEMPT)
    return [each for each in advices() if not any(part in each.text for part in known) and not each.quoted]


def marked() -> list[str]:
    """What stands in the `@pytest.mark.advice(...)` of tests."""
    calls = (node for tree in _tests() for node in ast.walk(tree) if isinstance(node, ast.Call))
    marks = (call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "advice")
    return [part.value for mark in marks for part in mark.args if isinstance(part, ast.Constant)]


@functools.cache
def _tests() -> list[ast.Module]:
    paths = (path for path in (ROOT / "tests").rglob("*.py") if path.name not in ("advice.py", "test_advice.py"))
    return [ast.parse(path.read_text(encoding="utf-8")) for path in paths]


@functools.cache
def _quotes() -> frozenset[str]:
    """Texts of the tests, and what stands between the wildcards of their patterns, of three words and more."""
    found: set[str] = set()
    for _, text in itertools.chain.from_iterable(_texts(tree, {}) for tree in _tests()):
        pieces = (re.sub(r"\\(.)", r"\1", piece).strip() for piece in _WILDCARD.split(text))
        found.update(piece for piece in pieces if len(re.findall(r"\w\w+", piece)) >= 3)
    return frozenset(found)


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
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring, of a field too
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
    "layer.compile create_graph use_reentrant",
    "numpy": "numpy.ascontiguousarray",
    "gc": "gc.disable",
    "transformers, TRL, PEFT and accelerate": "activation_checkpointing gradient_checkpointing use_cache "
    "ignore_mismatched_sizes tie_word_embeddings device_map safe_serialization optimizers packing tokenizer "
    "num_training_steps mixed_precision ds3_gather_for_generation distributed_config merge_and_unload from_config "
    "save_pretrained gradient_checkpointing_disable gradient_checkpointing_enable prepare join_uneven_inputs train "
    "evaluate gradient_accumulation_steps bf16 deepspeed ddp_find_unused_parameters",
    "DeepSpeed": "communication_data_type mics_shard_size mpu modifier_rank custom_load_fn exclude_frozen_parameters "
    "with_flops bias_correction train_batch_size init_distributed set_requires_grad zero_pp_rank_ mp_rank_ _mp_rank_",
    "Hydra": "dir",  # hydra.run.dir=
}
_OTHERS = {name for names in OTHERS.values() for name in names.split()}
_TORCH = (builtins, torch, torch.nn, torch.nn.Module, torch.Tensor, torch.optim.Optimizer)
_TORCH += (torch.distributed, torch.export)


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
    print(f"{len(advices())} advices, of which no test follows {len(left)}")
    for advice in left:
        print(f"{advice.module}:{advice.line}: {' '.join(advice.text.split())}")
