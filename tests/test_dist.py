"""The wheel and the source distribution: what is in them, and that an installed wheel does what its README says."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from commands import MODEL
from distributions import build, contents, differences, of_sdist, of_wheel

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def metadata(distributions: tuple[Path, Path]) -> Message:
    with zipfile.ZipFile(distributions[1]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(wheel.read(name))


# What is in them ---------------------------------------------------------------------------------


def test_they_have_what_they_should_and_nothing_else(distributions: tuple[Path, Path]) -> None:
    assert not differences(*distributions)


def test_the_wheel_has_types_and_the_examples(distributions: tuple[Path, Path]) -> None:
    names = contents(distributions[1])
    assert {"aiopipe/py.typed", "aiopipe/cli/app.py", "aiopipe/examples/server.py"} <= names
    assert {"aiopipe/examples/serve/static/index.html", "aiopipe/examples/minilm/reference.npz"} <= names
    assert not any(name.startswith(("tests/", "examples/", "docs/", "benchmarks/")) for name in names)


def test_a_file_too_many_or_too_few_is_found(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    sdist, wheel = distributions
    changed = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            if name != "aiopipe/py.typed":
                new.writestr(name, old.read(name))
        new.writestr("aiopipe/notes.txt", "mine")
    found = differences(sdist, changed)
    assert found == [f"{wheel.name} lacks aiopipe/py.typed", f"{wheel.name} should not have aiopipe/notes.txt"]


def test_what_belongs_where() -> None:
    files = ["aiopipe/a.py", "examples/b.py", "tests/c.py", "docs/d.md", "stray.py", "README.md"]
    assert {"aiopipe/a.py", "aiopipe/examples/b.py", "aiopipe-1.dist-info/RECORD"} <= of_wheel(files, "1")
    assert not of_wheel(files, "1") & {"tests/c.py", "aiopipe/c.py", "stray.py"}
    assert {"aiopipe-1/tests/c.py", "aiopipe-1/README.md", "aiopipe-1/PKG-INFO"} <= of_sdist(files, "1")
    assert "aiopipe-1/stray.py" not in of_sdist(files, "1")


def test_metadata(metadata: Message) -> None:
    assert metadata["Name"] == "aiopipe" and metadata["Version"] == PROJECT["version"]
    assert metadata["License-Expression"] == "MIT" and metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(metadata.get_all("Classifier") or ()) == set(PROJECT["classifiers"])
    assert set(metadata.get_all("Provides-Extra") or ()) == set(PROJECT["optional-dependencies"])
    needed = [text for text in metadata.get_all("Requires-Dist") or () if "extra ==" not in text]
    assert {re.split(r"[<>=]", text)[0] for text in needed} == {"anyio", "jax", "numpy"}


# Installed ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment that has the wheel, and for all else the packages of this one.

    Tests reach no registry, so nothing is downloaded; `make clean-install` does it with an environment of its own.
    """
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    scripts = {"base": str(folder), "platbase": str(folder)}
    programs = Path(sysconfig.get_path("scripts", "venv", scripts))
    # A path file that names a folder does not carry out the path files in it: an editable aiopipe is not found there.
    here = Path(sysconfig.get_path("purelib", "venv", scripts), "packages_of_the_tests.pth")
    here.write_text("\n".join(dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(programs / "python")]
    subprocess.run([*pip, "install", "-q", "--no-index", "--no-deps", str(distributions[1])], check=True)
    return programs


def run(*command: str, folder: Path) -> str:
    """The output of a command that must end well, without this checkout on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def test_the_installed_package_is_the_wheel_and_its_readme_runs(
    installed: Path, metadata: Message, tmp_path: Path
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", str(metadata.get_payload()), re.MULTILINE | re.DOTALL)
    script = tmp_path / "readme.py"
    script.write_text("\n".join([*blocks, "print(ap.__file__)"]), encoding="utf-8")
    printed = run(str(installed / "python"), "-W", "error", str(script), folder=tmp_path)
    assert "2 splits" in printed
    assert Path(printed.splitlines()[-1]).is_relative_to(installed.parent)


def test_the_installed_command_and_its_examples(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(MODEL, encoding="utf-8")
    command = str(installed / "aiopipe")
    assert "2 splits" in run(command, "plan", "my_model:model", "--input", "4x64", folder=tmp_path)
    listed = run(command, "example", folder=tmp_path)
    assert "ggml_style" in listed and str(installed.parent) in listed
    assert "splits, slot" in run(command, "example", "ggml_style", folder=tmp_path)
    assert "usage: aiopipe serve" in run(command, "serve", "--help", folder=tmp_path)
