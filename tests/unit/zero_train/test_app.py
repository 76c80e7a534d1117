"""What happens before torch and datasets are imported: mistakes are told, and a process decides about itself."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from zero_train.run import interrupt

WRONG = {
    "value": ("run.micro_batch=0", "run.micro_batch=0 must be at least 1"),
    "row": ("data.path={folder}/chats.jsonl", 'chats.jsonl, line 2 has "usr" as `role`'),
    "model": ("data.path={folder}/good.jsonl", "has no config.json"),
    "pair": ("task=reward data.path={folder}/good.jsonl", "line 1 has `messages`, and task=reward needs"),
    "head": ("data.path={folder}/good.jsonl", "is a reward model, which scores texts"),
    "adapter": ("data.path={folder}/good.jsonl", "has an adapter, and not the model that it was trained with"),
    "columns": ("data.sources=[{{path:{folder}/good.jsonl}},{{path:{folder}/pairs.jsonl}}]", "in one shape"),
    "merge": ("task=reward adapter=lora adapter.merge=true", "set adapter.merge=false, and merge with PEFT's"),
}


@pytest.mark.promise("early-mistake")
@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_mistake_is_told_without_torch(tmp_path, name):
    pytest.importorskip("trl")
    given, said = WRONG[name]
    rows = [
        {"messages": [{"role": role, "content": "a"}, {"role": "assistant", "content": "b"}]}
        for role in ("user", "usr")
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "good.jsonl").write_text(4 * (json.dumps(rows[0]) + "\n"))
    (tmp_path / "pairs.jsonl").write_text(4 * (json.dumps({"prompt": "a", "completion": "b"}) + "\n"))
    if name != "model":
        (tmp_path / "adapter_config.json").write_text("{}")
    if name not in ("model", "adapter"):
        kinds = ["LlamaForSequenceClassification"] if name == "head" else []
        (tmp_path / "config.json").write_text(json.dumps({"architectures": kinds}))
    task = [] if given.startswith("task=") else ["task=sft"]
    words = [*task, f"model.path={tmp_path}", *given.format(folder=tmp_path).split()]
    words.append(f"run.dir={tmp_path / 'run'}")
    slow = "[n for n in ('torch', 'datasets') if n in sys.modules]"
    program = f"import sys; from zero_train.cli.app import main; code = main({words}); print(code, {slow})"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["HF_DATASETS_CACHE"] = str(tmp_path / "datasets")
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    imported = ["datasets"] if name in ("row", "columns") else []  # which opens what is converted
    assert said in ended.stderr and ended.stdout.splitlines()[-1] == f"2 {imported}", ended
    assert not (tmp_path / "run").exists()


REPORT = """
import os, sys, types

def main():
    names = ("THP_MEM_ALLOC_ENABLE", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    print(*(os.environ.get(name, "-") for name in names), "torch" in sys.modules)

sys.modules["zero_train.cli.app"] = types.SimpleNamespace(main=main)
from zero_train.__main__ import console
console()
"""


@pytest.mark.promise("huge-pages")
@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "1 1000 -"),
        ({"THP_MEM_ALLOC_ENABLE": "0"}, "0 1000 -"),
        ({"GOMP_SPINCOUNT": "7"}, "1 7 -"),
        ({"OMP_WAIT_POLICY": "active"}, "1 - active"),
    ],
)
def test_huge_pages_and_short_waits_are_asked_for_before_torch_is_imported_unless_the_user_said_something(
    given, found, monkeypatch
):
    for name in ("THP_MEM_ALLOC_ENABLE", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    ended = subprocess.run([sys.executable, "-c", REPORT], capture_output=True, text=True, timeout=60)
    assert (ended.stdout.split(), ended.returncode) == ([*found.split(), "False"], 0), ended.stderr


@pytest.fixture(autouse=True)
def handlers_put_back():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_the_loop_the_first_signal_is_only_noted(number):
    signal.signal(number, signal.SIG_IGN)  # as a shell's background job inherits it
    with interrupt.handled() as asked:
        with asked.gentle():
            os.kill(os.getpid(), number)
            assert asked.signal == number
    assert signal.getsignal(number) == signal.SIG_IGN


@pytest.mark.promise("second-signal")
def test_a_second_press_ends_the_process_and_an_echo_does_not(monkeypatch, capsys):
    ended = []
    clock = [100.0]
    monkeypatch.setattr(interrupt.os, "_exit", ended.append)
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: clock[0])
    asked = interrupt.Interrupt()
    with asked.gentle():
        asked.receive(signal.SIGINT)
        clock[0] += interrupt.REPEAT_SECONDS / 2  # torchrun passing on what the terminal already sent
        asked.receive(signal.SIGINT)
        assert ended == []
        clock[0] += interrupt.REPEAT_SECONDS
        asked.receive(signal.SIGINT)
    assert ended == [130] and capsys.readouterr().err == "stopped at once\n"


def test_outside_the_main_thread_nothing_is_installed():
    seen = []

    def work():
        with interrupt.handled() as asked:
            seen.append((asked.signal, signal.getsignal(signal.SIGINT)))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(0, before)]
