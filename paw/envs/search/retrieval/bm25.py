"""BM25 as Lucene scores it, on bm25s: k1 = 0.9, b = 0.4, Porter's stemmer, Lucene's English stop words.

The index holds a score for every (word, document), so that a query adds up a few rows of it.
"""

import re
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paw.cache import cached, stamp
from paw.envs.search.retrieval import Documents, Hit
from paw.envs.search.retrieval.corpus import Corpus, progress
from paw.errors import UserError

WORD = re.compile(r"\b(?!(?<=['’])s\b)\w+")
"""Letters and digits, without the possessive 's."""
VERSION = 1
"""Of what is kept on disk: to be raised when words are split or scored differently."""


class Bm25:
    """An index of `texts`, or the memory-mapped one that `save` left in `saved`.

    Safe to use from several threads.
    """

    def __init__(self, texts: Iterable[str] = (), *, saved: Path | None = None):
        # bm25s imports numba if it can: unused here, it costs a second, and vLLM's start on a CPU
        # fails over it.
        if hide := "numba" not in sys.modules:
            sys.modules["numba"] = None  # type: ignore[assignment]
        try:
            import bm25s
            from bm25s.stopwords import STOPWORDS_EN
            from Stemmer import Stemmer
        except ImportError:
            raise UserError(
                "BM25 needs bm25s and PyStemmer: pip install 'paw-trainer[search]', or 'paw-trainer[webshop]'"
            ) from None
        finally:
            if hide:
                del sys.modules["numba"]
        self._stemmer, self._lock = Stemmer("porter"), threading.Lock()
        self._stopwords = frozenset(STOPWORDS_EN)
        self._index: Any = (
            self._build(bm25s, texts) if saved is None else bm25s.BM25.load(saved, mmap=True)
        )
        self._data, self._texts, self._starts = (
            np.asarray(self._index.scores[name]) for name in ("data", "indices", "indptr")
        )

    def _build(self, bm25s: Any, texts: Iterable[str]) -> Any:
        options: dict[str, Any] = {
            "token_pattern": WORD.pattern,
            "stopwords": "en",
            "stemmer": self._stemmer,
        }
        rows, stems = bm25s.tokenize(texts, show_progress=False, **options)
        index = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
        with np.errstate(invalid="ignore"):  # 0 / 0 where no text has a word
            index.index((rows, stems or {"": 0}), create_empty_token=False, show_progress=False)
        return index

    def save(self, folder: Path) -> None:
        self._index.save(folder, show_progress=False)

    def top(self, query: str, k: int) -> list[tuple[int, float]]:
        """At most k pairs (position of a text, score), best first; only of texts with a word of the query."""
        words = [word for word in WORD.findall(query.lower()) if word not in self._stopwords]
        with self._lock:  # a stemmer may not be shared
            stems = self._stemmer.stemWords(words)
        known = [self._index.vocab_dict[stem] for stem in stems if stem in self._index.vocab_dict]
        if not known:
            return []
        total = np.zeros(
            self._index.scores["num_docs"], np.float32
        )  # pages that nothing is added to cost nothing
        parts = [slice(self._starts[word], self._starts[word + 1]) for word in known]
        for part in parts:
            np.add.at(total, self._texts[part], self._data[part])
        touched = np.concatenate(
            [self._texts[part] for part in parts]
        )  # a text once for each word it has
        scores, most = total[touched], k * len(parts)
        least = np.partition(scores, -most)[-most] if most < len(scores) else 0
        found = np.unique(touched[scores >= least])
        best = found[np.argsort(-total[found], kind="stable")[:k]]
        return list(zip(best.tolist(), total[best].tolist(), strict=True))


class Bm25Retriever:
    """BM25 over documents. The index of a Corpus is kept in the cache and memory-mapped."""

    def __init__(self, documents: Documents):
        self._documents = documents
        if isinstance(documents, Corpus):
            folder = cached(
                f"bm25-{stamp(documents.path)}-{VERSION}", lambda folder: self._build().save(folder)
            )
            self._index = Bm25(saved=folder)
        else:
            self._index = self._build()

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        found = (self._index.top(query, topk) for query in queries)
        return [[Hit(*self._documents[at], score) for at, score in hits] for hits in found]

    def _build(self) -> Bm25:
        texts = (contents for _, contents in self._documents)
        return Bm25(progress(texts, len(self._documents), "BM25 index"))
