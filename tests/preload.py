"""What forked ranks and interpreters import, imported once; see conftest's `ranks` and `interpreter`.

Imports only, of what there is: a fork would lose what a thread does and what a GPU was asked for. Libraries come first
and are taken from the garbage collector. It goes through all that is left when an interpreter ends, which copies each
page of it into the fork; the packages' own objects end as ever.
"""

import gc
import importlib
from contextlib import suppress

for name in ("torch", "torch._dynamo", "torch.distributed.checkpoint", "hydra"):
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

gc.collect()
gc.freeze()

OURS = "zero_core.testing zero_offload zero_nvme zero_optim_cpu zero_train.run.train zero_deepspeed zero_hf"
for name in OURS.split():
    with suppress(ImportError):
        importlib.import_module(name)
