"""How the SSD tier of `offload` works."""

from __future__ import annotations

from dataclasses import dataclass

from dualdeadline.store import reader
from dualdeadline.store.tier import POLICIES


@dataclass(frozen=True)
class SsdOptions:
    """How the SSD tier works.

    Attributes:
        host_slots: per layer, between the SSD and the device's slots (0: none). exclusive: they hold what the device's
            slots gave up. policy: who leaves them, one of `tier.POLICIES`.
        ahead: layers that guesses for the host slots look ahead, 1 to 3 (0: none). budget: records per layer.
            threshold: least probability of one.
        rule: guess only while ahead x layer time >= time of a read. predictor: as `offload`'s.
        depth: reads in flight. direct: O_DIRECT. read: as `reader.Reader`'s.

    Raises:
        ValueError: numbers out of range, or guesses without inclusive host slots.
    """

    host_slots: int = 0
    exclusive: bool = False
    policy: str = "lru"
    ahead: int = 0
    budget: int = 2
    threshold: float = 0.5
    rule: bool = True
    predictor: object = "gate_ahead"
    depth: int = reader.DEPTH
    direct: bool = True
    read: reader.ReadFunction | None = None

    def __post_init__(self):
        for name, least, most in (("host_slots", 0, 2**31), ("ahead", 0, 3), ("budget", 1, 2**31), ("depth", 1, 1024)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ValueError(f"{name} is {value!r}; needed: a whole number from {least} to {most}")
        if self.policy not in POLICIES:
            raise ValueError(f"policy is {self.policy!r}; needed: one of {', '.join(POLICIES)}")
        if self.ahead and (not self.host_slots or self.exclusive):
            raise ValueError(
                f"ahead is {self.ahead} with host_slots {self.host_slots}, exclusive {self.exclusive}; needed: "
                "inclusive host slots, where guesses are read to"
            )
        if self.exclusive and not self.host_slots:
            raise ValueError("exclusive without host slots; needed: host_slots above 0")
