"""Answers questions with the model that a run of zero-train exported: `zero-train generate run.dir=FOLDER`.

Loads the whole model into memory with transformers: nothing is sharded or on NVMe here, as a small model needs neither.
Owns the command's keys and the check of the run folder. Torch is imported after both are checked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_train.errors import ConfigError, told
from zero_train.model import folders

_HELP = "write zero-train generate run.dir=FOLDER, and generate.prompt=TEXT or questions on stdin, one a line"
_KEYS: dict[str, Any] = {  # of the command, and their defaults
    "run.dir": "",  # the run folder, or a folder that save_pretrained wrote
    "generate.prompt": "",  # what to answer; without it, each line of stdin
    "generate.tokens": 128,  # length of an answer, at most
    "generate.temperature": 0.0,  # divides the scores before a token is drawn; 0: always the most likely token
    "generate.seed": 0,  # of the drawn tokens
}


def run(words: Sequence[str]) -> int:
    """Runs the command. Answers one prompt, or each line of stdin until its end. Returns the exit code.

    Raises:
        ConfigError: a key is wrong, or the folder has no model that can be loaded and writes text.
    """
    folder, prompt, *how = _read(words).values()
    speaker = Speaker.of(Path(folder))
    if not prompt and sys.stdin.isatty():
        sys.stdout.write("ask in one line; Ctrl-D ends\n")
    prompts: Iterable[str] = [prompt] if prompt else sys.stdin
    for asked in filter(None, map(str.strip, prompts)):
        sys.stdout.write(speaker.answer(asked, *how) + "\n")
        sys.stdout.flush()
    return 0


def _read(words: Sequence[str]) -> dict[str, Any]:
    """Returns the value of each key. Raises ConfigError for a key that does not exist and a value of another type."""
    values = dict(_KEYS)
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"cannot read '{word}': {_HELP}")
        if key not in _KEYS:
            raise ConfigError(f"the key {key} does not exist; choose from {', '.join(_KEYS)}")
        try:
            values[key] = type(_KEYS[key])(value)
        except ValueError:
            raise ConfigError(f"{key}={value} is not a number; set {key}={_KEYS[key]}, for instance") from None
    if not values["run.dir"]:
        raise ConfigError(f"run.dir is not given: {_HELP}")
    for key, least in (("generate.tokens", 1), ("generate.temperature", 0)):
        if values[key] < least:
            raise ConfigError(f"{key}={values[key]} is too small; set it to 1, for instance")
    return values


@dataclass(frozen=True)
class Speaker:
    """A model in memory, on torch's accelerator if there is one, and its tokenizer."""

    model: Any
    tokenizer: Any | None  # None: it reads bytes

    @classmethod
    def of(cls, folder: Path) -> Speaker:
        """Loads the model that the run in `folder` exported, or a folder that save_pretrained wrote.

        Raises:
            ConfigError: `folder` is no run's, the run exported nothing or a reward model, or transformers cannot load
                it.
        """
        weights = folder if (folder / "config.json").is_file() else _exported(folder)
        if folders.scores(weights):
            raise ConfigError(
                f"{weights} holds a reward model, which scores texts and writes none; open it with transformers' "
                "AutoModelForSequenceClassification, or name a run of another task"
            )

        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        kinds = (OSError, ValueError, KeyError, ImportError, RuntimeError)
        with told(f"{weights} cannot be loaded: ", *kinds, way_out="; name another run with run.dir=…"):
            model: Any = AutoModelForCausalLM.from_pretrained(str(weights))  # under an adapter, the one that it names
            has_tokenizer = (weights / "tokenizer_config.json").is_file()
            tokenizer = AutoTokenizer.from_pretrained(weights, local_files_only=True) if has_tokenizer else None
        where = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return cls(model.to(where or "cpu").eval(), tokenizer)

    def answer(self, prompt: str, tokens: int = 128, temperature: float = 0.0, seed: int = 0) -> str:
        """Returns the answer to one prompt, alone in its context. A model that reads bytes continues the text."""
        import torch

        from zero_train.model import causal_lm
        from zero_train.schema import RunConfig

        device = self.model.device
        if self.tokenizer is None:
            how = RunConfig(seed=seed, sample_prompt=prompt, sample_bytes=tokens, sample_temperature=temperature)
            context = self.model.config.get_text_config().max_position_embeddings
            return causal_lm.sample(self.model, how, context, device)
        text, asked = prompt, [{"role": "user", "content": prompt}]
        if self.tokenizer.chat_template is not None:
            text = self.tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        read = self.tokenizer(text, return_tensors="pt", add_special_tokens=text is prompt).to(device)
        torch.manual_seed(seed)
        drawn = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        said = self.model.generate(
            **read, **drawn, max_new_tokens=tokens, pad_token_id=self.tokenizer.pad_token_id, use_cache=True
        )
        return str(self.tokenizer.decode(said[0, read["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def _exported(folder: Path) -> Path:
    """Returns `pretrained` in a run folder."""
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"run.dir={folder} has no config.yaml; set run.dir to the folder of a run")
    weights = folder / "pretrained"
    if not any((weights / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ConfigError(
            f"run.dir={folder} has no exported model: the run did not end, or had run.export=false; repeat the run's "
            f"command with run.dir={folder} run.export=true run.resume=auto. Without a checkpoint, the run starts over"
        )
    return weights
