"""Byte-level BPE tokenizer of the embedded models, and their texts packed as token arrays."""

from __future__ import annotations

import json
import lzma
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from dualdeadline import manifest, paths
from dualdeadline.pretrain import texts

VOCABULARY = 8192
END, PAD = "<|endoftext|>", "<|pad|>"  # ids 0 and 1
CONTEXT = 1024  # positions of the embedded model
SAMPLE = {"python-source": 12_000_000, "word-problems": 1_500_000}  # characters the merges are learned from
SAMPLE_OTHER = 3_500_000  # per domain: prose is a minor part of the bytes but not of the evaluation
LIMIT = 40_000_000  # training tokens of one domain: what a training machine is sent stays below 50 MiB
# Token values are 16-bit: telling the coder so saves about a tenth of the size.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 26, "lc": 2, "lp": 1, "pb": 1}]


def train(folder: Path):
    """Learn the merges on a balanced sample of `folder/<domain>.jsonl.gz`; a `tokenizers.Tokenizer`.

    Digits are single tokens, so numbers of any length are spelled the same way.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END, PAD], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(sample(folder), trainer)
    return tokenizer


def sample(folder: Path) -> Iterator[str]:
    """Documents of every domain in the order of their hash, up to the domain's share of characters."""
    for domain in texts.DOMAINS:
        left = SAMPLE.get(domain, SAMPLE_OTHER)
        for document in sorted(texts.load(folder, domain), key=lambda document: manifest.sha256(document.key)):
            if left <= 0:
                break
            left -= len(document.text)
            yield document.text


def save(tokenizer, folder: Path) -> None:
    """Write the files transformers loads: left padding, end of text as end and start."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, bos_token=END, pad_token=PAD, padding_side="left",
        model_max_length=CONTEXT, clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)


def load(folder: Path = paths.PILOT / "olmoe"):
    """The tokenizer of an embedded model as `tokenizers.Tokenizer`."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode(tokenizer, documents: list[str], title: str, batch: int = 512) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of all documents, each closed by the end token (uint16), and the offset where each starts (+ total)."""
    pieces, offsets = [], [0]
    for start in tqdm(range(0, len(documents), batch), title, unit="batch"):
        for ids in tokenizer.encode_batch_fast(documents[start : start + batch], add_special_tokens=False):
            pieces.append(np.array([*ids.ids, 0], np.uint16))
            offsets.append(offsets[-1] + len(pieces[-1]))
    return np.concatenate(pieces), np.array(offsets, np.int64)


def pack(source: Path, out: Path, tokenizer=None, limit: int = LIMIT, processes: int = 2) -> dict:
    """Token arrays of every domain as xz files in `out`, with `out/index.json` that says what they hold.

    Each part has tokens (end tokens included), bytes (UTF-8 of the texts alone), documents, file and SHA-256;
    held-out parts also the tokens and bytes of every document, so that bits per byte are exact. Little-endian
    uint16; the standard library unpacks them. A domain above `limit` training tokens keeps its first documents in
    the order of their hash: a fair sample.
    """
    tokenizer = tokenizer or load()
    out.mkdir(parents=True, exist_ok=True)
    index: dict = {"vocab_size": tokenizer.get_vocab_size(), "end": 0, "pad": 1, "dtype": "<u2", "domains": {}}
    jobs = []
    for domain in texts.DOMAINS:
        index["domains"][domain] = {}
        for part in ("train", "heldout"):
            tokens, entry = _part(source / part, domain, tokenizer, limit if part == "train" else None)
            index["domains"][domain][part] = entry
            jobs.append((domain, part, out / f"{part}-{domain}.u16.xz", tokens))
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for domain, part, file in tqdm(pool.imap_unordered(_compress, jobs, 1), "compress", len(jobs), unit="file"):
            index["domains"][domain][part] |= file
    manifest.write_text(out / "index.json", json.dumps(index))
    return index


def _part(folder: Path, domain: str, tokenizer, limit: int | None) -> tuple[np.ndarray, dict]:
    documents = sorted(texts.load(folder, domain), key=lambda document: manifest.sha256(document.key))
    tokens, offsets = encode(tokenizer, [document.text for document in documents], f"{folder.name} {domain}")
    sizes = [len(document.text.encode()) for document in documents]
    if limit and offsets[-1] > limit:
        count = int(np.searchsorted(offsets, limit, "right")) - 1
        tokens, offsets, sizes = tokens[: offsets[count]], offsets[: count + 1], sizes[:count]
    by_source: Counter = Counter()
    for document, length in zip(documents, np.diff(offsets).tolist(), strict=False):  # documents beyond the limit: none
        by_source[document.source] += length
    entry = {"tokens": len(tokens), "bytes": sum(sizes), "documents": len(sizes), "tokens_by_source": by_source}
    if limit is None:
        entry |= {"document_tokens": np.diff(offsets).tolist(), "document_bytes": sizes}
    return tokens, entry


def _compress(job) -> tuple[str, str, dict]:
    domain, part, path, tokens = job
    with manifest.atomic(path) as temporary:
        temporary.write_bytes(lzma.compress(tokens.astype("<u2").tobytes(), filters=FILTERS))
    return domain, part, {"file": path.name, "packed_bytes": path.stat().st_size, "sha256": manifest.file_sha256(path)}


def unpack(folder: Path, domain: str, part: str) -> np.ndarray:
    """Tokens of one domain's part, `train` or `heldout`.

    Raises:
        ValueError: the file differs from the index.
    """
    entry = json.loads((folder / "index.json").read_text(encoding="utf-8"))["domains"][domain][part]
    data = (folder / entry["file"]).read_bytes()
    if manifest.sha256(data) != entry["sha256"]:
        raise ValueError(f"{folder / entry['file']} differs from index.json; pack the texts again")
    return np.frombuffer(lzma.decompress(data), "<u2")


def record(index: dict, counts: dict[str, dict]) -> None:
    """Write what was kept and how many tokens it gave into each row of the manifest."""
    listed = texts.rows()
    for row in listed:
        if row["domain"]:
            parts, count = index["domains"][row["domain"]], counts[row["name"]]
            row |= {key: count.get(key, 0) for key in texts.COUNTS}
            for part in ("train", "heldout"):
                row |= {f"{part}_{key}": count.get(part, {}).get(key, 0) for key in ("documents", "bytes")}
                row[f"{part}_tokens"] = parts[part]["tokens_by_source"].get(row["name"], 0)
    manifest.write_jsonl(texts.MANIFEST, listed)


if __name__ == "__main__":
    base = Path(sys.argv[1]) if len(sys.argv) > 1 else paths.DATA / "pretrain"
    save(train(base / "train"), paths.PILOT / "olmoe")
    record(pack(base, base / "packed"), json.loads((base / "counts.json").read_text(encoding="utf-8")))
