"""The near end of a backend on another machine: commands go out, outcomes come back, and a loss is told to all.

Knows nothing of what carries the messages: `Carrier` is what it asks for.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np

from .._threads import close_at_exit
from ..errors import AiopipeError, BackendClosedError, BackendLostError
from ..handle import Handle
from .remote_actor import UNORDERED, Command, Outcome, Ref, Worker, error_in

__all__ = ["Carrier", "Link", "RemoteArray", "RemoteProgram", "Reply"]

FREE_S = 0.02
"""How long numbers of values that nobody has any more are collected, when no other message takes them along."""


class Carrier(Protocol):
    """What carries messages to a `RemoteActor`."""

    worker: Worker

    def send(
        self, number: int, commands: Sequence[Command], then: Callable[[Any, BaseException | None, bool], None]
    ) -> None:
        """Have `RemoteActor.execute` called; ``then(outcomes, error, lost)`` is called once, on any thread.

        `lost` says that the actor is gone, and not only this message. May block for as long as it takes to copy the
        arguments.
        """
        ...

    def watch(self, lost: Callable[[str], None]) -> None:
        """Call ``lost(reason)``, on any thread, when the actor has ended, for whatever reason."""
        ...

    def end(self, timeout_s: float) -> None:
        """End the actor's process, and wait until it is gone. Blocks."""
        ...


class Reply:
    """The outcome of a command, which may not be known yet. Usable from any thread."""

    __slots__ = ("_there", "error", "value")

    def __init__(self) -> None:
        self._there = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None

    def done(self) -> bool:
        """Whether it is known."""
        return self._there.is_set()

    def settle(self, value: Any, error: BaseException | None) -> None:
        """It is known."""
        if not self._there.is_set():
            self.value, self.error = value, error
            self._there.set()

    def wait(self) -> Any:
        """What the command answered. Blocks.

        Raises:
            Exception: what it failed with.
        """
        self._there.wait()
        if self.error is not None:
            raise _again(self.error)
        return self.value


def _again(error: BaseException) -> BaseException:
    """An error to raise, when others may raise it as well: a traceback would grow with each, and hold their frames."""
    return type(error)(*error.args) if isinstance(error, BackendLostError | BackendClosedError) else error


class _Kept:
    """Something that the actor keeps for as long as this object lives."""

    __slots__ = ("__weakref__", "id", "link")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.id = link.new_id()

    def __del__(self) -> None:
        self.link.let_go(self.id)


class RemoteProgram(_Kept):
    """A program that is compiled over there."""

    __slots__ = ()


class RemoteArray(Handle):
    """A value of a backend on another machine: its number there.

    Attributes:
        reply: the outcome of the command that makes it.
    """

    __slots__ = ("__weakref__", "_kept", "dtype", "reply", "shape")

    def __init__(self, link: Link, shape: tuple[int, ...], dtype: Any, reply: Reply) -> None:
        self._kept = _Kept(link)
        self.shape = shape
        self.dtype = dtype
        self.reply = reply

    @property
    def id(self) -> int:
        """Its number over there."""
        return self._kept.id

    @property
    def link(self) -> Link:
        """The way to where it is."""
        return self._kept.link

    def read(self) -> Callable[[], np.ndarray[Any, Any]]:
        answer = self.link.send("download", Ref(self.id))

        def arrived() -> np.ndarray[Any, Any]:
            # Messages are answered in any order: who sees reading fail shall find that making the value has.
            self.reply.wait()
            value: np.ndarray[Any, Any] = answer.wait()
            return value

        return arrived

    def __repr__(self) -> str:
        state = "pending" if not self.reply.done() else "ready" if self.reply.error is None else "failed"
        return f"<RemoteArray {self.dtype}{list(self.shape)} on {self.link.name} {state}>"


class Link:
    """Sends commands to one actor, starting it with the first.

    Args:
        name: of the backend, for messages.
        start: starts the actor; blocks. Raises when it cannot.

    Attributes:
        name: of the backend.
        worker: the process at the far end; None before it was started.
    """

    def __init__(self, name: str, start: Callable[[], Carrier]) -> None:
        self.name = name
        self.worker: Worker | None = None
        self._start = start
        self._starting = threading.Lock()
        self._carrier: Carrier | None = None
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._n_messages = 0
        self._n_unordered = 0
        self._outbox: list[tuple[Command, Reply]] = []
        self._in_flight: dict[int, list[Reply]] = {}
        self._idle = threading.Condition(self._lock)
        self._lost: AiopipeError | None = None
        # A queue whose `put` may be called by a destructor, which runs at any moment, in any thread.
        self._dead: SimpleQueue[int | None] = SimpleQueue()

    def new_id(self) -> int:
        """A number for something to be kept over there."""
        return next(self._ids)

    def let_go(self, number: int) -> None:
        """Something that was kept is not needed any more. Never blocks."""
        self._dead.put(number)

    def check(self) -> None:
        """Raise `BackendLostError` when the actor is gone, `BackendClosedError` after `close`."""
        if self._lost is not None:
            raise _again(self._lost)

    def connect(self) -> Worker:
        """Start the actor, unless it has been. Blocks.

        Raises:
            PlacementError: it cannot be started: says why.
            BackendLostError: it is gone.
        """
        self.check()
        if self._carrier is not None and self.worker is not None:
            return self.worker
        with self._starting:
            self.check()
            if self._carrier is None:
                carrier = self._start()
                if self._lost is not None:  # closed meanwhile: `close` waits for us, and has nothing else to end
                    carrier.end(0.0)
                    self.check()
                self.worker, self._carrier = carrier.worker, carrier
                carrier.watch(self._lose)
                thread = threading.Thread(
                    target=_free, args=(self._dead, weakref.ref(self)), name=f"aiopipe-{self.name}-free", daemon=True
                )
                self._freeing = thread
                thread.start()
                close_at_exit(self)
            assert self.worker is not None
            return self.worker

    def send(
        self, op: str, *args: Any, out: Sequence[int] = (), reply: Reply | None = None, at_once: bool = True
    ) -> Reply:
        """Give a command. Blocks for as long as it takes to start the actor and to copy the arguments.

        Args:
            op: which operation.
            args: its arguments.
            out: numbers for its results.
            reply: takes the outcome; default: a new one.
            at_once: False: it may wait for the next one, or for `flush`.

        Returns:
            `reply`; failed already where the actor is gone.

        Raises:
            PlacementError: the actor cannot be started.
        """
        reply = reply or Reply()
        try:
            self.connect()
        except (BackendLostError, BackendClosedError) as error:
            reply.settle(None, error)
            return reply
        with self._lock:
            if self._lost is not None:
                reply.settle(None, self._lost)
                return reply
            command = Command(op, args, tuple(out))
            if op in UNORDERED:  # alone: a message is answered when all of it is done
                self._n_unordered += 1
                number = -self._n_unordered
                self._in_flight[number] = [reply]
            else:
                self._outbox.append((command, reply))
        if op in UNORDERED:
            self._send(number, [command])
        elif at_once:
            self.flush()
        return reply

    def flush(self) -> None:
        """Send what waits for another command. Blocks for as long as it takes to copy arguments."""
        with self._lock:
            if not self._outbox:
                return
            # First: what is let go of by now was used, if at all, by something in the outbox.
            dead = self._take_dead()
            sent, self._outbox = self._outbox, []
            if dead:
                sent.append((Command("free", tuple(dead)), Reply()))
            number = self._n_messages
            self._n_messages += 1
            self._in_flight[number] = [reply for _, reply in sent]
        self._send(number, [command for command, _ in sent])

    def _send(self, number: int, commands: Sequence[Command]) -> None:
        carrier = self._carrier
        if carrier is None:  # closed meanwhile, which has told everybody
            return
        try:
            carrier.send(number, commands, lambda *answer: self._answered(number, *answer))
        except Exception as error:  # such as a full object store: the message did not leave
            self._answered(number, None, error, False)
            if number < 0:
                return
            try:
                carrier.send(number, (), lambda *_: None)  # messages are carried out by number
            except Exception as why:
                self._lose(str(why))

    def _answered(
        self, number: int, outcomes: Sequence[Outcome] | None, error: BaseException | None, lost: bool
    ) -> None:
        if lost:
            self._lose(str(error))
        with self._lock:
            replies = self._in_flight.pop(number, [])
            if not self._in_flight:
                self._idle.notify_all()
        for i, reply in enumerate(replies):
            if outcomes is None:
                reply.settle(None, error)
            else:
                reply.settle(outcomes[i].value, error_in(outcomes[i]))

    def _lose(self, reason: str) -> None:
        """The actor is gone: everybody who waits for it shall know at once."""
        first_line = next(iter(reason.strip().splitlines()), "no reason given").rstrip(".")
        where = f"process {self.worker.pid} on {self.worker.node!r}" if self.worker is not None else "its process"
        self._end(
            BackendLostError(
                f"backend {self.name!r} was lost: {where} is gone ({first_line}), and with it the weights, states and "
                f"values there; close it, open another one with open_backend({self.name!r}) and place the weights again"
            )
        )

    def _end(self, error: AiopipeError) -> None:
        with self._lock:
            if self._lost is None:
                self._lost = error
            error = self._lost
            replies = [reply for sent in self._in_flight.values() for reply in sent]
            replies += [reply for _, reply in self._outbox]
            self._in_flight.clear()
            self._outbox.clear()
            self._idle.notify_all()
        for reply in replies:
            reply.settle(None, error)
        self._dead.put(None)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until every command has its outcome. Blocks."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._in_flight, timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """End the actor; whoever still waits for it gets `BackendClosedError`. Blocks. Idempotent."""
        self._end(BackendClosedError(f"backend {self.name!r} was closed: open it again, open_backend({self.name!r})"))
        with self._starting:
            carrier, self._carrier = self._carrier, None
        if carrier is not None:
            carrier.end(30.0 if timeout_s is None else timeout_s)
            self._freeing.join(timeout_s)
        return True

    def _take_dead(self) -> list[int]:
        found = []
        try:
            while (number := self._dead.get_nowait()) is not None:
                found.append(number)
            self._dead.put(None)  # meant for the thread
        except Empty:
            pass
        return found


def _free(dead: SimpleQueue[int | None], link_of: weakref.ref[Link]) -> None:
    """Send numbers of values that nobody has any more, many at a time; a thread of its own."""
    while (number := dead.get()) is not None:
        time.sleep(FREE_S)
        link = link_of()
        if link is None:
            return
        link.send("free", number)  # takes the others along
        del link
