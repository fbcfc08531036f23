"""BM25 as Lucene scores it, using the library bm25s: k1 = 0.9, b = 0.4, Porter's stemmer and
Lucene's English stop words.

The index has a score for each pair of word and document, so a query only adds up a few rows.
"""

import re
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paw.envs.search.retrieval.base import Documents, Hit
from paw.envs.search.retrieval.corpus import Corpus, progress
from paw.errors import UserError
from paw.io.cache import ensure_cached, stamp

WORD = re.compile(r"\b(?!(?<=['’])s\b)\w+")
"""A word: letters and digits, without the possessive 's."""
VERSION = 1
"""Version of the index on disk. Raise it when words are split or scored differently."""


class Bm25:
    """An index of `texts`, or the memory-mapped index that `save` wrote to the folder `saved`.

    Several threads may use it at once.
    """

    def __init__(self, texts: Iterable[str] = (), *, saved: Path | None = None):
        bm25s, stopwords, stemmer_class = _import_bm25s()
        self._stemmer: Any = stemmer_class("porter")
        self._stemmer_lock = threading.Lock()
        self._stopwords = frozenset(stopwords)
        self._index: Any
        if saved is None:
            self._index = self._build(bm25s, texts)
        else:
            self._index = bm25s.BM25.load(saved, mmap=True)
        # Compressed sparse rows. Word w has the entries from starts[w] to starts[w + 1], each with
        # a score and the number of a text.
        self._scores = np.asarray(self._index.scores["data"])
        self._texts = np.asarray(self._index.scores["indices"])
        self._starts = np.asarray(self._index.scores["indptr"])

    def _build(self, bm25s: Any, texts: Iterable[str]) -> Any:
        ids, vocabulary = bm25s.tokenize(
            texts,
            token_pattern=WORD.pattern,
            stopwords="en",
            stemmer=self._stemmer,
            show_progress=False,
        )
        index = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
        with np.errstate(invalid="ignore"):  # 0 / 0 if no text has a word
            index.index((ids, vocabulary or {"": 0}), create_empty_token=False, show_progress=False)
        return index

    def save(self, folder: Path) -> None:
        self._index.save(folder, show_progress=False)

    def top(self, query: str, k: int) -> list[tuple[int, float]]:
        """Return at most `k` pairs (number of a text, score), best first.

        Only texts with a word of the query are returned.
        """
        entries = [slice(self._starts[word], self._starts[word + 1]) for word in self._words(query)]
        if not entries:
            return []

        # Memory pages of `total` that get no score are never allocated.
        total_scores = np.zeros(self._index.scores["num_docs"], np.float32)
        for entry_slice in entries:
            np.add.at(total_scores, self._texts[entry_slice], self._scores[entry_slice])

        # Only texts with a word of the query are candidates. A text occurs once for each of these
        # words, so the k best texts are among the k * words highest scores.
        candidates = np.concatenate([self._texts[entry_slice] for entry_slice in entries])
        scores = total_scores[candidates]
        candidate_count = k * len(entries)
        threshold = (
            np.partition(scores, -candidate_count)[-candidate_count]
            if candidate_count < len(scores)
            else 0
        )
        texts = np.unique(candidates[scores >= threshold])
        best = texts[np.argsort(-total_scores[texts], kind="stable")[:k]]
        return list(zip(best.tolist(), total_scores[best].tolist(), strict=True))

    def _words(self, query: str) -> list[int]:
        """Return the numbers of the query's words that occur in the index."""
        words = [word for word in WORD.findall(query.lower()) if word not in self._stopwords]
        with self._stemmer_lock:  # threads may not share a stemmer
            stems = self._stemmer.stemWords(words)
        vocabulary = self._index.vocab_dict
        return [vocabulary[stem] for stem in stems if stem in vocabulary]


def _import_bm25s() -> tuple[Any, Iterable[str], Any]:
    """Return (the module bm25s, its English stop words, the class Stemmer)."""
    # bm25s imports numba if it can. We do not need numba. It costs a second, and stops vLLM from
    # starting on a CPU.
    hide_numba = "numba" not in sys.modules
    if hide_numba:
        sys.modules["numba"] = None  # type: ignore[assignment]
    try:
        import bm25s.stopwords
        from Stemmer import Stemmer
    except ImportError:
        raise UserError(
            "BM25 needs bm25s and PyStemmer: pip install 'paw-trainer[search]', "
            "or 'paw-trainer[webshop]'"
        ) from None
    finally:
        if hide_numba:
            del sys.modules["numba"]
    return bm25s, bm25s.stopwords.STOPWORDS_EN, Stemmer


class Bm25Retriever:
    """BM25 over documents. The index of a Corpus is kept in the cache and memory-mapped."""

    def __init__(self, documents: Documents):
        self._documents = documents
        if isinstance(documents, Corpus):
            name = f"bm25-{stamp(documents.path)}-{VERSION}"
            folder = ensure_cached(name, lambda folder: self._build().save(folder))
            self._index = Bm25(saved=folder)
        else:
            self._index = self._build()

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        return [self._search(query, topk) for query in queries]

    def _search(self, query: str, topk: int) -> list[Hit]:
        hits = []
        for i, score in self._index.top(query, topk):
            id_, contents = self._documents[i]
            hits.append(Hit(id_, contents, score))
        return hits

    def _build(self) -> Bm25:
        texts = (contents for _, contents in self._documents)
        return Bm25(progress(texts, len(self._documents), "BM25 index"))
