"""PyTorch optimizers on the CPU at the speed of memory: one pass, SIMD chosen at run time, the same bits everywhere."""

from zero_optim_cpu import cores
from zero_optim_cpu.adagrad import Adagrad
from zero_optim_cpu.adam import Adam, AdamW
from zero_optim_cpu.engine import available_isas, compiled_isas
from zero_optim_cpu.layouts import LAYOUTS, Field, Layout
from zero_optim_cpu.lion import Lion
from zero_optim_cpu.sgd import SGD
from zero_optim_cpu.step import CpuStep, Handle

__all__ = [
    "LAYOUTS",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "CpuStep",
    "Field",
    "Handle",
    "Layout",
    "Lion",
    "available_isas",
    "compiled_isas",
    "cores",
]
__version__ = "0.1.0"
