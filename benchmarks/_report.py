"""A table of every benchmark's checks, from the logs that `make bench` keeps.

    python benchmarks/_report.py .bench
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    rows: list[tuple[str, str, str, str]] = []
    missed = 0
    for log in sorted(Path(sys.argv[1]).glob("*.log")):
        lines = log.read_text().splitlines()
        try:
            result = json.loads(lines[-1])
        except (IndexError, json.JSONDecodeError):
            rows.append((log.stem, "failed", "", ""))
            missed += 1
            continue
        for check in result.get("checks", ()):
            missed += not check["holds"]
            short = f"short by {abs(check['value'] - check['bar']):.3g}"
            verdict = "PASS" if check["holds"] else short
            rows.append((check["what"], f"{check['value']:.4g}", f"{check['relation']} {check['bar']:.4g}", verdict))
    width = max((len(row[0]) for row in rows), default=0)
    for what, value, bar, verdict in rows:
        print(f"{what:{width}}  {value:>9}  {bar:>9}  {verdict}")
    print(f"{len(rows) - missed} of {len(rows)} bars reached")


if __name__ == "__main__":
    main()
