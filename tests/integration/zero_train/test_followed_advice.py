"""Advice of zero-train that is followed: each test makes a mistake, does what the error says, and that works."""

import importlib.util
import json
import re

import pytest

pytest.importorskip("transformers")
pytest.importorskip("zero_hf")

import torch

from zero_train import (
    checks,
    config,
    conversations,
    data,
    deepspeed,
    finetune,
    generate,
    loop,
    models,
    planning,
    pretrained,
    resume,
    row_files,
    rows,
    run_folder,
)
from zero_train.errors import ConfigError
from zero_train.ranks import Ranks
from zero_train.schema import DataConfig, ModelConfig


def composed(*words):
    return config.compose(["recipe=tiny", "precision=bf16", "run.dir=runs/x", *words])


def values(*words):
    checks.values(composed(*words))


def packages(*words):
    checks.packages(composed(*words))


def nvme(*words):
    checks.nvme(composed("io.allow_memory=true", *words), 0)


def here(*words):
    planning.here(composed(*words), Ranks())


def several(*words):
    return config.jobs(words, "-m" in words) if "-m" not in words else config.jobs(words[1:], True)


def tuned(*words):
    pytest.importorskip("trl")
    finetune.FineTune(composed("task=sft", "model.path=x", "data.path=x", *words), Ranks(), None, None)._check()


def schedule(*words):
    optim = composed(*words).optim
    loop.schedule_of(optim, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=optim.lr))


def bare(*words):
    return config.compose(words)


@pytest.mark.parametrize(
    ("check", "wrong", "advice", "ways"),
    [
        (values, "run.dir=''", "name a folder with run.dir=…", ["run.dir=x"]),
        (values, "+offload.tiers.x={gib: 1}", "write one as in conf/tier/compressed.yaml", ["tier=compressed"]),
        (
            values,
            "+precision.loss_scale={a: 1}",
            "give a number, dynamic, null, or arguments of zero_core.LossScale",
            [f"precision.loss_scale={each}" for each in ("1024", "dynamic", "null", "{hysteresis: 2}")],
        ),
        (values, "optim.max_grad_norm=0", "set it to null for no clipping", ["optim.max_grad_norm=null"]),
        (values, "hardware.device=abacus", "choose cpu, cuda, xpu", [f"hardware.device={d}" for d in ("cpu", "cuda")]),
        (here, "hardware.device=cuda", "or run on this one with hardware=detect", ["hardware=detect"]),
        (here, "hardware.nodes=2", "or run on this machine with hardware=detect", ["hardware=detect"]),
        (nvme, "offload=nvme offload.nvme_paths=[/nowhere]", "name a writable folder", ["offload=host", "here"]),
        (bare, "run.seed=???", "run.seed has no value; give one with run.seed=…", ["run.seed=3"]),
        (bare, "run.resume=auto", "name a folder with run.dir=…", ["run.resume=auto run.dir=x"]),
        (bare, "data.path=a{b", "write KEY=VALUE, with quotes around text", ["data.path='a{b'"]),
        (several, "run.steps=3,4", "add -m to run one after the other", ["-m run.steps=3,4"]),
        (several, "offload=nvme offload.nvme_paths=/a,/b", "write [a,b]", ["offload=nvme offload.nvme_paths=[/a,/b]"]),
        (
            bare,
            "offload.tiers.x.y=1",
            "add a tier with a plus before the key: +offload.tiers.NAME={…}",
            ["+offload.tiers.x={y:1}"],
        ),
        (
            schedule,
            "optim.schedule={type:Warm}",
            "give {type: NAME, params: {...}} with one of",
            ["optim.schedule={type:WarmupLR,params:{warmup_num_steps:3}}"],
        ),
        (tuned, "model=llama", "name one with model.path=FOLDER", [""]),
        (tuned, "zero.update_in_backward=true", "set zero.update_in_backward=false", ["zero.update_in_backward=false"]),
        (tuned, "adapter.merge=true run.export=false", "set run.export=true", ["adapter.merge=true run.export=true"]),
        (tuned, "precision=fp16", "set precision=bf16 or precision=fp32", ["precision=bf16", "precision=fp32"]),
    ],
)
def test_keys_that_an_error_names_pass(tmp_path, check, wrong, advice, ways):
    def words(text):
        text = f"offload.nvme_paths=[{tmp_path}]" if text == "here" else text
        return [text] if "{" in text else text.split()

    with pytest.raises(ConfigError, match=re.escape(advice)):
        check(*words(wrong))
    for way in ways:
        check(*words(way))


@pytest.mark.parametrize(
    ("missing", "wrong", "advice", "way"),
    [
        ("zero_optim_cpu", "optim=lion", "pip install 'zero-train[cpu]', or choose optim=adamw", "optim=adamw"),
        ("zero_optim_cpu", "offload=host", "or choose offload=none", "offload=none"),
        ("zero_hf", "optim.schedule={type:WarmupLR}", "or use optim.warmup_steps", "optim.warmup_steps=1"),
        ("zero_nvme", "offload=nvme", "pip install 'zero-train[nvme]', or choose offload=host", "offload=host"),
    ],
)
def test_a_run_without_a_package_chooses_what_an_error_names(monkeypatch, missing, wrong, advice, way):
    real = importlib.util.find_spec
    packages(wrong)  # as after the installation
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else real(name))
    with pytest.raises(ConfigError, match=re.escape(advice)):
        packages("offload=none", wrong)
    packages("offload=none", way)


def test_auto_plans_with_nvme_where_a_folder_on_a_disk_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(checks, "memory_filesystem", lambda folder: "tmpfs")
    assert "is in memory (tmpfs)" in checks.auto_without_nvme(composed("offload=auto"))
    assert checks.uses_nvme(composed("offload=auto", f"offload.nvme_paths=[{tmp_path}]"))


# -- data --------------------------------------------------------------------------------------------------------------

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def lines(path, *found):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in found))
    return str(path)


@pytest.mark.parametrize(
    ("given", "advice", "ways"),
    [
        ({"kind": "jsonl"}, "data=text, stdlib or synthetic", [{"kind": "text"}, {"kind": "synthetic"}]),
        ({"sequence_length": 500}, "or lower data.sequence_length", [{"sequence_length": 4}, {"path": "long.txt"}]),
        ({"pattern": "*.txt"}, "chooses nothing; leave one out", [{}, {"path": ".", "pattern": "*.txt"}]),
        ({"path": "zeros"}, "name a text file", [{}]),
        ({"path": "nowhere"}, "name text that exists with data.path", [{}]),
        ({"path": ".", "pattern": "*.c"}, "change data.path or data.pattern", [{"path": "."}, {}]),
    ],
)
def test_text_that_an_error_asks_for_is_read(monkeypatch, tmp_path, given, advice, ways):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text " * 40)
    (tmp_path / "long.txt").write_text("some text " * 4000)
    (tmp_path / "zeros").write_bytes(bytes(1000))
    base = {"kind": "text", "path": "a.txt", "sequence_length": 4, "validation_fraction": 0.2}
    with pytest.raises(ConfigError, match=re.escape(advice)):
        data.load(DataConfig(**base | given), 0)
    for way in ways:
        length = {"sequence_length": given["sequence_length"]} if "path" in way and "sequence_length" in given else {}
        data.load(DataConfig(**base | length | way), 0)


@pytest.mark.parametrize(
    ("content", "advice", "fixed"),
    [
        (b'{"a": 1}\n\n{"a": 2}\n', "is empty; delete it", b'{"a": 1}\n{"a": 2}\n'),
        (b'{"a": "\xe9"}\n', "save it as UTF-8", b'{"a": "\xc3\xa9"}\n'),
    ],
)
def test_lines_that_are_corrected_are_read(tmp_path, content, advice, fixed):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    assert any(advice in str(row) for _, row in row_files.jsonl(path))
    path.write_bytes(fixed)
    assert all(isinstance(row, dict) for _, row in row_files.jsonl(path))


def test_empty_lines_of_a_csv_file_are_deleted_and_a_pattern_goes_with_a_folder(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text\na\n\nb\n")
    assert any("is empty; delete it" in str(row) for _, row in row_files.csv_rows(path))
    path.write_text("text\na\nb\n")
    assert [row for _, row in row_files.csv_rows(path)] == [{"text": "a"}, {"text": "b"}]
    with pytest.raises(ConfigError, match="chooses nothing; leave one out"):
        row_files.found("data.path", str(path), "csv", "a*")
    assert row_files.found("data.path", str(path), "csv", "*") == [path]
    assert row_files.found("data.path", str(tmp_path), "csv", "a*") == [path]


@pytest.mark.parametrize(
    ("found", "advice", "fixed"),
    [
        ("a", "write one object with", {"text": "a"}),
        ({"prompt": CHAT["messages"][:1], "completion": "b"}, "write both alike", {"prompt": "a", "completion": "b"}),
        ({"text": "a\ud800"}, "which is no character; remove it", {"text": "a"}),
    ],
)
def test_rows_that_are_corrected_are_read(found, advice, fixed):
    with pytest.raises(rows.Mistake, match=advice):
        rows.read(found, "sft")
    rows.read(fixed, "sft")


@pytest.mark.parametrize(
    ("given", "advice", "ways"),
    [
        ({"path": None}, "name what to train on with data.path=…", [{}]),
        ({"validation_path": "two"}, "name other rows, or leave it out", [{"validation_path": "other"}, {}]),
        ({"validation_path": "texts"}, "write both alike", [{"validation_path": "other"}]),
        ({"path": "mixed"}, "write all rows alike", [{}]),
        ({"path": "none"}, "write at least one, or change data.path", [{}]),
        (
            {"path": "one"},
            "write more, or set data.validation_fraction=0",
            [{}, {"path": "one", "validation_fraction": 0}],
        ),
        ({"kind": "datasets"}, "choose another data", [{"kind": "jsonl"}]),
        ({"kind": "datasets", "path": "splits"}, "name one, such as", [{"kind": "datasets", "path": "splits/train"}]),
    ],
)
def test_rows_that_an_error_asks_for_are_converted(monkeypatch, tmp_path, given, advice, ways):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    monkeypatch.chdir(tmp_path)
    chats = [{**CHAT, "id": number} for number in range(2)]
    found = {"two": chats, "other": [*chats, CHAT], "texts": [{"text": "a"}] * 2, "one": [CHAT], "none": []}
    for name, written in {**found, "mixed": [CHAT, {"text": "a"}]}.items():
        lines(tmp_path / name, *written)
    part = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])
    datasets.DatasetDict(train=part, test=part).save_to_disk("splits")
    base = {"kind": "jsonl", "path": "two", "validation_fraction": 0.5}
    with pytest.raises(ConfigError, match=advice):
        conversations.load(DataConfig(**base | given), "sft", tmp_path / "cache")
    for way in ways:
        conversations.load(DataConfig(**base | way), "sft", tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_another_folder(tmp_path):
    pytest.importorskip("datasets")
    given = DataConfig(kind="jsonl", path=lines(tmp_path / "a", CHAT, CHAT), validation_fraction=0)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="make some, or use a folder with more"):
        conversations.load(given, "sft", tmp_path / "file" / "cache")
    conversations.load(given, "sft", tmp_path / "cache")


# -- models, folders and commands --------------------------------------------------------------------------------------


def test_models_that_an_error_asks_for_are_built(monkeypatch, tmp_path):
    import huggingface_hub
    from transformers import LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "layers": 1, "heads": 4}
    with pytest.raises(ConfigError, match="set model.vocab_size=256"):
        models.build(ModelConfig(kind="llama", vocab_size=100, **sizes), 16)
    models.build(ModelConfig(kind="llama", vocab_size=256, **sizes), 16)
    (tmp_path / "empty").mkdir()
    LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, vocab_size=256).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="name a folder saved by save_pretrained"):
        models.build(ModelConfig(kind="hf", path=str(tmp_path / "empty")), 16)
    models.build(ModelConfig(kind="hf", path=str(tmp_path)), 16)
    with pytest.raises(ConfigError, match="name a folder saved by save_pretrained"):
        pretrained.local(composed(f"model.path={tmp_path / 'empty'}"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: 1 / 0)
    with pytest.raises(ConfigError, match="the hub did not give it: .*; name a folder"):
        pretrained.local(composed("model.path=someone/model"))
    assert pretrained.local(composed(f"model.path={tmp_path}")) == tmp_path


def test_models_of_bytes_are_named_or_data_is_given_as_bytes(tmp_path):
    with pytest.raises(ConfigError, match="name another model"):
        models._byte_level(tmp_path, 100, False)
    with pytest.raises(ConfigError, match="name a model that was trained on bytes, or set data.as_bytes=true"):
        models._byte_level(tmp_path, 1000, False)
    models._byte_level(tmp_path, 256, False)
    models._byte_level(tmp_path, 1000, True)


def test_folders_that_an_error_asks_for_are_taken(tmp_path):
    def found(*words):
        return resume.found(composed(f"run.dir={tmp_path / 'new'}", *words))

    with pytest.raises(ConfigError, match="or start again without run.resume"):
        found(f"run.resume={tmp_path}")
    assert found() is None
    for content, advice in (("{", "cannot be read: .*; name another folder"), ("model: {layers: 1}", "another folder")):
        broken = tmp_path / "broken"
        broken.mkdir(exist_ok=True)
        (broken / "config.yaml").write_text(content)
        (broken / "metrics.jsonl").write_text("{}\n")
        with pytest.raises(ConfigError, match=advice):
            found("run.resume=auto", f"run.dir={broken}")
        assert found("run.resume=auto") is None


@pytest.mark.parametrize(
    ("wrong", "advice", "way"),
    [
        ("hello", "cannot read 'hello': write zero-train generate run.dir=FOLDER", "run.dir=x generate.prompt=hello"),
        ("generate.prompt=hello", "run.dir is not given: write zero-train generate run.dir", "run.dir=x"),
        ("run.dir=x generate.tokens=0", "set it to 1, for instance", "run.dir=x generate.tokens=1"),
    ],
)
def test_a_question_is_asked_as_an_error_says(wrong, advice, way):
    with pytest.raises(ConfigError, match=advice):
        generate.Request.of(wrong.split())
    generate.Request.of(way.split())


@pytest.mark.parametrize(
    ("wrong", "advice", "fixed"),
    [
        ({"torch_autocast": {"enabled": True}}, "write bf16 instead", {"bf16": {"enabled": True}}),
        ({"scheduler": {"type": "StepLR", "params": {"step_size": 2}}}, "takes DeepSpeed's own schedules only", {}),
    ],
)
def test_a_file_of_deepspeed_is_written_as_its_table_says(tmp_path, wrong, advice, fixed):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, **wrong}))
    with pytest.raises(deepspeed.Refused) as raised:
        deepspeed.read(str(path), ())
    assert advice in raised.value.table
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, **fixed}))
    deepspeed.read(str(path), ())


def test_one_file_of_deepspeed_is_named():
    with pytest.raises(ConfigError, match="write deepspeed=ds_config.json once"):
        deepspeed.split(["deepspeed=a.json", "deepspeed=b.json"])
    assert deepspeed.split(["deepspeed=ds_config.json"]) == ([], "ds_config.json")


def test_a_folder_in_use_is_not_taken_twice(tmp_path):
    def claimed(name):
        return run_folder.claimed(tmp_path / name)

    with claimed("a"):
        with pytest.raises(ConfigError, match="wait until that run ends, or name another folder"), claimed("a"):
            pass
        with claimed("b"):
            pass
    with claimed("a"):
        pass
