"""Expert stores, tier by tier.

pinned.py   every expert in host memory        ssd.py      experts on an SSD below slots of host memory
layout.py   one record per expert, in a file   sources.py  where conversion takes experts from
file.py     that file, opened                  reader.py   reads of it, several at a time
fetching.py misses on their way to slots       tier.py     host slots
installs.py from host memory to a slot         options.py  of the SSD tier
pages.py    aligned memory, the page cache     probe.py    ways to an SSD here
"""

from dualdeadline.store.pinned import BITS, WIRES, HostStore

__all__ = ["BITS", "WIRES", "HostStore"]
