"""Where the time of a decode step goes: every millisecond of it in one part, and the parts add up to the step.

    host(model, step, steps, case)             steps that the host drives, on a CPU or a GPU   watched.py
    graph(step, layers, steps, case)           steps that are CUDA graphs, from a trace        trace.py
    variants(group, first, steps)              every case of a decode study                    trace.py

All give DataFrame(case, part, ms, low, high, n): the mean over steps, 20 and 80 %. Parts, in the order of a layer:

    attention            from a decoder layer's start to its router: norms, attention, dense blocks beside it
    router               the router and what it chooses
    look-up              slots of the routed experts; where the host looks up, also what it does for that
    demand wait          for bytes that the router asked for
    late prefetch wait   for bytes that were guessed and have not arrived yet
    install              bytes that have crossed become weights in their slot: decode, or a second copy
    expert compute       products of experts and their sum
    prediction           guesses that nothing else runs beside
    launch gaps          nothing runs and nothing is waited for: the next piece of work was not there yet
    other                embedding, the rest of a layer behind its experts, head
    step                 the whole, by a clock of its own
"""

from dualdeadline.attribution.watched import host, watch
from dualdeadline.attribution.parts import PARTS, STEP, check, frame, records
from dualdeadline.attribution.trace import Kernel, graph, split, variants

__all__ = ["PARTS", "STEP", "Kernel", "check", "frame", "graph", "host", "records", "split", "variants", "watch"]
