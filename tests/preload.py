"""What ranks import, imported once: they are forked from a process that has nothing else in it, see conftest's `ranks`.

Imports only: a fork would lose what a thread does and what a GPU was asked for.
"""

from contextlib import suppress

import zero_core.testing

with suppress(ImportError):
    from transformers import (  # noqa: F401
        BertForMaskedLM,
        GPT2LMHeadModel,
        LlamaForCausalLM,
        MixtralForCausalLM,
        T5ForConditionalGeneration,
    )

    import tests.models  # noqa: F401

__all__ = ["zero_core"]
