"""What people install: an sdist that is the tree, and a wheel for every Python that trains."""

import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import setuptools
from setuptools.command import bdist_wheel, build_ext, editable_wheel  # noqa: F401  # before sys.platform changes

ROOT = Path(__file__).parents[2]
BUILD = """
import os, sys, tarfile
import setuptools.build_meta as backend

out = sys.argv[1]
sdist = backend.build_sdist(out)
with tarfile.open(f"{out}/{sdist}") as archive:
    archive.extractall(out, filter="data")
os.chdir(f"{out}/{sdist.removesuffix('.tar.gz')}")
backend.build_wheel(out)
"""
JUNK = (
    "paw/__pycache__/run.cpython-311.pyc", "kernels/paw_kernels/_cpu.so", "docs/.DS_Store",
    "runs/quickstart/metrics.jsonl", "build/lib/paw/run.py", "dist/old.whl", "shared/data/games.jsonl",
    "bench/__pycache__/x.pyc", "tests/.pytest_cache/x", "notes.txt",
)  # fmt: skip
"""What lies in a tree in use, and is nobody else's business."""
METADATA = re.compile(r"PKG-INFO|setup\.cfg|[\w.]+\.egg-info/.*")


class Package(NamedTuple):
    tree: set[str]
    """Files that git knows, and new ones that it does not ignore."""
    sdist: Path
    wheel: Path


def build(source: Path, out: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """An sdist, and a wheel built from it, as `python -m build` does, without a new environment."""
    out.mkdir()
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", BUILD, str(out)]
    return subprocess.run(command, cwd=source, env=env | variables, capture_output=True, text=True)


def copy_of_the_tree(folder: Path) -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("no git checkout, so nothing says which files belong to the tree")
    tree = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    for name in tree:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    return tree


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    folder = tmp_path_factory.mktemp("package")
    tree = copy_of_the_tree(folder / "source")
    for name in JUNK:
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "source" / name).write_text("junk")

    compiler = str(ROOT / "tests" / "support" / "quick_c++")
    finished = build(folder / "source", folder / "out", PAW_RELEASE="1", CXX=compiler)
    assert finished.returncode == 0, finished.stderr
    (sdist,) = (folder / "out").glob("*.tar.gz")
    (wheel,) = (folder / "out").glob("*.whl")
    return Package(tree, sdist, wheel)


@pytest.mark.slow
def test_the_sdist_is_the_tree_and_nothing_else(package):
    with tarfile.open(package.sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    files = {name for name in names if not METADATA.fullmatch(name)}
    assert files == package.tree
    assert {"CHANGELOG.md", "docs/index.md", "tests/conftest.py", "csrc/rows.cpp"} <= files


@pytest.mark.slow
def test_the_wheel_holds_the_packages_and_fits_every_python(package):
    assert re.fullmatch(r"paw_trainer-[\d.]+-py3-none-(linux|macosx)_\w+\.whl", package.wheel.name)
    with zipfile.ZipFile(package.wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        text = archive.read(metadata[0]).decode()
    packages = {name for name in package.tree if name.startswith("paw/")}
    packages |= {
        name.removeprefix("kernels/") for name in package.tree if name.startswith("kernels/")
    }
    assert files == packages | {"paw_kernels/_cpu.so"}
    assert "Author: PaW contributors" in text
    assert "License-File: paw/envs/alfworld/data/NOTICE" in text


@pytest.mark.long
@pytest.mark.slow
def test_a_wheel_in_a_new_environment_trains(
    package: Package, tmp_path: Path, paw_env: dict[str, str], quick: dict[str, Any]
):
    """Its dependencies are this environment's; what is installed editable here is not seen there."""
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps"]
    subprocess.run([*install, "--no-index", package.wheel], check=True)
    (site_packages,) = (tmp_path / "venv").glob("lib/*/site-packages")
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (site_packages / "dependencies.pth").write_text("\n".join(dependencies))

    env = {key: value for key, value in paw_env.items() if key != "PYTHONPATH"}
    settings = quick | {"run.updates": 3, "run.dir": tmp_path / "runs", "run.name": "first"}
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    finished = subprocess.run(
        [python.with_name("paw"), "train", "quickstart", *words],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    run = tmp_path / "runs" / "first"
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines][-1] == 3
    assert json.loads((run / "run.json").read_text(encoding="utf-8"))["backend"] == "cpu"
    assert (run / "report.html").is_file()


def settings_of_setup(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py hands to setuptools."""
    settings: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", settings.update)
    runpy.run_path(str(ROOT / "setup.py"))
    return settings


@pytest.mark.parametrize("release", ["", "1"])
def test_without_a_compiler_a_release_ends_in_a_line_and_another_build_goes_on(tmp_path, release):
    env = os.environ | {"PAW_RELEASE": release, "CC": "false", "CXX": "false"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "-b", tmp_path / "lib"]
    finished = subprocess.run(
        [*command, "-t", tmp_path / "temp"], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert not list(tmp_path.rglob("*.so"))
    assert finished.returncode == (1 if release else 0), finished.stderr
    if release:
        last = finished.stderr.splitlines()[-1]
        assert last.startswith("PAW_RELEASE: csrc/rows.cpp was not compiled: ")
        assert "Traceback" not in finished.stderr


def test_a_wheel_without_a_library_does_not_claim_a_platform(monkeypatch, tmp_path):
    make_command = settings_of_setup(monkeypatch)["cmdclass"]["bdist_wheel"]
    command = make_command(setuptools.Distribution({"name": "paw-trainer"}))
    command.ensure_finalized()
    command.root_is_pure = False
    command.bdist_dir = str(tmp_path)
    assert command.get_tag() == ("py3", "none", "any")

    (tmp_path / "paw_kernels").mkdir()
    (tmp_path / "paw_kernels" / "_cpu.so").touch()
    python, abi, platform = command.get_tag()
    assert (python, abi) == ("py3", "none")
    assert platform.startswith(("linux_", "macosx_"))


def test_windows_is_refused_in_a_line(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit, match="on Windows, install it inside WSL 2"):
        settings_of_setup(monkeypatch)
