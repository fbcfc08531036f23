"""Dense retrieval with a sentence encoder. Scores are the inner products of its unit vectors with
those of all documents (faiss).

If the encoder's name contains "e5", texts get the prefixes "query: " and "passage: ", as in its
training (Search-R1's settings). The vectors are a float32 file in the cache, written in steps, so
an interrupted start continues where it stopped. If Search-R1's NAME_Flat.index is next to the
corpus, and NAME is part of the encoder's name, that file is read instead.
"""

import fcntl
import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paw.envs.search.embedding import Embedding
from paw.envs.search.retrieval.base import Documents, Hit
from paw.envs.search.retrieval.corpus import Corpus, progress
from paw.errors import UserError, needed
from paw.io.cache import cache_dir, stamp
from paw.io.files import writing

TOKENS = 256
"""Number of tokens that the encoder reads from a text."""
CHUNK = 1024
"""Number of documents that are encoded and written in one step."""
SAME = 0.99
"""Minimum cosine between a document's vector and its vector on disk.

Vectors of different texts have cosines of 0.7 to 0.95 under E5.
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
                f"{path}: {shape} vectors that are not those of '{encoder}' for these "
                f"{len(documents):,} documents; move the file away"
            )

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return hits by cosine, in [-1, 1]."""
        if not queries:
            return []
        with self._encoder_lock:  # threads may not share a tokenizer
            prefixed = [self._query_prefix + query for query in queries]
            queries_QD = self._encoder.encode(prefixed).numpy()
        k = min(topk, len(self._documents))
        scores_QK, indices_QK = self._faiss.knn(
            queries_QD, self._vectors_ND, k, self._faiss.METRIC_INNER_PRODUCT
        )
        hits_of_queries = []
        for scores_K, indices_K in zip(scores_QK, indices_QK, strict=True):
            hits = []
            for i, score in zip(indices_K, scores_K, strict=True):
                hits.append(self._hit(int(i), float(score)))
            hits_of_queries.append(hits)
        return hits_of_queries

    def _hit(self, i: int, score: float) -> Hit:
        id_, contents = self._documents[i]
        return Hit(id_, contents, score)

    def _corpus_path(self) -> Path | None:
        return self._documents.path if isinstance(self._documents, Corpus) else None

    def _flat_index(self, encoder: str) -> Path | None:
        """Return the index that Search-R1's code left by the corpus for this encoder, if any."""
        corpus = self._corpus_path()
        if corpus is None:
            return None
        encoder_name = Path(encoder).name.lower()
        for path in sorted(corpus.parent.glob("*_Flat.index")):
            if path.name.removesuffix("_Flat.index").lower() in encoder_name:
                return path
        return None

    def _read_flat_index(self, path: Path) -> np.ndarray:
        """Return a flat faiss index's vectors, memory-mapped, valid while the index exists."""
        self._index = self._faiss.read_index(str(path), self._faiss.IO_FLAG_MMAP_IFC)
        vector_count = self._index.ntotal
        width = self._index.d
        vectors = self._faiss.rev_swig_ptr(self._index.get_xb(), vector_count * width)
        return vectors.reshape(vector_count, width)

    def _cache_file(self, encoder: str) -> Path:
        """Return the cache file with the vectors of these documents under this encoder."""
        corpus = self._corpus_path()
        source = stamp(corpus) if corpus else "\0".join(contents for _, contents in self._documents)
        digest = hashlib.sha256(f"{encoder}\0{source}".encode()).hexdigest()[:16]
        return cache_dir() / f"dense-{digest}.f32"

    def _encode_passages(self, part: slice) -> np.ndarray:
        """Return the vectors [N, D] of a slice of the documents."""
        passages = []
        for i in range(len(self._documents))[part]:
            _, contents = self._documents[i]
            passages.append(self._passage_prefix + contents)
        return self._encoder.encode(passages).numpy()

    def _write(self, path: Path, *, width: int) -> None:
        """Write the vectors of all documents, or the remaining ones, with `width` numbers each."""
        partial = path.with_suffix(".part")
        with writing(partial, "; set PAW_CACHE"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # one process writes, the others wait for it
                if path.is_file():
                    return
                # Continue after the last complete chunk.
                documents_done = file.tell() // (4 * width * CHUNK) * CHUNK
                file.truncate(4 * width * documents_done)
                starts = range(documents_done, len(self._documents), CHUNK)
                label = f"dense index, {CHUNK:,} documents a step"
                for start in progress(starts, len(starts), label):
                    file.write(self._encode_passages(slice(start, start + CHUNK)).tobytes())
                    file.flush()
                partial.rename(path)
