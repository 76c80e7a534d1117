"""One optimizer of another package beside plain torch, at every place; see __main__."""

import importlib
import inspect
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zero_core
from tests.optimizers.catalogue import RATE
from zero_core.errors import ZeroError
from zero_core.optim.contracts import BY_ITSELF, TOGETHER
from zero_core.testing import RankError, RankPool
from zero_offload import MemoryByteStore, TieredStore

PLACES = ("device", "host", "nvme", "two ranks")
SCALES = (1.0, 1.0, 1e-3, 1.0, 30.0, 1.0, 0.1, 1.0, 300.0, 1.0, 1.0, 1.0)  # of gradients, by the step
CLOSE = 1e-6  # of the largest motion
FREE = ("params", "lr", "initial_lr", "weight_decay")  # options that change numbers alone


class Net(nn.Module):
    """Parameters of no, one, two and three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12, bias=False), nn.LayerNorm(12))
            for _ in range(2)
        )
        self.conv, self.scale = nn.Conv1d(12, 6, 3, padding=1), nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.conv(x.transpose(1, 2)).transpose(1, 2) * self.scale)


def found_in(module: str) -> Iterator[str]:
    """The names of the optimizers that a package has itself."""
    imported = importlib.import_module(module)
    for name in sorted(vars(imported)):
        each = getattr(imported, name)
        if inspect.isclass(each) and issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer:
            if each.__module__.partition(".")[0] == module.partition(".")[0]:  # and not torch's own, under its name
                yield name


def without_its_models() -> None:
    """timm imports its models and with them torchvision, which its optimizers do not need."""
    if "timm" not in sys.modules and (spec := util.find_spec("timm")) is not None and spec.origin is not None:
        for name in ("timm", "timm.models"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules["timm"].__path__ = [str(Path(spec.origin).parent)]
        for name in ("group_parameters", "model_parameters"):
            setattr(sys.modules["timm.models"], name, None)


def make(module: str, name: str, model: nn.Module) -> Any:
    without_its_models()
    if module == "heavyball":  # compiling takes a minute each, and changes no contract
        importlib.import_module("heavyball.utils").compile_mode = None
    kind, parameters = getattr(importlib.import_module(module), name), list(model.parameters())
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.01}]
    try:
        return kind(groups, lr=RATE)
    except TypeError:
        return kind(groups)


def trained(module: str, name: str, place: str | None, contract: str | None = BY_ITSELF) -> dict[str, Tensor]:
    """Values after the steps. place: None is plain torch. contract: None is the list's. Ranks have one batch."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # as ranks have
    torch.manual_seed(0)
    model: Any = Net()
    optimizer: Any = make(module, name, model)
    if place is not None:
        store = None
        if place != "device":
            tier = "nvme" if place == "nvme" else "host"
            store = TieredStore(tier, tier, tier, nvme=MemoryByteStore() if tier == "nvme" else None)
        options = {"units": [nn.Sequential], "store": store, "optimizer_contract": contract}
        optimizer = zero_core.shard(model, optimizer, **options)
    for step, scale in enumerate(SCALES):
        tokens = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(step))
        (nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()) * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
    values = {key: value.detach().clone() for key, value in model.state_dict().items()}
    if place is not None:
        optimizer.close()
    return values


def switches_of(optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a group, and attributes, that are on, off, names or nothing: they may change the contract."""
    attributes = {name: value for name, value in vars(optimizer).items() if not name.startswith("_")}
    found = {**attributes, **{name: value for name, value in options.items() if name not in FREE}}
    return {
        name: value
        for name, value in found.items()
        if value is None or isinstance(value, (bool, str)) or (isinstance(value, (int, float)) and value == 0)
    }


def compared(module: str, name: str, pool: RankPool) -> tuple[list[str], str | None, dict[str, Any]]:
    """What each place does, the contract for the list, and the switches of the optimizer. Raises what plain torch does.

    Where parameters may not be stepped by themselves, it is what each place does with "together". No contract: there
    are states that shards do not keep.
    """
    torch.manual_seed(0)
    start = Net()
    made = make(module, name, start)
    switches = switches_of(made, made.param_groups[0])
    wanted, begun = trained(module, name, None), start.state_dict()
    motion = max(float((wanted[key] - begun[key]).abs().max()) for key in wanted)

    def at(place: str, contract: str) -> str:
        run: Callable[..., Any] = pool.run if place == "two ranks" else lambda function, *args: [function(*args)]
        try:
            (values, *_) = run(trained, module, name, place, contract)
        except (ZeroError, RankError) as error:
            text = str(error).strip().splitlines()[-1] if isinstance(error, RankError) else str(error)
            return f"refused: {re.split(': |; |, and', text.rpartition('Error: ')[2])[0][:90]}"
        apart = max(float((wanted[key] - values[key]).abs().max()) for key in wanted)
        return "equal" if apart == 0 else f"{apart / motion:.1e}" if apart / motion <= CLOSE else "differs"

    told = [at(place, BY_ITSELF) for place in PLACES]
    if "differs" in told or any(each.startswith("refused: the step of") for each in told):
        return [at(place, TOGETHER) for place in PLACES], TOGETHER, switches
    return told, None if any(each.startswith("refused") for each in told) else BY_ITSELF, switches
