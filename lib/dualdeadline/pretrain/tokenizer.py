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
BLOCK = 8_000_000  # tokens compressed at a time, so that one large domain does not keep one core waiting
# Token values are 16-bit: telling the coder so shortens the files.
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
        for document in sorted(
            texts.load(folder, domain), key=lambda document: manifest.sha256(document.key)
        ):
            if left <= 0:
                break
            left -= len(document.text)
            yield document.text


def save(tokenizer, folder: Path) -> None:
    """Write the files transformers loads: left padding, end of text as end and start."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        bos_token=END,
        pad_token=PAD,
        padding_side="left",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)


def load(folder: Path = paths.PILOT / "olmoe"):
    """The tokenizer of an embedded model as `tokenizers.Tokenizer`."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode(
    tokenizer, documents: list[str], title: str, limit: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of leading documents, each closed by the end token (uint16), and the tokens of each document.

    All documents, or as many as `limit` tokens hold.
    """
    pieces, total, batch = [np.empty(0, np.uint16)], 0, 512
    for start in tqdm(range(0, len(documents), batch), title, unit="batch"):
        for ids in tokenizer.encode_batch_fast(documents[start : start + batch], add_special_tokens=False):
            total += len(ids) + 1
            if limit and total > limit:
                break
            pieces.append(np.array([*ids.ids, 0], np.uint16))
        if limit and total > limit:
            break
    return np.concatenate(pieces), np.array([len(piece) for piece in pieces[1:]], np.int64)


def pack(source: Path, out: Path, tokenizer=None, limit: int = LIMIT, processes: int = 2) -> dict:
    """Token arrays of every domain as xz files in `out`, with `out/index.json` that says what they hold.

    Each part has tokens (end tokens included), bytes (UTF-8 of the texts alone), documents, file and SHA-256;
    held-out parts also the tokens and bytes of every document, so that bits per byte are exact. The files are
    little-endian uint16, and the standard library unpacks them. A domain with more than `limit` training tokens
    keeps its first documents in the order of their hash: a fair sample.
    """
    tokenizer = tokenizer or load()
    out.mkdir(parents=True, exist_ok=True)
    index: dict = {
        "vocab_size": tokenizer.get_vocab_size(),
        "end": 0,
        "pad": 1,
        "dtype": "<u2",
        "domains": {},
    }
    parts = []
    for domain in texts.DOMAINS:
        index["domains"][domain] = {}
        for part in ("train", "heldout"):
            tokens, entry = _part(source / part, domain, tokenizer, limit if part == "train" else None)
            index["domains"][domain][part] = entry
            parts.append((entry, out / f"{part}-{domain}.u16.xz", tokens))
    blocks = [tokens[start : start + BLOCK] for *_, tokens in parts for start in range(0, len(tokens), BLOCK)]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        packed = iter(tqdm(pool.imap(_compress, blocks), "compress", len(blocks), unit="block"))
        for entry, path, tokens in parts:
            # xz streams one after the other are one xz file
            data = b"".join(next(packed) for _ in range(0, len(tokens), BLOCK))
            with manifest.atomic(path) as temporary:
                temporary.write_bytes(data)
            entry |= {"file": path.name, "packed_bytes": len(data), "sha256": manifest.sha256(data)}
    manifest.write_text(out / "index.json", json.dumps(index))
    return index


def _part(folder: Path, domain: str, tokenizer, limit: int | None) -> tuple[np.ndarray, dict]:
    documents = sorted(texts.load(folder, domain), key=lambda document: manifest.sha256(document.key))
    title = f"{folder.name} {domain}"
    tokens, lengths = encode(tokenizer, [document.text for document in documents], title, limit)
    sizes = [len(document.text.encode()) for document in documents[: len(lengths)]]
    by_source: Counter = Counter()
    for document, length in zip(documents[: len(lengths)], lengths.tolist(), strict=True):
        by_source[document.source] += length
    entry = {
        "tokens": len(tokens),
        "bytes": sum(sizes),
        "documents": len(sizes),
        "tokens_by_source": by_source,
    }
    if limit is None:
        entry |= {"document_tokens": lengths.tolist(), "document_bytes": sizes}
    return tokens, entry


def _compress(tokens: np.ndarray) -> bytes:
    return lzma.compress(tokens.astype("<u2").tobytes(), filters=FILTERS)


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
