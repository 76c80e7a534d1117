"""Mistakes that are told before torch and datasets are imported: fails if a message waits for one of them again."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("trl")

WRONG = {
    "value": (["run.micro_batch=0"], "run.micro_batch=0 must be at least 1"),
    "row": (["data.path={folder}/chats.jsonl"], 'chats.jsonl, line 2 has "usr" as `role`'),
    "trl": (["task=pretrain", "trl.packing=true"], "trl.packing is a setting of TRL's trainers"),
    "mixture": (["data.sources=[{{path: {folder}/good.jsonl, weight: -1}}]"], "data.sources[0].weight=-1"),
    "model": (["data.path={folder}/good.jsonl"], "has no config.json"),
    "pair": (["task=reward", "data.path={folder}/good.jsonl"], "line 1 has `messages`, and task=reward needs"),
    "head": (["data.path={folder}/good.jsonl"], "is a reward model, which scores texts"),
    "adapter": (["data.path={folder}/good.jsonl"], "has an adapter, and not the model that it was trained with"),
    "columns": (["data.sources=[{{path: {folder}/good.jsonl}}, {{path: {folder}/pairs.jsonl}}]"], "write both alike"),
    "merge": (["task=reward", "adapter=lora", "adapter.merge=true"], "set adapter.merge=false, and merge with PEFT's"),
}


@pytest.mark.promise("early-mistake")
@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_mistake_is_told_without_torch(tmp_path, name):
    given, said = WRONG[name]
    rows = [
        {"messages": [{"role": role, "content": "a"}, {"role": "assistant", "content": "b"}]}
        for role in ("user", "usr")
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "good.jsonl").write_text("".join(json.dumps(rows[0]) + "\n" for _ in range(4)))
    (tmp_path / "pairs.jsonl").write_text(4 * (json.dumps({"prompt": "a", "completion": "b"}) + "\n"))
    (tmp_path / "adapter_config.json").write_text("{}")
    if name == "model":
        (tmp_path / "adapter_config.json").unlink()
    elif name != "adapter":
        kinds = ["LlamaForSequenceClassification"] if name == "head" else []
        (tmp_path / "config.json").write_text(json.dumps({"architectures": kinds}))
    task = [] if given[0].startswith("task=") else ["task=sft"]
    words = [
        *task,
        *([] if name == "trl" else [f"model.path={tmp_path}"]),
        *(word.format(folder=tmp_path) for word in given),
    ]
    words.append(f"run.dir={tmp_path / 'run'}")
    slow = "[n for n in ('torch', 'datasets') if n in sys.modules]"
    program = f"import sys; from zero_train.cli.app import main; code = main({words}); print(code, {slow})"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["HF_DATASETS_CACHE"] = str(tmp_path / "datasets")
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    imported = ["datasets"] if name in ("row", "columns") else []  # which opens what is converted
    assert said in ended.stderr and ended.stdout.splitlines()[-1] == f"2 {imported}", ended
    assert not (tmp_path / "run").exists()
