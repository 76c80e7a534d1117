"""Builds a model without memory for its parameters: `deferred_init` records what construction does to them.

Owns the contexts and the modes that notice operations. Not here: the recorded operations (in init_recording.py), when
parameters are made and where their values go (in initial_values.py).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as registry
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from ..errors import DeferredInitError
from .init_recording import Recording, on_meta
from .init_replay import UNINITIALISED

_unrecorded = torch._C._DisableTorchDispatch  # around our own operations, which are not part of the recording
_ATTRIBUTE = "_zero_core_recording"  # on modules that own a deferred parameter
_FACTORIES = (
    *UNINITIALISED,
    *("aten::zeros", "aten::ones", "aten::full", "aten::rand", "aten::randn", "aten::zeros_like", "aten::ones_like"),
    *("aten::full_like", "aten::rand_like", "aten::randn_like", "aten::new_zeros", "aten::new_ones", "aten::new_full"),
)


@contextmanager
def deferred_init(seed: int | None = None) -> Iterator[Recording]:
    """Build modules inside: parameters take no memory until `shard` (or `initial_values.materialise`) makes their
    values.

    seed: of every random value. The default is torch's seed, as `torch.manual_seed` set it before or inside; all ranks
    must then be seeded alike (`shard` checks). The same seed and code give the same weights at every world size, stage
    and store. Random numbers drawn inside leave torch's generator as it was.
    """
    recording = Recording(torch.initial_seed() if seed is None else seed, fixed=seed is not None)
    with _recording_into(recording):
        yield recording


@contextmanager
def continue_recording(module: nn.Module) -> Iterator[None]:
    """Builds more modules in the recording of `module`'s own parameters, and from their values."""
    if (recording := recording_of(module)) is None:
        raise DeferredInitError(f"{type(module).__name__} is on the meta device: build it inside deferred_init()")
    if changed := [name for name, p in module.named_parameters(recurse=False) if recording.changed_since(p)]:
        raise DeferredInitError(
            f"values written into {', '.join(map(repr, changed))} of a {type(module).__name__} after the with block "
            "of deferred_init() were not recorded: write them inside the block"
        )
    with _recording_into(recording):
        yield


@contextmanager
def _recording_into(recording: Recording) -> Iterator[None]:
    mode = _Recorder(recording)

    def defer(module: nn.Module, name: str, parameter: nn.Parameter) -> Any:
        _refuse_meta_default(module)
        if type(parameter) is not nn.Parameter:
            return None  # a subclass that knows how it wants to be made
        if not on_meta(parameter):
            parameter = mode.puton_meta(parameter)
        module.__dict__[_ATTRIBUTE] = recording
        recording.own(parameter)
        return parameter

    def make_real(module: nn.Module, name: str, buffer: Tensor | None) -> Any:
        _refuse_meta_default(module)
        if buffer is None or not on_meta(buffer) or not recording.knows(buffer):
            return None
        with _unrecorded():
            if recording.has_parameter_over(buffer):
                raise DeferredInitError(
                    f"the buffer {name} of a {type(module).__name__} shares memory with a parameter, and buffers are "
                    f"not sharded: assign a plain attribute, `self.{name} = parameter.detach()`, which follows the "
                    "parameter. Or give the buffer memory of its own with clone()"
                )
            return recording.replay(buffer)

    deferring = registry.register_module_parameter_registration_hook(defer)
    making = registry.register_module_buffer_registration_hook(make_real)
    try:
        with deferring, making, torch.random.fork_rng(devices=[]):
            recording.enter()
            with _PretendReal(recording), mode:
                yield
    finally:
        recording.leave()


def _refuse_meta_default(module: nn.Module) -> None:
    """Refuses torch.device("meta"): transformers' `from_pretrained` builds under it, then reads values into memory."""
    if torch.get_default_device().type == "meta":
        raise DeferredInitError(
            f'{type(module).__name__} is built under torch.device("meta") inside deferred_init(), as from_pretrained() '
            "does: build it from its config, `model = AutoModel.from_config(AutoConfig.from_pretrained(folder))`, and "
            "then call zero_core.load_pretrained(model, folder), with which every rank reads its slices only"
        )


def recording_of(module: nn.Module) -> Recording | None:
    """Returns the recording of this module's own parameters, if any."""
    return module.__dict__.get(_ATTRIBUTE)


def as_made(module: nn.Module, parameter: Tensor) -> Tensor:
    """Returns the module's own parameter for operations inside the context: a deferred one as it was recorded."""
    recording = recording_of(module)
    return parameter if recording is None or not on_meta(parameter) else recording.made(parameter)


def forget_recording(module: nn.Module) -> None:
    """Forgets the recording of the module's own parameters, which have their values now."""
    module.__dict__.pop(_ATTRIBUTE, None)


class _Recorder(TorchDispatchMode):
    """Runs every operation; notes those that create or write meta memory."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording
        # Real storages that one factory made and nothing has changed. The weak reference keeps the address from reuse.
        self._fresh: dict[int, tuple[Any, Any, Any, StorageWeakRef]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        written = _written(function, args, kwargs)
        if any(on_meta(t) for t in inputs) and (
            any(not on_meta(t) for t in written) or function is torch.ops.aten._local_scalar_dense.default
        ):  # meta values flow into real ones: they are needed now
            args, kwargs = tree_map_only(Tensor, self._value, (args, kwargs))
        try:
            results = function(*args, **kwargs)
        except RuntimeError as error:
            if any(on_meta(t) for t in inputs):
                raise DeferredInitError(
                    f"{function} inside deferred_init(), where parameters have no memory ({error}): move, cast or run "
                    "the model after the context; zero_core.shard(device=...) chooses where it computes"
                ) from error
            if function is not torch.ops.aten.empty.memory_format or "allocate memory" not in str(error):
                raise
            results = untouched(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        outputs = [t for t in tree_flatten(results)[0] if isinstance(t, Tensor)]
        if any(on_meta(t) for t in written) or any(on_meta(t) and not self.recording.knows(t) for t in outputs):
            self.recording.add(function, args, kwargs, results, written)
        for tensor in written:
            self._fresh.pop(tensor.untyped_storage()._cdata, None)
        known = {t.untyped_storage()._cdata for t in inputs if not _odd(t)}
        for tensor in outputs:
            if not on_meta(tensor) and not _odd(tensor) and tensor.untyped_storage()._cdata not in known:
                self._fresh.pop(tensor.untyped_storage()._cdata, None)
                if function._schema.name in _FACTORIES and tensor.is_contiguous():
                    storage = tensor.untyped_storage()
                    self._fresh[storage._cdata] = (function, args, kwargs, StorageWeakRef(storage))
        return results

    def _value(self, tensor: Tensor) -> Tensor:
        if not on_meta(tensor) or not self.recording.knows(tensor):
            return tensor
        return self.recording.replay(tensor)

    def puton_meta(self, parameter: nn.Parameter) -> nn.Parameter:
        """Returns a meta parameter that replaces a real one, and records that one's value as briefly as possible."""
        with _unrecorded():
            shape, stride = parameter.shape, parameter.stride()
            data = torch.empty_strided(shape, stride, dtype=parameter.dtype, device="meta")
            whole = parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
            maker = self._fresh.get(parameter.untyped_storage()._cdata) if whole and parameter.is_contiguous() else None
            if maker is None:  # computed values: kept as they are, to be copied in
                self.recording.add(torch.ops.aten.clone.default, (parameter.detach(),), {}, data, [])
            elif maker[0]._schema.name in UNINITIALISED:
                kwargs = {"dtype": parameter.dtype}
                self.recording.add(torch.ops.aten.empty.memory_format, (list(shape),), kwargs, data, [])
            else:
                function, args, kwargs, _ = maker
                self.recording.add(function, args, kwargs, data, [])
            meta = nn.Parameter(data, requires_grad=parameter.requires_grad)
        meta.__dict__.update(parameter.__dict__)
        return meta


class _PretendReal(TorchFunctionMode):
    """Makes `is_meta` false for recorded tensors, because initialisers, torch's own among them, skip meta tensors."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == _IS_META and self.recording.knows(args[0]):
            return False
        return function(*args, **(kwargs or {}))


_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


def untouched(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`torch.empty`, even of more than the machine's memory: only touched pages take memory, and the parameter that it
    becomes is never touched."""
    reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.13 names it
    pages = mmap.mmap(-1, math.prod(size) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserve)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(tuple(size))


def _written(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors an operation changes in place."""
    if not function._schema.is_mutable:
        return []
    found: list[Tensor] = []
    for i, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [t for t in tree_flatten(value)[0] if isinstance(t, Tensor)]
    return found


def _odd(tensor: Tensor) -> bool:
    """Whether it is sparse or the like, without a storage of its own."""
    return tensor.layout is not torch.strided
