"""What the kernel tells of mappings, summed up by kind."""

from __future__ import annotations

import os

from loadtest.pipeline.memory import Sizes, read_smaps, sizes_of

SMAPS = """\
55a0-55b0 r--p 00000000 08:01 131 /usr/lib/libtorch.so
Rss:                 100 kB
Pss:                  60 kB
Anonymous:            20 kB
VmFlags: rd mr
55b0-55c0 rw-p 00000000 00:00 0 [heap]
Rss:                  10 kB
Pss:                  10 kB
Anonymous:            10 kB
VmFlags: rd wr
7f0008000000-7f000a000000 rw-p 00000000 00:00 0
Rss:                   7 kB
Pss:                   7 kB
Anonymous:             7 kB
VmFlags: rd wr
7f0009100000-7f000a000000 rw-p 00000000 00:00 0
Rss:                   5 kB
Pss:                   5 kB
Anonymous:             5 kB
VmFlags: rd wr
7f0019100000-7f001a000000 rw-p 00000000 00:00 0
Rss:                   3 kB
Pss:                   3 kB
Anonymous:             3 kB
VmFlags: rd wr hg
"""


def test_mappings_are_summed_up_by_kind() -> None:
    kinds = Sizes(40 * 1024, 20 * 1024, 17 * 1024, 5 * 1024, 3 * 1024, 125 * 1024)
    assert read_smaps(SMAPS) == kinds
    assert kinds.total == 85 * 1024


def test_this_process_has_its_parts() -> None:
    sizes = sizes_of(os.getpid())
    assert 0 < sizes.heap < sizes.total <= sizes.resident
