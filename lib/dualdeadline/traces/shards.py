"""One trace store from several processes: each decodes every n-th batch into a part, the last one done joins them.

Batches are the same whoever decodes them, so the joined store has the same bits as one process alone would write.
Processes need not see each other: rank and number come from the environment, as torchrun sets it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from dualdeadline import manifest, paths
from dualdeadline.corpus import Prompt
from dualdeadline.traces import collection, store
from dualdeadline.traces.sampling import Sampling

PART = ".part-"  # <store>.part-<rank>-of-<processes>


def place(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Rank and number of processes from RANK and WORLD_SIZE; (0, 1) where neither is set.

    Raises:
        ValueError: one without the other, or no rank below the number.
    """
    said = [environment.get(name) for name in ("RANK", "WORLD_SIZE")]
    if said == [None, None]:
        return 0, 1
    if not all(value and value.isdecimal() for value in said) or not int(said[0]) < int(said[1]):
        raise ValueError(
            f"RANK is {said[0]!r} and WORLD_SIZE {said[1]!r}; needed: whole numbers, 0 <= rank < size "
            "(torchrun sets both)"
        )
    return int(said[0]), int(said[1])


def collect_part(
    model,
    tokenizer,
    prompts: Sequence[Prompt],
    out: Path,
    new_tokens: int = 96,
    batch_size: int = 16,
    sampling: Sampling | None = None,
    min_new_tokens: int = 0,
    rank: int | None = None,
    processes: int | None = None,
) -> store.TraceStore | None:
    """This process's share of `collect`, into a part beside `out`; the process that finds all parts joins them.

    It always goes on where an earlier run was, also where that had another number of processes: prompts that `out`
    or this part holds are kept. To collect anew, delete `out` and its parts.

    Args:
        model, tokenizer, prompts, out, new_tokens, batch_size, sampling, min_new_tokens: of `collect`, the same in
            every process; the model may be on another device in each.
        rank, processes: default as the environment says (`place`).

    Returns:
        The whole store, if its last prompt came from this process (or nothing was left to do); else None.

    Raises:
        ValueError, OSError: as `collect`; a rank that is not below `processes`.
    """
    here = place()
    rank, processes = here[0] if rank is None else rank, here[1] if processes is None else processes
    if not 0 <= rank < processes:
        raise ValueError(f"rank is {rank} and processes {processes}; needed: 0 <= rank < processes")
    whole = collection.plan(model, tokenizer, prompts, Path(out), new_tokens, batch_size, sampling, min_new_tokens)
    whole.rows = collection.existing(whole)
    done = {prompt.id for prompt in prompts if collection.sound(whole, prompt)}
    own = [[prompt for prompt in batch if prompt.id not in done] for batch in whole.batches[rank::processes]]
    part = _part(whole, whole.path.with_name(f"{whole.path.name}{PART}{rank}-of-{processes}"), sum(own, []))
    collection.enter(part, model)
    collection.fill(part, model, [[prompt for prompt in batch if not collection.sound(part, prompt)] for batch in own])
    return join(whole, model)


def parts(out: Path) -> list[Path]:
    """Folders of the parts beside a store, of any number of processes."""
    out = Path(out)
    return sorted(path for path in out.parent.glob(f"{out.name}{PART}*-of-*") if path.is_dir())


def _part(whole: collection.Collection, path: Path, prompts: Sequence[Prompt]) -> collection.Collection:
    part = collection.Collection(**vars(whole) | {"path": path, "prompts": prompts, "rows": {}})
    part.rows = collection.existing(part)
    return part


def join(whole: collection.Collection, model) -> store.TraceStore | None:
    """Put every part into the store once they hold all its prompts; None while some are missing.

    Files are checked against their hashes, prompts and settings and linked; the index comes next, and parts go away
    last, so that a killed join can be made again.

    Raises:
        ValueError: parts of other settings; a joined store that is not sound.
    """
    name = manifest.sha256(str(whole.path.resolve()))[:16]
    lock = paths.DATA / "locks" / f"traces-{name}.lock"  # beside the store it would count as one of the stage's files
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # one process joins, the others wait and then find it done
        whole.rows = collection.existing(whole)
        known = {prompt.id for prompt in whole.prompts if collection.sound(whole, prompt)}
        found = [_part(whole, path, whole.prompts) for path in parts(whole.path)]
        found = [part for part in found if part.rows]
        taken: dict[str, collection.Collection] = {}
        for prompt in whole.prompts:
            if prompt.id not in known:
                part = next((one for one in found if collection.sound(one, prompt)), None)
                if part is None:
                    return None
                taken[prompt.id] = part
        if taken or not _complete(whole):
            _take(whole, taken, model)
        for path in parts(whole.path):
            shutil.rmtree(path)
    return store.TraceStore(whole.path)


def _complete(whole: collection.Collection) -> bool:
    """Whether the folder is a store of exactly these prompts already."""
    try:
        return [prompt.id for prompt in store.TraceStore(whole.path).prompts] == [one.id for one in whole.prompts]
    except (FileNotFoundError, ValueError):
        return False


def _take(whole: collection.Collection, taken: dict[str, collection.Collection], model) -> None:
    for name, part in taken.items():
        row = part.rows[name]
        with manifest.atomic(whole.path / row["file"]) as temporary:
            temporary.unlink()
            try:
                os.link(part.path / row["file"], temporary)
            except OSError:  # a file system without links
                shutil.copyfile(part.path / row["file"], temporary)
        whole.rows[name] = row
    collection.enter(whole, model)
    collection.write_index(whole)
    problems = store.TraceStore(whole.path).verify()
    if problems:
        raise ValueError(
            f"{whole.path} was joined from {len(parts(whole.path))} parts and is not sound: {problems[0]}; "
            "needed: delete what is named and collect again, the parts are kept"
        )
