"""What forked ranks and interpreters import, imported once; see conftest's `ranks` and `interpreter`.

Imports only, of what there is: a fork would lose what a thread does and what a GPU was asked for.
"""

import importlib
from contextlib import suppress

for name in (
    "torch",
    "zero_core.testing",
    "zero_offload",
    "zero_nvme",
    "zero_optim_cpu",
    "zero_train.train",
    "zero_hf",
):
    with suppress(ImportError):
        importlib.import_module(name)

with suppress(ImportError):
    from transformers import (  # noqa: F401
        BertForMaskedLM,
        GPT2LMHeadModel,
        LlamaForCausalLM,
        MixtralForCausalLM,
        T5ForConditionalGeneration,
    )
