"""Advices on fine-tuning: what a message says is done, and then the same command is accepted."""

import json

import pytest

pytest.importorskip("trl")

from tests.following import advised
from zero_train.cli import app
from zero_train.settings import compose

GRPO = "task=grpo data.path=P task.reward=math:floor"
LORA = "data.path=A run.dry=true adapter=lora adapter.dora=true"
CASES = [  # words, advice, and words that it advises in their place
    (
        "data.sources=[{path:A,weight:2},{path:B}]",
        "give each of data.sources a weight, or none of them",
        "data.sources=[{path:A,weight:2},{path:B,weight:1}]",
        "data.sources=[{path:A},{path:B}]",
    ),
    (
        "data.sources=[{path:A,weight:2},{path:A,weight:1},{path:B,weight:1}]",
        "name it once, with the weight of both",
        "data.sources=[{path:A,weight:3},{path:B,weight:1}]",
    ),
    ("data.sources=[{weight:2}]", "has no path; write {path: FILE}", "data.sources=[{path:A,weight:2}]"),
    ("data.sources=[{path:A,weight:0}]", "leave an entry out for 0", "data.sources=[{path:A,weight:2}]"),
    ("data.path=A task.reward=a:b", "leave it out", "task.reward=null"),
    ("task=grpo data.path=P", "task=grpo needs task.reward=MODULE:FUNCTION", "task.reward=math:floor"),
    (f"{GRPO} run.patience=2", "leave run.patience out", "run.patience=null"),
    (f"{GRPO} data.validation_path=P", "leave data.validation_path out", "data.validation_path=null"),
    ("data.path=A run.patience=2 run.evaluate_every=0", "set it to epoch", "run.evaluate_every=epoch"),
    (f"{LORA} adapter=qlora", "choose adapter=lora, or set adapter.dora=false", "adapter=lora", "adapter.dora=false"),
    (f"{LORA} adapter.merge=true", "set adapter.merge=false", "adapter.merge=false"),
    (
        "data.path=A run.keep_best=true data.validation_fraction=0",
        "set data.validation_fraction=0.05 or data.validation_path",
        "data.validation_fraction=0.05",
        "data.validation_path=B",
    ),
    (
        "task=pretrain data=stdlib model.path=null run.evaluate_batches=null",
        "to a number of micro-batches",
        "run.evaluate_batches=4",
    ),
    (
        "task=pretrain data=stdlib model.path=null trl.packing=true",
        "choose task=sft, or leave it out",
        "task=sft data=jsonl data.path=A model.path=.",
    ),
]


@pytest.mark.advice("task=grpo needs task.reward=MODULE:FUNCTION", "and task=grpo takes none; leave")
@pytest.mark.promise("early-mistake")
@pytest.mark.parametrize("case", CASES, ids=[case[1][:24] for case in CASES])
def test_a_mistake_of_fine_tuning_is_corrected_as_it_says(tmp_path, monkeypatch, case):
    """Fails if what a message offers is refused too."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.chdir(tmp_path)
    for name in ("A", "B"):
        said = [[{"role": "user", "content": f"{name}{n}"}, {"role": "assistant", "content": "b"}] for n in range(9)]
        (tmp_path / name).write_text("".join(json.dumps({"messages": row}) + "\n" for row in said))
    (tmp_path / "P").write_text('{"prompt": "a"}\n' * 9)
    (tmp_path / "config.json").write_text("{}")

    def checked(words):
        words = words.replace("{path:", "{kind:jsonl,path:").split()
        data = "mixture" if any(word.startswith("data.sources") for word in words) else "jsonl"
        usual = ["task=sft", "model.path=.", f"data={data}", "offload=host", "run.checkpoint_every=4", "run.dir=run"]
        last = {word.partition("=")[0]: word for word in (*usual, *words)}
        app.check(compose.compose([*last.values()]))

    given, advice, *ways = case
    with advised(advice):
        checked(given)
    for way in ways:
        checked(f"{given} {way}")
