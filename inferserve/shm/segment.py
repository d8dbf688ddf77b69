"""Anonymous shared memory (memfd): no name, nothing to guess, nothing left behind after `kill -9` of everything.

The launcher creates a segment and passes its descriptor to children, who attach. There is no fallback between the
two. Pages are taken on first touch, so a segment may be large and cost little; its size is sealed.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from inferserve.errors import LayoutMismatch, SegmentMissing

_F_ADD_SEALS = 1033
_F_SEAL_SHRINK = 0x2
_F_SEAL_GROW = 0x4


class Segment:
    """One mapping. `buf` is a writable memoryview of `size` bytes."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self.mmap = mmap.mmap(fd, size)

    @classmethod
    def create(cls, name: str, size: int) -> Segment:
        """Make a segment of `size` bytes, all zero. `name` shows only in /proc."""
        fd = os.memfd_create(f"inferserve-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
        return cls(fd, size)

    @classmethod
    def attach(cls, fds: dict[str, int], name: str, size: int) -> Segment:
        """Map a segment that the launcher passed. Raises SegmentMissing or LayoutMismatch."""
        if name not in fds:
            raise SegmentMissing(f"the launcher passed no segment {name!r}")
        actual = os.fstat(fds[name]).st_size
        if actual != size:
            raise LayoutMismatch(f"segment {name!r} has {actual} bytes, the layout says {size}")
        return cls(fds[name], size)
