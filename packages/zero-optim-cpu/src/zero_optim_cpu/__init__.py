"""Updates parameters on the CPU in one pass over memory, with the same bits on every instruction set."""

from zero_optim_cpu import cores
from zero_optim_cpu._native import Handle
from zero_optim_cpu.algorithms import SGD, Adagrad, Adam, AdamW, Lion
from zero_optim_cpu.kernels import available_isas, compiled_isas
from zero_optim_cpu.layouts import LAYOUTS, Field, Layout
from zero_optim_cpu.step import CpuStep

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
__version__ = "0.2.0"
