"""A Trainer script with a JSON of DeepSpeed's: `stock|ours ds_config.json FOLDER fp32|bf16 [CHECKPOINT]`."""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist
import transformers

from .trainers import Logs, llama, rows


def main() -> None:
    which, config, folder, precision, *resumed = sys.argv[1:]
    trainer_class, arguments_class = transformers.Trainer, transformers.TrainingArguments
    if which == "ours":
        import zero_hf

        trainer_class, arguments_class = zero_hf.sharded(trainer_class), zero_hf.sharded(arguments_class)
    given = arguments_class(
        str(Path(folder) / which),
        deepspeed=config,
        use_cpu=True,
        report_to=[],
        bf16=precision == "bf16",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        weight_decay=0.1,
        learning_rate=1e-2,
        warmup_steps=5,
        max_steps=20,
        logging_steps=1,
        save_steps=10,
    )
    logs = Logs()
    model = llama()
    trainer = trainer_class(model, given, train_dataset=rows(64), callbacks=[logs])
    trainer.train(resume_from_checkpoint=resumed[0] if resumed else None)
    if trainer.is_world_process_zero():
        (Path(folder) / f"{which}.json").write_text(json.dumps(logs.losses))
    if which == "stock":
        dist.barrier()
        os._exit(0)  # DeepSpeed's threads do not always end: then the process aborts


if __name__ == "__main__":
    main()
