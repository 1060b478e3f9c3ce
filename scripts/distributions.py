"""Build the wheel and the source distribution, and look at what is in them.

    python scripts/distributions.py [--outdir dist]

Builds with what is installed here (`build`, `hatchling`), without a network. Both must have everything that is under
version control and belongs there, and nothing else.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

IN_SDIST = ("aiopipe", "benchmarks", "docs", "examples", "scripts", "tests")
"""Folders of the source distribution."""

BESIDES = (
    ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "pyproject.toml",
    "zensical.toml",
)  # fmt: skip
"""Its other files."""

METADATA = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")

LEFT_BEHIND = ("__pycache__", ".hypothesis", ".cache")


def sources() -> list[str]:
    """Every file that a distribution may have: those under version control, or all of an unpacked one."""
    git = shutil.which("git")
    if git is not None and (ROOT / ".git").exists():
        command = [git, "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
        return sorted(name for name in listed if name and (ROOT / name).is_file())
    found = [path for path in ROOT.rglob("*") if path.is_file() and not set(path.parts) & set(LEFT_BEHIND)]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def of_wheel(files: Iterable[str], version: str) -> set[str]:
    """What a wheel must have."""
    found = {name for name in files if name.startswith("aiopipe/")}
    found |= {f"aiopipe/{name}" for name in files if name.startswith("examples/")}
    return found | {f"aiopipe-{version}.dist-info/{name}" for name in METADATA}


def of_sdist(files: Iterable[str], version: str) -> set[str]:
    """What a source distribution must have."""
    found = {name for name in files if name.partition("/")[0] in IN_SDIST and "/" in name}
    return {f"aiopipe-{version}/{name}" for name in (*found, *BESIDES, "PKG-INFO")}


def build(outdir: Path) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from it."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(outdir), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stdout + done.stderr)
    (sdist,), (wheel,) = outdir.glob("*.tar.gz"), outdir.glob("*.whl")
    return sdist, wheel


def contents(path: Path) -> set[str]:
    """The names of the files in a distribution."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            return {info.filename for info in archive.infolist() if not info.is_dir()}
    with tarfile.open(path) as archive:
        return {member.name for member in archive.getmembers() if not member.isdir()}


def differences(sdist: Path, wheel: Path) -> list[str]:
    """What is missing, and what should not be there."""
    version = wheel.name.split("-")[1]
    files = sources()
    found = []
    for path, wanted in ((sdist, of_sdist(files, version)), (wheel, of_wheel(files, version))):
        there = contents(path)
        found += [f"{path.name} lacks {name}" for name in sorted(wanted - there)]
        found += [f"{path.name} should not have {name}" for name in sorted(there - wanted)]
    return found


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outdir", type=Path, default=ROOT / "dist")
    outdir = parser.parse_args().outdir
    for old in [*outdir.glob("aiopipe-*.whl"), *outdir.glob("aiopipe-*.tar.gz")]:
        old.unlink()
    sdist, wheel = build(outdir)
    wrong = differences(sdist, wheel)
    for line in wrong:
        print(line, file=sys.stderr)
    for path in (sdist, wheel):
        print(f"{path.name}: {len(contents(path))} files, {path.stat().st_size / 1e3:.0f} KB")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
