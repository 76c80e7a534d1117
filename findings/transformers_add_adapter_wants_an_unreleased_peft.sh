#!/usr/bin/env bash
# transformers 5.24.0 cannot add an adapter with any PEFT that was released before it.
#
# Version: transformers 5.24.0 and PEFT 0.21.2, the newest on 2026-11-28; torch 2.13.0 (CPU), Python 3.10 or newer.
# Expected: model.add_adapter(LoraConfig(...)), which transformers documents, adds the adapter, as get_peft_model does.
# Found: ValueError, "use a version >= 0.22.0", which nobody can install. get_peft_model of PEFT itself works.
# What follows for users of this library: wrap the model with peft.get_peft_model, which it takes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy transformers==5.24.0 peft==0.21.2
"$work/venv/bin/python" - <<'PYTHON'
import peft
import transformers

config = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=64, num_attention_heads=4
)
lora = peft.LoraConfig(r=4, target_modules=["q_proj"])
wrapped = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
print("peft.get_peft_model:", sum("lora" in name for name, _ in wrapped.named_parameters()), "parameters of an adapter")
try:
    transformers.LlamaForCausalLM(config).add_adapter(lora)
except ValueError as error:
    print("model.add_adapter: ValueError:", error)
    assert "0.22.0" in str(error), "the behaviour has changed"
else:
    raise SystemExit("the behaviour has changed: model.add_adapter works")
PYTHON
echo "as described"
