"""Runs two stages of TRL in one process: SFT with LoRA, DPO with new adapters, then answers of the merged model.

python examples/two_stages.py --model FOLDER     a chat model and its tokenizer, as save_pretrained wrote them
"""

import argparse

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import zero_hf

SFTTrainer, DPOTrainer = zero_hf.sharded(SFTTrainer), zero_hf.sharded(DPOTrainer)  # tiers: see ZERO_HF_CONFIG

_TOWNS = (
    "Norway Oslo Peru Lima Kenya Nairobi Japan Tokyo Cuba Havana Egypt Cairo Ghana Accra Greece Athens Italy Rome "
    "Chile Santiago Iran Tehran Nepal Kathmandu"
)
CAPITALS = dict(zip(_TOWNS.split()[::2], _TOWNS.split()[1::2], strict=True))
QUESTION = "What is the capital of Norway?"


def said(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def chats() -> list[dict]:
    """Questions, each with an answer in one sentence."""
    return [
        {
            "prompt": said("user", f"What is the capital of {country}?"),
            "completion": said("assistant", f"{capital} is the capital of {country}."),
        }
        for country, capital in CAPITALS.items()
    ]


def preferences() -> list[dict]:
    """The same questions: an answer of one word is preferred to a hesitant one."""
    return [
        {
            "prompt": said("user", f"What is the capital of {country}?"),
            "chosen": said("assistant", f"{capital}."),
            "rejected": said("assistant", f"I am not sure, but it may be {capital}, or another city."),
        }
        for country, capital in CAPITALS.items()
    ]


def usual(folder: str, steps: int) -> dict:
    return {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": 2,
        "max_length": 128,
        "bf16": False,
        "activation_checkpointing": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    }


def lora() -> LoraConfig:
    return LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def sft(model, tokenizer, folder: str, steps: int):
    """The first stage. Returns its trainer, whose model has adapters."""
    args = SFTConfig(learning_rate=1e-3, **usual(folder, steps))
    rows = Dataset.from_list(chats())
    trainer = SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer, peft_config=lora())
    trainer.train()
    return trainer


def dpo(model, tokenizer, folder: str, steps: int):
    """The second stage. The reference is the model without the adapters of this stage."""
    args = DPOConfig(learning_rate=1e-3, beta=0.1, **usual(folder, steps))
    rows = Dataset.from_list(preferences())
    trainer = DPOTrainer(model, args=args, train_dataset=rows, processing_class=tokenizer, peft_config=lora())
    trainer.train()
    return trainer


def answer(model, tokenizer, tokens: int = 24) -> str:
    asked = tokenizer.apply_chat_template(said("user", QUESTION), add_generation_prompt=True, return_dict=True)
    asked = asked.convert_to_tensors("pt", prepend_batch_axis=True).to(model.device)
    found = model.eval().generate(**asked, do_sample=False, max_new_tokens=tokens, use_cache=True)
    return tokenizer.decode(found[0, asked["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--output", default="runs/two_stages")
    parser.add_argument("--steps", type=int, default=12, help="of each stage")
    given = parser.parse_args()

    set_seed(0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(given.model), AutoTokenizer.from_pretrained(given.model)
    first = sft(model, tokenizer, f"{given.output}/sft", given.steps)
    model = first.model.merge_and_unload()
    second = dpo(model, tokenizer, f"{given.output}/dpo", given.steps)
    model = second.model.merge_and_unload()
    print(QUESTION, answer(model, tokenizer))
    model.save_pretrained(f"{given.output}/tuned")
    for trainer in (first, second):
        trainer.save_state()


if __name__ == "__main__":
    main()
