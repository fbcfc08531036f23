"""Dense retrieval: a sentence encoder, and the inner product of its unit vectors over all documents (faiss).

If the encoder's name contains "e5", texts get "query: " and "passage: " in front, as in its
training (Search-R1's settings). The vectors are a float32 file in the cache, written in steps: an
interrupted start continues where it ended. If Search-R1's NAME_Flat.index is beside the corpus,
NAME being part of the encoder's name, that is read instead.
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
"""Least cosine of a document's vector with its vector on disk.

Different texts come to 0.7 to 0.95 under E5.
"""


class DenseRetriever:
    """Retrieval over `documents` by an `Embedding`, on a GPU if there is one.

    Raises UserError if the vectors on disk belong to other documents.
    """

    def __init__(self, documents: Documents, encoder: str):
        self._faiss = needed("faiss", "dense retrieval", "search")
        self._documents = documents
        self._encoder = Embedding(encoder, key="env.encoder", tokens=TOKENS)
        self._encoder_lock = threading.Lock()
        is_e5 = "e5" in Path(encoder).name.lower()
        self._query_prefix = "query: " if is_e5 else ""
        self._passage_prefix = "passage: " if is_e5 else ""

        first_D = self._encode_passages(slice(0, 1))[0]
        path = self._flat_index(encoder)
        if path:
            self._vectors_ND = self._read_flat_index(path)
        else:
            path = self._cache_file(encoder)
            if not path.is_file():
                self._write(path, width=len(first_D))
            self._vectors_ND = np.memmap(path, np.float32, "r").reshape(-1, len(first_D))
        same_shape = self._vectors_ND.shape == (len(documents), len(first_D))
        if not same_shape or self._vectors_ND[0] @ first_D < SAME:
            shape = " x ".join(map(str, self._vectors_ND.shape))
            raise UserError(
                f"{path}: {shape} vectors that are not those of '{encoder}' for these {len(documents):,} documents; "
                "move the file away"
            )

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Hits by cosine, in [-1, 1]."""
        if not queries:
            return []
        with self._encoder_lock:  # threads may not share a tokenizer
            queries_QD = self._encoder.encode(
                [self._query_prefix + query for query in queries]
            ).numpy()
        k = min(topk, len(self._documents))
        scores_QK, indices_QK = self._faiss.knn(
            queries_QD, self._vectors_ND, k, self._faiss.METRIC_INNER_PRODUCT
        )
        hits = []
        for scores_K, indices_K in zip(scores_QK, indices_QK, strict=True):
            hits.append(
                [
                    self._hit(int(i), float(score))
                    for i, score in zip(indices_K, scores_K, strict=True)
                ]
            )
        return hits

    def _hit(self, i: int, score: float) -> Hit:
        id, contents = self._documents[i]
        return Hit(id, contents, score)

    def _corpus_path(self) -> Path | None:
        return self._documents.path if isinstance(self._documents, Corpus) else None

    def _flat_index(self, encoder: str) -> Path | None:
        """The index that Search-R1's code left beside the corpus for this encoder, if there is one."""
        corpus = self._corpus_path()
        if corpus is None:
            return None
        encoder_name = Path(encoder).name.lower()
        for path in sorted(corpus.parent.glob("*_Flat.index")):
            if path.name.removesuffix("_Flat.index").lower() in encoder_name:
                return path
        return None

    def _read_flat_index(self, path: Path) -> np.ndarray:
        """The vectors of a flat faiss index, memory-mapped; they live as long as the index."""
        self._index = self._faiss.read_index(str(path), self._faiss.IO_FLAG_MMAP_IFC)
        count, width = self._index.ntotal, self._index.d
        return self._faiss.rev_swig_ptr(self._index.get_xb(), count * width).reshape(count, width)

    def _cache_file(self, encoder: str) -> Path:
        corpus = self._corpus_path()
        source = stamp(corpus) if corpus else "\0".join(contents for _, contents in self._documents)
        digest = hashlib.sha256(f"{encoder}\0{source}".encode()).hexdigest()[:16]
        return cache_dir() / f"dense-{digest}.f32"

    def _encode_passages(self, part: slice) -> np.ndarray:
        indices = range(len(self._documents))[part]
        return self._encoder.encode(
            [self._passage_prefix + self._documents[i][1] for i in indices]
        ).numpy()

    def _write(self, path: Path, *, width: int) -> None:
        partial = path.with_suffix(".part")
        with writing(partial, "; set PAW_CACHE"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # one process writes, the others wait for it
                if path.is_file():
                    return
                chunks_done = file.tell() // (4 * width * CHUNK)
                done = chunks_done * CHUNK  # documents
                file.truncate(4 * width * done)
                starts = range(done, len(self._documents), CHUNK)
                for start in progress(
                    starts, len(starts), f"dense index, {CHUNK:,} documents a step"
                ):
                    file.write(self._encode_passages(slice(start, start + CHUNK)).tobytes())
                    file.flush()
                partial.rename(path)
