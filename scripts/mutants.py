"""What `mutmut run` found: a table of the mutated files, and every mutant that no test noticed.

    python scripts/mutants.py            the summary; fails if more survived than docs/testing.md explains
    python scripts/mutants.py --again    forget the survivors and which tests reach which function, so that the next
                                         `mutmut run` tries those again, with the tests that there are by then

`make mutants` does all of it. mutmut keeps its results in `mutants/` and, from one run to the next, those of every
function that has not changed; that the tests have changed it cannot know.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "mutants"
SURVIVED = ("survived", "no tests", "suspicious", "segfault")
KILLED = ("killed", "timeout")
ROW = re.compile(r"^\| `(aiopipe/[\w/]+\.py)` \|[^|]*\|[^|]*\| *(\d+) *\|$", re.MULTILINE)


def results() -> dict[str, dict[str, Any]]:
    """What mutmut has written about each mutated file."""
    metas = sorted(RESULTS.rglob("*.py.meta"))
    return {str(path.relative_to(RESULTS).with_suffix("")): json.loads(path.read_text("utf-8")) for path in metas}


def statuses(result: dict[str, Any]) -> dict[str, str]:
    return {name: status_by_exit_code[code] for name, code in result["exit_code_by_key"].items()}


def explained() -> dict[str, int]:
    """How many survivors of each file docs/testing.md explains."""
    return {path: int(n) for path, n in ROW.findall((ROOT / "docs" / "testing.md").read_text("utf-8"))}


def forget_survivors() -> None:
    for path, result in results().items():
        codes = result["exit_code_by_key"]
        codes.update({name: None for name, status in statuses(result).items() if status in SURVIVED})
        (RESULTS / f"{path}.meta").write_text(json.dumps(result, indent=4), "utf-8")


def forget_tests() -> None:
    """mutmut looks only at tests with new names: it would find none for a new function that old tests call."""
    path = RESULTS / "mutmut-stats.json"
    if path.exists():
        stats = json.loads(path.read_text("utf-8"))
        stats.update(duration_by_test={}, tests_by_mangled_function_name={})
        path.write_text(json.dumps(stats, indent=4), "utf-8")


def print_survivors(path: str, found: dict[str, str]) -> None:
    for name, status in found.items():
        if status in SURVIVED:
            print(f"{name}: {status}")
            for line in get_diff_for_mutant(name, path=path).splitlines()[2:]:
                if line.startswith(("-", "+", "@@")):
                    print(f"    {line}")


def summary() -> int:
    """Print the survivors and the table; return how many mutants there is no explanation for."""
    known, rows, open_ = explained(), [], 0
    for path, result in results().items():
        found = statuses(result)
        counts = Counter(found.values())
        killed, survived = (sum(counts[s] for s in kinds) for kinds in (KILLED, SURVIVED))
        print_survivors(path, found)
        missing = len(found) - killed - survived
        open_ += missing + max(0, survived - known.get(path, 0))
        rows.append((path, len(found), killed, survived, known.get(path, 0), missing))
    heads = ("file", "mutants", "killed", "survived", "explained", "not tried")
    total = ("all", *(sum(row[i] for row in rows) for i in range(1, len(heads))))
    print()
    for first, *rest in (heads, *rows, total):
        print(f"{first:34}" + "".join(f"{cell:>11}" for cell in rest))
    return open_


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="forget the survivors, to have them tried again")
    if parser.parse_args().again:
        forget_survivors()
        forget_tests()
        return 0
    if not results():
        print("there is nothing in mutants/ yet; run `make mutants`")
        return 1
    open_ = summary()
    if open_:
        print(f"\n{open_} mutants are neither killed nor explained in docs/testing.md, section Mutants")
    return int(open_ > 0)


if __name__ == "__main__":
    sys.exit(main())
