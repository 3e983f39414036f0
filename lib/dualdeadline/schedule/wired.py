"""A schedule whose copies are encoded: the same operations, and a decode between a copy and what waits for it."""

from __future__ import annotations

from dataclasses import replace

from dualdeadline.schedule.ops import Compute, Copy, Schedule


def with_decode(plan: Schedule) -> Schedule:
    """`plan` with one decode per copy, on the compute queue right before the first stage that needs its bytes.

    The bytes of the copies are the caller's business: build `plan` with those of the encoded components.
    """
    ops: list = []
    moved: dict[int, int] = {}  # places in `plan` -> places here
    decoded: dict[int, int] = {}  # places of copies in `plan` -> places of their decodes here
    for place, op in enumerate(plan.ops):
        copies = [need for need in op.needs if isinstance(op, Compute) and isinstance(plan.ops[need], Copy)]
        for need in sorted(set(copies) - set(decoded)):
            copy = plan.ops[need]
            ops.append(Compute(copy.layer, f"decode_{copy.piece}", (copy.expert,), (moved[need],)))
            decoded[need] = len(ops) - 1
        marked = {"encoded": True} if isinstance(op, Copy) else {}
        needs = {moved[need] for need in op.needs} | {decoded[need] for need in copies}
        ops.append(replace(op, needs=tuple(sorted(needs)), **marked))
        moved[place] = len(ops) - 1
    return Schedule(plan.name, tuple(ops), plan.present)
