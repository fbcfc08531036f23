"""Dense retrieval: a sentence encoder, and the inner product of its unit vectors over all documents (faiss).

An encoder whose name contains "e5" gets "query: " and "passage: " before the texts, as it was trained (Search-R1's
settings). The vectors are a float32 file in the cache, written row by row: an interrupted start goes on where it ended.
Search-R1's NAME_Flat.index beside the corpus, NAME being part of the encoder's name, is read instead.
"""

import fcntl
import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paw.cache import cache_dir, stamp
from paw.envs.search.embedding import Embedding
from paw.envs.search.retrieval import Documents, Hit
from paw.envs.search.retrieval.corpus import Corpus, progress
from paw.errors import UserError, needed
from paw.files import writing

TOKENS = 256
CHUNK = 1024
SAME = 0.99
"""Cosine, at least, of a document's vector with the one kept of it. Other texts under E5 come to 0.7 to 0.95."""


class DenseRetriever:
    """Over `documents` by an `Embedding`, on a GPU if there is one; UserError if those kept are of other documents."""

    def __init__(self, documents: Documents, encoder: str):
        self._faiss = needed("faiss", "dense retrieval", "search")
        self._documents, self._lock = documents, threading.Lock()
        self._encoder = Embedding(encoder, key="env.encoder", tokens=TOKENS)
        name = Path(encoder).name.lower()
        self._query, self._passage = ("query: ", "passage: ") if "e5" in name else ("", "")
        first = self._passages(slice(0, 1))[0]
        corpus = documents.path if isinstance(documents, Corpus) else None
        beside = sorted(corpus.parent.glob("*_Flat.index")) if corpus else []  # of Search-R1's making
        if found := next((path for path in beside if path.name.removesuffix("_Flat.index").lower() in name), None):
            self._index = self._faiss.read_index(str(found), self._faiss.IO_FLAG_MMAP_IFC)
            shape = self._index.ntotal, self._index.d
            self._vectors_ND = self._faiss.rev_swig_ptr(self._index.get_xb(), shape[0] * shape[1]).reshape(shape)
        else:
            source = stamp(corpus) if corpus else "\0".join(contents for _, contents in documents)
            digest = hashlib.sha256(f"{encoder}\0{source}".encode()).hexdigest()[:16]
            found = cache_dir() / f"dense-{digest}.f32"
            if not found.is_file():
                self._write(found, width=len(first))
            self._vectors_ND = np.memmap(found, np.float32, "r").reshape(-1, len(first))
        shape = len(documents), len(first)
        if self._vectors_ND.shape != shape or self._vectors_ND[0] @ first < SAME:
            raise UserError(
                f"{found}: {' x '.join(map(str, self._vectors_ND.shape))} vectors that are not those of '{encoder}' for"
                f" these {len(documents):,} documents; move the file away"
            )

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Hits by cosine, in [-1, 1]."""
        if not queries:
            return []
        with self._lock:  # a tokenizer may not be shared
            queries_QD = self._encoder.encode([self._query + query for query in queries]).numpy()
        k = min(topk, len(self._documents))
        scores_QK, places_QK = self._faiss.knn(queries_QD, self._vectors_ND, k, self._faiss.METRIC_INNER_PRODUCT)
        found = (zip(*row, strict=True) for row in zip(places_QK, scores_QK, strict=True))
        return [[Hit(*self._documents[int(at)], float(score)) for at, score in row] for row in found]

    def _passages(self, part: slice) -> np.ndarray:
        places = range(len(self._documents))[part]
        return self._encoder.encode([self._passage + self._documents[at][1] for at in places]).numpy()

    def _write(self, path: Path, *, width: int) -> None:
        partial = path.with_suffix(".part")
        with writing(partial, "; set PAW_CACHE"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # one process writes, the others wait for it
                if path.is_file():
                    return
                done = file.tell() // (4 * width * CHUNK) * CHUNK
                file.truncate(4 * width * done)
                starts = range(done, len(self._documents), CHUNK)
                for start in progress(starts, len(starts), f"dense index, {CHUNK:,} documents a step"):
                    file.write(self._passages(slice(start, start + CHUNK)).tobytes())
                    file.flush()
                partial.rename(path)
