"""The rules of the house, held over every file of paw/ and kernels/: who imports what, and what is never called."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(p for folder in ("paw", "kernels") for p in (ROOT / folder).rglob("*.py") if "build" not in p.parts)
NAMES = [str(path.relative_to(ROOT)) for path in SOURCES]
LAZY = {  # library -> extra that installs it
    "vllm": "vllm",
    "alfworld": "alfworld",
    "textworld": "alfworld",
    "peft": "lora",
    "liger_kernel": "liger",
    "rapidfuzz": "webshop",
    "bm25s": "search",
    "faiss": "search",
    "fastapi": "search",
    "uvicorn": "search",
    "httpx": "search",
    "pyarrow": "search",
    "openai": "agents",
}
UNPICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "jsonpickle"}
IO_MODULES = {"io", "os", "pathlib", "shutil", "socket", "subprocess", "tempfile", "threading", "logging"}

every_file = pytest.mark.parametrize("name", NAMES)


def parse(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(encoding="utf-8"), filename=name)


def module_name(name: str) -> str:
    """paw/signal/loss.py -> paw.signal.loss, kernels/paw_kernels/x.py -> paw_kernels.x."""
    parts = list(Path(name).with_suffix("").parts)
    parts = parts[1:] if parts[0] == "kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, name: str, *, inside_functions: bool = True) -> Iterator[str]:
    """Dotted modules imported at run time, relative ones resolved. `if TYPE_CHECKING:` blocks do not count."""
    package = module_name(name) if name.endswith("__init__.py") else module_name(name).rpartition(".")[0]
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            yield from (str(part.value) for part in node.args[:1] if isinstance(part, ast.Constant))
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in node.orelse:
                yield from imports(other, name, inside_functions=inside_functions)
        elif inside_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports(node, name, inside_functions=inside_functions)


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def import_faults(tree: ast.AST, name: str) -> list[str]:
    """Imports that a file's place in the house does not allow."""
    found = list(imports(tree, name))
    top = [module for module in imports(tree, name, inside_functions=False) if within(module, *LAZY)]
    faults = [f"imports {module} outside a function" for module in top]
    allowed: tuple[str, ...] | None = None
    if name.startswith("kernels/"):
        allowed = ("torch", "triton", "paw_kernels")
    elif name.startswith("paw/signal/"):
        allowed = ("torch", "paw.types", "paw.signal")
        if name in ("paw/signal/loss.py", "paw/signal/selection.py"):
            allowed += ("paw_kernels",)
        faults += [f"a pure stage imports {m}" for m in found if within(m, "torch.distributed", *IO_MODULES)]
    elif name.startswith("paw/experience/envs/"):
        heavy = ("torch", "transformers", "paw_kernels", "paw.signal", "paw.learner", "paw.experience.engines", "vllm")
        faults += [f"an environment imports {module}" for module in found if within(module, *heavy)]
    if allowed is not None:
        outside = [m for m in found if m.split(".")[0] not in sys.stdlib_module_names and not within(m, *allowed)]
        faults += [f"imports {module}, allowed are {', '.join(allowed)} and the standard library" for module in outside]
    return faults


def call_faults(tree: ast.AST, name: str) -> list[str]:
    """Calls and imports through which a file or a text could run code."""
    faults = [f"imports {module}" for module in imports(tree, name) if module.split(".")[0] in UNPICKLERS]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        where = f"line {node.lineno}: {called}"
        if called in ("eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec"):
            faults.append(where)
        if called in ("os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load"):
            faults.append(where)
        if called == "torch.load" and options.get("weights_only") != "True":
            faults.append(f"{where} without weights_only=True")
        for option, safe in {"weights_only": "True", "shell": "False", "allow_pickle": "False"}.items():
            if option in options and options[option] != safe:
                faults.append(f"{where}({option}={options[option]})")
        if options.get("trust_remote_code", "True" if called.endswith(".from_pretrained") else "False") != "False":
            faults.append(f"{where} without trust_remote_code=False")  # transformers asks on standard input
    for node in ast.walk(tree):  # the same options on their way through a dict
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                pair = (ast.unparse(key) if key else "", ast.unparse(value))
                if pair in {("'trust_remote_code'", "True"), ("'shell'", "True"), ("'weights_only'", "False")}:
                    faults.append(f"line {node.lineno}: {{{pair[0]}: {pair[1]}}}")
    return faults


def purity_faults(tree: ast.AST) -> list[str]:
    faults = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            faults.append(f"line {node.lineno}: global {', '.join(node.names)}")
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            seeded = called.startswith("random.Random") or any(keyword.arg == "generator" for keyword in node.keywords)
            global_random = called.startswith(("random.", "torch.rand", "torch.manual_seed")) and not seeded
            if global_random or called in ("open", "print", "input") or ".distributed." in called:
                faults.append(f"line {node.lineno}: {called}")
    return faults


@every_file
def test_imports_stay_in_their_place(name):
    assert import_faults(parse(name), name) == []


@every_file
def test_nothing_runs_code_from_files_or_text(name):
    assert call_faults(parse(name), name) == []


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("paw/signal/")])
def test_stages_are_pure(name):
    assert purity_faults(parse(name)) == []


@every_file
def test_a_lazy_import_names_its_extra(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for library in {module.split(".")[0] for module in imports(parse(name), name)} & LAZY.keys():
        assert f"paw-trainer[{LAZY[library]}]" in text, (
            f"{name} imports {library}; where it is missing, a UserError must name 'paw-trainer[{LAZY[library]}]'"
        )


@every_file
def test_files_are_short(name):
    limit = 250 if name == "paw/train.py" else 400
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= limit


def test_the_kernels_folder_is_no_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def loaded_after(modules: list[str]) -> set[str]:
    """Top-level packages in a fresh interpreter that imported `modules`."""
    code = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {module.split(".")[0] for module in done.stdout.split()}


def test_the_command_line_starts_without_torch():
    light = ["paw", "paw.config", "paw.types", "paw.errors", *(["paw.cli"] if "paw/cli.py" in NAMES else [])]
    assert loaded_after(light).isdisjoint({"torch", "transformers", "numpy", *LAZY})


def test_environments_start_without_torch():
    modules = [module_name(name) for name in NAMES if name.startswith("paw/experience/envs/")]
    modules = [module for module in modules if not module.endswith("__main__")]
    assert loaded_after(modules).isdisjoint({"torch", "transformers", *LAZY})


# --- the rules themselves can fail ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("paw/signal/rows.py", "import numpy"),
        ("paw/signal/rows.py", "from paw import config"),
        ("paw/signal/rows.py", "import paw_kernels"),
        ("paw/signal/rows.py", "from torch import distributed"),
        ("paw/signal/rows.py", "from pathlib import Path"),
        ("paw/signal/rows.py", "from ..learner import optim"),
        ("paw/experience/envs/base.py", "def f():\n    from torch import Tensor"),
        ("paw/experience/envs/x/__init__.py", "from ...engines import base"),
        ("paw/experience/engines/vllm.py", "from vllm import LLM"),
        ("paw/train.py", "try:\n    import alfworld.agents\nexcept ImportError:\n    pass"),
        ("paw/train.py", "class A:\n    import textworld"),
        ("kernels/paw_kernels/a.py", "import numpy as np"),
        ("kernels/paw_kernels/a.py", "from paw.types import Row"),
    ],
)
def test_a_forbidden_import_is_seen(name, code):
    assert import_faults(ast.parse(code), name)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("paw/signal/loss.py", "import math\nimport torch\nfrom paw_kernels import f\nfrom paw.types import Row"),
        ("paw/signal/packing.py", "from .rows import to_rows"),
        ("paw/experience/envs/base.py", "if TYPE_CHECKING:\n    from torch import Tensor"),
        ("paw/experience/engines/vllm.py", "def f():\n    from vllm import LLM"),
        ("kernels/paw_kernels/a.py", "from ._backend import pick\nimport triton.language as tl"),
    ],
)
def test_an_allowed_import_passes(name, code):
    assert import_faults(ast.parse(code), name) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "g(weights_only=flag)",
        "eval('1')",
        "exec(text)",
        "subprocess.run(c, shell=True)",
        "subprocess.run(c, shell=flag)",
        "os.system(c)",
        "f(trust_remote_code=True)",
        "AutoModel.from_pretrained(path)",
        "f(**{'trust_remote_code': True})",
        "np.load(f, allow_pickle=True)",
        "yaml.load(f)",
    ],
)
def test_a_forbidden_call_is_seen(code):
    assert call_faults(ast.parse(code), "paw/x.py")


def test_harmless_calls_pass():
    code = "model.eval()\nre.compile(p)\ntorch.compile(f)\ntorch.load(f, weights_only=True)\nf(shell=False)"
    assert call_faults(ast.parse(code), "paw/x.py") == []


@pytest.mark.parametrize(
    "code",
    [
        "open(p)",
        "print(1)",
        "def f():\n    global a",
        "torch.distributed.all_reduce(x)",
        "random.shuffle(a)",
        "torch.randperm(3)",
    ],
)
def test_an_impure_stage_is_seen(code):
    assert purity_faults(ast.parse(code))


def test_seeded_randomness_is_pure():
    assert purity_faults(ast.parse("random.Random(seed).shuffle(a)\ntorch.randperm(3, generator=g)")) == []


IN_PLACE = {"paw/trust/files.py", "paw/trust/checkpoint.py", "paw/learner/export.py", "paw/learner/warmup.py"}
"""`write_file` itself, and those that fill a folder which is renamed as a whole."""


@pytest.mark.parametrize(
    "name", [n for n in NAMES if n.startswith(("paw/run", "paw/trust/", "paw/learner/", "paw/show/report"))]
)
def test_a_runs_files_are_written_whole(name):
    """By paw.trust.files.write_file: what is written in place is cut where the disk fills up or the power goes."""
    called = [
        node.func.attr for node in ast.walk(parse(name)) if isinstance(node, ast.Call) and hasattr(node.func, "attr")
    ]
    assert name in IN_PLACE or not {"write_text", "write_bytes", "savefig"} & set(called)
