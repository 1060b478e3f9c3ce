"""A carrier whose actor is a thread of this process: the far end of a remote backend, without any other process."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

from aiopipe.devices.remote import RemoteBackend, RemoteDevice
from aiopipe.devices.remote_actor import Command, RemoteActor, Worker

Then = Callable[[Any, BaseException | None, bool], None]


class Nearby:
    """Carries messages to a `RemoteActor` on an event loop of its own; what travels is pickled, as on the way to Ray.

    Args:
        spec: what the actor opens.

    Attributes:
        actor: the far end.
        refuse: raised by `send`, once each, before a message leaves.
        held: messages that have left and not arrived, while `holding`.
    """

    def __init__(self, spec: str = "cpu:0") -> None:
        self.actor = RemoteActor(spec)
        self.refuse: list[Exception] = []
        self.holding = False
        self.held: list[tuple[int, bytes, Then]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="nearby", daemon=True)
        self._thread.start()
        self._lost: Callable[[str], None] = print
        try:
            self.worker: Worker = self._wait(self.actor.open())
        except BaseException:
            self._stop()
            raise

    def send(self, number: int, commands: Sequence[Command], then: Then) -> None:
        if self.refuse:
            raise self.refuse.pop(0)
        message = number, pickle.dumps(commands), then
        if self.holding:
            self.held.append(message)
        else:
            self._deliver(*message)

    def watch(self, lost: Callable[[str], None]) -> None:
        self._lost = lost

    def end(self, timeout_s: float) -> None:
        if self._thread.is_alive():
            self._wait(self.actor._backend.aclose())
            self._stop()

    def release(self, order: Callable[[list[Any]], list[Any]] = list) -> None:
        """Have what is held arrive, in this order."""
        self.holding = False
        messages, self.held = order(self.held), []
        for message in messages:
            self._deliver(*message)

    def lose(self, reason: str) -> None:
        """The process at the far end ends."""
        self.end(0.0)
        self._lost(reason)

    def _deliver(self, number: int, data: bytes, then: Then) -> None:
        asyncio.run_coroutine_threadsafe(self._execute(number, data, then), self._loop)

    async def _execute(self, number: int, data: bytes, then: Then) -> None:
        outcomes = await self.actor.execute(number, pickle.loads(data))
        then(pickle.loads(pickle.dumps(outcomes)), None, False)

    def _wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _stop(self) -> None:
        self.actor._lane.close()
        self.actor._waiting.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class Opened:
    """A remote backend whose far end is near; `carrier` is there when it has been used."""

    def __init__(self, name: str = "near:cpu:0", spec: str = "cpu:0") -> None:
        self.carriers: list[Nearby] = []
        self.backend = RemoteBackend(RemoteDevice(name, spec), lambda: self._start(spec))

    @property
    def carrier(self) -> Nearby:
        return self.carriers[-1]

    def _start(self, spec: str) -> Nearby:
        self.carriers.append(Nearby(spec))
        return self.carrier
