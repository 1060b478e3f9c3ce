"""Planning and running: the passes, the run state, and the asyncio shell."""
