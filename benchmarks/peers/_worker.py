"""The driver's side of a peer: its process, and how much CPU time it and everybody else uses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _protocol import LONGEST_LINE

STOP_S = 20.0
"""How long a peer may take to end by itself."""


class PeerError(Exception):
    """A peer failed, or did not answer in time."""


class Worker:
    """A peer's process. Whatever it starts is in its session, so that nothing outlives it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    @classmethod
    async def start(cls, name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> Worker:
        """Start it; what it prints on standard error goes to the file `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        pipe = asyncio.subprocess.PIPE
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=errors, env=env, limit=LONGEST_LINE, start_new_session=True
            )
        return cls(name, process, log)

    async def ask(self, command: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a command, wait for the answer.

        Raises:
            PeerError: the answer says so, or there is none.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            async with asyncio.timeout(limit_s):
                self.process.stdin.write(json.dumps(command).encode() + b"\n")
                await self.process.stdin.drain()
                line = await self.process.stdout.readline()
        except TimeoutError:
            raise PeerError(f"{command['cmd']} took more than {limit_s:g} s") from None
        except ConnectionError:
            line = b""
        if not line:
            raise PeerError(f"the process ended during {command['cmd']}; see {self.log}")
        reply: dict[str, Any] = json.loads(line)
        if not reply["ok"]:
            raise PeerError(reply["error"])
        return reply

    async def stop(self) -> None:
        """End it, kindly if it lets us, and everything that it started."""
        before = family(self.process.pid)
        with contextlib.suppress(PeerError, json.JSONDecodeError):
            await self.ask({"cmd": "stop"}, STOP_S)
            assert self.process.stdin is not None
            self.process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self.process.wait()
        now = _all_stats()
        for pid, stat in before.items():
            # The number of a process that has ended may already be somebody else's; the time it started tells.
            if pid in now and now[pid].started == stat.started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


# Processes and their CPU time: Linux only; elsewhere nothing is known ------------------------------

TICK_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01


class Stat(NamedTuple):
    parent: int
    session: int
    started: int
    cpu_s: float


def _stat(pid: int) -> Stat | None:
    """A process that is there."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold anything
    return Stat(int(fields[1]), int(fields[3]), int(fields[19]), (int(fields[11]) + int(fields[12])) * TICK_S)


def _all_stats() -> dict[int, Stat]:
    try:
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    except OSError:
        return {}
    return {pid: stat for pid in pids if (stat := _stat(pid)) is not None}


def family(pid: int, stats: Mapping[int, Stat] | None = None) -> dict[int, Stat]:
    """A process and what it started: the session that it leads, their children, and so on."""
    stats = _all_stats() if stats is None else stats
    children: dict[int, list[int]] = {}
    for child, stat in stats.items():
        children.setdefault(stat.parent, []).append(child)
    found: dict[int, Stat] = {}
    new = [one for one, stat in stats.items() if one == pid or stat.session == pid]
    while new:
        found |= {one: stats[one] for one in new}
        new = [child for one in new for child in children.get(one, []) if child not in found]
    return found


def cpu_seconds(pids: Mapping[str, int]) -> dict[str, float]:
    """CPU seconds so far of each named process and its family; nothing where that cannot be known."""
    stats = _all_stats()
    if not stats:
        return {}
    return {name: sum(stat.cpu_s for stat in family(pid, stats).values()) for name, pid in pids.items()}


def machine_seconds() -> float | None:
    """CPU seconds that the whole machine has spent working so far."""
    try:
        first = Path("/proc/stat").read_text().partition("\n")[0].split()
    except OSError:
        return None
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, first[1:9])
    return (user + nice + system + irq + softirq + steal) * TICK_S
