"""Reports of a cache in parts of a bounded size."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentflow.engine.cache.blocks import BlockFeed, BlocksReport, BlocksStored
from agentflow.engine.cache.radix_cache import RadixCache


class Reader:
    """Applies reports that arrive in order."""

    def __init__(self) -> None:
        self.digests: set[bytes] = set()
        self.number = 0

    def read(self, report: BlocksReport | None) -> None:
        if report is None:
            return
        if report.is_snapshot:
            self.digests.clear()
        else:
            assert report.number == self.number + 1
        self.number = report.number
        assert len(report.changes) == 1 or sum(len(change.digests) for change in report.changes) <= 3
        for change in report.changes:
            if isinstance(change, BlocksStored):
                self.digests |= set(change.digests)
            else:
                self.digests -= set(change.digests)


@given(data=st.data())
def test_reports_in_parts_give_the_whole_cache(data: st.DataObject) -> None:
    feed, reader, slots = BlockFeed(3), Reader(), itertools.count()
    cache = RadixCache(model="m", on_blocks=feed.on_blocks)
    for _ in range(data.draw(st.integers(1, 20))):
        match data.draw(st.sampled_from(["compute", "evict", "flush", "snapshot"])):
            case "compute":
                parts = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
                run = np.repeat(np.array(parts, dtype=np.int32), 50).tobytes()
                new = np.array([next(slots) for _ in range(len(run) // 4)], dtype=np.int32)
                cache.extend(cache.match("", b""), "", run, new)
            case "evict":
                cache.evict(data.draw(st.integers(1, 150)))
            case "flush":
                reader.read(feed.flush())
            case "snapshot":
                reader.read(feed.snapshot(cache.stored_blocks()))
    while feed.changes:
        reader.read(feed.flush())
    assert reader.digests == {digest for stored in cache.stored_blocks() for digest in stored.digests}
