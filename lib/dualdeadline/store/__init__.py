"""Expert stores, tier by tier.

pinned.py   every expert in host memory     ssd.py      experts on an SSD below slots of host memory
layout.py   one record per expert, in a file            sources.py   where conversion takes experts from
reader.py   reads past the page cache       tier.py     host slots     pages.py   aligned memory, the page cache
fetching.py misses on their way to slots    options.py  of the SSD tier                 probe.py   ways to an SSD here
"""

from dualdeadline.store.pinned import BITS, WIRES, HostStore

__all__ = ["BITS", "WIRES", "HostStore"]
