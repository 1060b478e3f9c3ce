"""A checker of what must have happened before what.

It does not look at the order in which things happened to happen, but at what made them happen in that order: who told
whom. Each thing of interest (the host writes a slot's staging buffers; a thread launches something; a device is done
with it; a thread reads or writes a value of an evaluation) is one bit, and for each thread there is a mask of all that
is known there to have happened. A mask travels where one thread leaves something for another (`schedules` sees to
that: locks, queues, starts and joins of threads, callbacks of the event loop), and a thread learns that a device is
done only by asking (`Backend.all_ready`) or by being told (`Backend.notify`). So a slot that is reused too early is
found in every run in which nobody had to wait for its readers, also where they were done by luck.

Of devices it takes for granted that values order their work, and that what one thread launches on one of them is done
in that order (as on a stream of a GPU, and as XLA's CPU client does); nothing else.

The rules:

- a slot's staging buffers are written only by who knows that every reader of what they held is done,
- whoever launches what reads them knows that they are written; and of a value, that it has been launched,
- a value of an evaluation (`Environment.slots`) is read only by threads that know of its write, and written, or let
  go of, only by those that know of all its reads and writes,
- a result is handed out only by who knows that it is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import pytest

import aiopipe.run
from aiopipe.backend import Backend
from aiopipe.loaded import Loaded
from aiopipe.sched.launch import Environment


@dataclass(eq=False)
class Memory:
    """The staging buffers of one slot."""

    name: str
    written: int = 0
    readers: int = 0
    kept: list[Any] = field(default_factory=list)  # so that nothing else gets their ids


@dataclass(eq=False)
class Made:
    """A value of a device: bits of its launch and its end, and all that happens before its end."""

    value: Any
    name: str
    launch: int
    done: int
    mask: int


class HappensBefore:
    """What is known where. Threads that nobody tells anything know only what they did themselves."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.told = 0  # all that some thread knows devices to be done with
        self.n_checked = 0
        self.names: list[str] = []
        self._known: dict[int, int] = {}
        self._fresh: dict[int, int] = {}
        self._newest: dict[int, dict[str, int]] = {}  # by thread and device
        self._made: dict[int, Made] = {}
        self._memories: dict[tuple[int, int], Memory] = {}
        self._memory_of: dict[int, Memory] = {}
        self._kept: list[Any] = []

    # -- threads --------------------------------------------------------------------------------

    def sent(self) -> int:
        """What this thread knows, for another to `receive`."""
        me = threading.get_ident()
        self._fresh.pop(me, None)
        return self._known.get(me, 0)

    def receive(self, mask: int) -> None:
        """This thread takes what another `sent`."""
        me = threading.get_ident()
        self._known[me] = self._known.get(me, 0) | mask

    def begin(self, mask: int) -> None:
        """This thread is new, whoever had its number before."""
        me = threading.get_ident()
        self._fresh.pop(me, None)
        self._newest.pop(me, None)
        self._known[me] = mask

    def event(self, name: str) -> int:
        """Something happens in this thread: its bit."""
        bit = self._bit(name)
        self.receive(bit)
        return bit

    def access(self, name: str) -> int:
        """Like `event`; one bit for all between two `sent`, which nobody can tell apart."""
        me = threading.get_ident()
        bit = self._fresh.get(me)
        if bit is None:
            bit = self._fresh[me] = self.event(f"{name} in {threading.current_thread().name}")
        return bit

    def require(self, mask: int, why: str) -> None:
        """Note a violation where this thread does not know of all that."""
        self.n_checked += 1
        missing = mask & ~self._known.get(threading.get_ident(), 0)
        if missing:
            self.violations.append(f"{why}: {self._describe(missing)}")

    def check(self) -> None:
        """Raise `AssertionError` where a rule was broken."""
        assert not self.violations, self.report()

    def report(self) -> str:
        return "\n".join(["not ordered by anything:", *self.violations[:5]])

    def _bit(self, name: str) -> int:
        self.names.append(name)
        return 1 << (len(self.names) - 1)

    def _describe(self, mask: int) -> str:
        names = [name for i, name in enumerate(self.names) if mask >> i & 1]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    # -- devices --------------------------------------------------------------------------------

    def launch(self, name: str, operands: Sequence[Any], results: Sequence[Any], device: str | None = None) -> None:
        """This thread has launched something, on a device that does in order what it launches there."""
        me = threading.get_ident()
        newest = self._newest.setdefault(me, {})
        mask = self._known.get(me, 0) | (newest.get(device, 0) if device is not None else 0)
        done = self._bit(f"the end of {name}")
        for operand in operands:
            memory, made = self._memory_of.get(id(operand)), self._made.get(id(operand))
            if memory is not None:
                self.require(memory.written, f"{name} reads {memory.name} before it is written")
                memory.readers |= done
            if made is not None:
                self.require(made.launch, f"{name} was launched before its operand")
                mask |= made.mask
        launch = self.event(f"the launch of {name}")
        mask |= done | launch
        if device is not None:
            newest[device] = mask
        for value in results:
            self._made[id(value)] = Made(value, name, launch, done, mask)

    def ready(self, values: Sequence[Any]) -> None:
        """This thread has been told that values are ready."""
        for value in values:
            made = self._made.get(id(value))
            if made is not None:
                self.told |= made.mask
                self.receive(made.mask)

    def is_told(self, value: Any) -> bool:
        """Whether somebody has been told that a value is ready, or that something made of it is."""
        made = self._made.get(id(value))
        return made is None or bool(made.done & self.told)

    def watch(self, *backends: Backend) -> None:
        """Have backends say what they launch, and whom they tell that it is done."""
        for backend in backends:
            self._watch(backend)

    def _watch(self, backend: Any) -> None:
        load, transfer, all_ready, notify = backend.load, backend.transfer, backend.all_ready, backend.notify

        def loading(program: Any) -> Any:
            executable = load(program)

            def call(*operands: Any) -> Any:
                results = executable.call(*operands)
                self.launch(f"{program.name} on {backend.name}", operands, results, backend.name)
                return results

            return replace(executable, call=call)

        def transferring(values: Sequence[Any]) -> Any:
            moved = transfer(values)
            for value, there in zip(values, moved, strict=True):
                if there is not value:
                    self.launch(f"a copy to {backend.name}", (value,), (there,))
            return moved

        def asking(values: Sequence[Any]) -> bool:
            answer: bool = all_ready(values)
            if answer:
                self.ready(values)
            return answer

        def notifying(values: Sequence[Any], callback: Callable[[BaseException | None], None]) -> None:
            def tell(error: BaseException | None) -> None:
                self.ready(values)
                callback(error)

            notify(values, tell)

        backend.load, backend.transfer, backend.all_ready, backend.notify = loading, transferring, asking, notifying

    # -- evaluations ----------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[HappensBefore]:
        """Have evaluations say which memory and which values they read and write."""
        result = Loaded.result

        def handing_out(loaded: Loaded, slots: Any) -> Any:
            for kind, i in loaded.plan.results:
                made = self._made.get(id(slots[i])) if kind == "env" else None
                if made is not None:
                    self.require(made.done, f"a result of {loaded.plan.graph.name!r} was handed out")
            return result(loaded, slots)

        def environment(n_slots: int, n_splits: int) -> Environment:
            env = Environment(n_slots, n_splits)
            env.slots = Slots(self, env.slots)
            return env

        with captures_watched(self._capturing, self._captured), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Loaded, "result", handing_out)
            patch.setattr(aiopipe.run, "Environment", environment)
            yield self

    def _capturing(self, loaded: Loaded, copy_id: int) -> None:
        of = loaded._staging._slots
        memory = self._memories.get((id(of), copy_id))
        if memory is None:
            memory = self._memories[id(of), copy_id] = Memory(f"slot {copy_id}")
            self._kept.append(of)
        self.require(memory.readers | memory.written, f"{memory.name} was rewritten")
        memory.readers = 0

    def _captured(self, loaded: Loaded, copy_id: int) -> None:
        memory = self._memories[id(loaded._staging._slots), copy_id]
        memory.written = self.event(f"the capture in {memory.name}")
        for buffer in chain.from_iterable(loaded._staging.buffers.get(copy_id, ())):
            if buffer is not None and id(buffer) not in self._memory_of:
                self._memory_of[id(buffer)] = memory
                memory.kept.append(buffer)


class Slots(list[Any]):
    """`Environment.slots` that says who reads and writes which."""

    def __init__(self, seen_by: HappensBefore, values: Sequence[Any]) -> None:
        super().__init__(values)
        self._seen_by = seen_by
        self._writes = [0] * len(values)
        self._reads = [0] * len(values)

    def __getitem__(self, i: Any) -> Any:
        seen_by = self._seen_by
        seen_by.require(self._writes[i], f"value {i} was read")
        self._reads[i] |= seen_by.access("reading")
        return super().__getitem__(i)

    def __setitem__(self, i: Any, value: Any) -> None:
        seen_by = self._seen_by
        seen_by.require(self._writes[i] | self._reads[i], f"value {i} was {'let go' if value is None else 'written'}")
        self._writes[i], self._reads[i] = seen_by.access("writing"), 0
        super().__setitem__(i, value)


@contextmanager
def captures_watched(
    before: Callable[[Loaded, int], None], after: Callable[[Loaded, int], None] = lambda loaded, copy_id: None
) -> Iterator[None]:
    """Be told when the host is about to write a slot's staging buffers, and when it has."""
    capture = Loaded.capture

    def watched(loaded: Loaded, copy_id: int, values: Sequence[Any], slots: list[Any]) -> None:
        before(loaded, copy_id)
        try:
            capture(loaded, copy_id, values, slots)
        finally:
            after(loaded, copy_id)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loaded, "capture", watched)
        yield
