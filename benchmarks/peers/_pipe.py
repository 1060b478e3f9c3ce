"""What the peers that are aiopipe share: a pipeline that stays open between runs, on a loop of its own."""

from __future__ import annotations

import asyncio
from typing import Any

from _protocol import Peer

import aiopipe as ap

__all__ = ["PipePeer"]


class PipePeer(Peer):
    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.pipe: ap.Pipeline | None = None

    async def enter(self, *args: Any, **options: Any) -> ap.Pipeline:
        """Open the pipeline; takes what `ap.Pipeline` takes."""
        self.pipe = ap.Pipeline(*args, **options)
        return await self.pipe.__aenter__()

    def stop(self) -> None:
        if self.pipe is not None:
            self.runner.run(self.pipe.aclose())
        self.runner.close()
