"""The event loop of a server's processes."""

from __future__ import annotations

import asyncio


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed, which is faster, else asyncio's."""
    try:
        import uvloop
    except ImportError:  # not on every system
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
