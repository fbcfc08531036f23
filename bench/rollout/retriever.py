"""Retrieval over the generated world: indexing time, and queries per second in this process and over HTTP.

    OMP_NUM_THREADS=1 python bench/rollout/retriever.py [--bm25 20000] [--dense 1000]

Writes bench/results/retriever_cpu.csv. `index` reads, checks and indexes a JSONL file; `reopen`
opens the index that this left in the cache. `process` searches for `batch` queries per call. `http`
is a real `paw serve retriever` with 16 client threads on the same processors, one query per
request. cpu_s: processor time of this process (for http, of the clients alone). recall3: share of
questions for which the first of their two documents is among the three found.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, ROOT, commit, cpu_name, write
from paw.envs.search.data import Question
from paw.envs.search.retrieval import make_retriever
from paw.envs.search.retrieval.base import Retriever
from paw.envs.search.retrieval.remote import RemoteRetriever
from paw.envs.search.world import World
from paw.envs.settings import SearchConfig

CLIENTS = 16
SECONDS = 5.0
"""Each case is measured for at least this long."""


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--bm25", type=int, default=20_000, help="documents (default: %(default)s)")
    parser.add_argument("--dense", type=int, default=1_000, help="documents (default: %(default)s)")
    options = parser.parse_args()
    common = {
        "date": datetime.date.today().isoformat(),
        "commit": commit("paw/envs/search/retrieval", "paw/envs/search/embedding.py"),
        "device": cpu_name(),
        "threads": torch.get_num_threads(),
        "load": f"{os.getloadavg()[0]:.1f}",  # above 1: distrust the times
        "python": platform.python_version(),
    }
    for package in ("bm25s", "faiss-cpu", "torch", "uvicorn"):
        common[package] = importlib.metadata.version(package)

    records = []
    for retriever_name, documents in (("bm25", options.bm25), ("dense", options.dense)):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["PAW_CACHE"] = f"{folder}/cache"
            measured = measure(retriever_name, World(documents), Path(folder) / "corpus.jsonl")
        for columns in measured:
            records.append(common | columns)
    write(RESULTS / "retriever_cpu.csv", records)


@dataclass(frozen=True)
class Work:
    """What was done, and what it took."""

    count: int
    """Documents or queries."""
    wall_s: float
    cpu_s: float


class Stopwatch:
    """Measures wall time and the processor time of this process from now on."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.cpu_start = time.process_time()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def stop(self, count: int) -> Work:
        return Work(count, wall_s=self.seconds, cpu_s=time.process_time() - self.cpu_start)


def measure(retriever_name: str, world: World, corpus: Path) -> list[dict[str, Any]]:
    """The rows of a retriever that indexes the world's documents, which are written to `corpus`."""
    with corpus.open("w") as corpus_file:
        for document_id, contents in world.documents:
            corpus_file.write(json.dumps({"id": document_id, "contents": contents}) + "\n")
    config = SearchConfig.model_validate({"retriever": retriever_name, "corpus": corpus})
    common = {
        "retriever": retriever_name,
        "encoder": config.encoder if retriever_name == "dense" else "",
        "documents": len(world.documents),
    }
    records = []

    def add_row(case: str, batch: int, work: Work, recall: float | str = "") -> None:
        record = common | {
            "case": case,
            "batch": batch,
            "count": work.count,
            "wall_s": round(work.wall_s, 3),
            "cpu_s": round(work.cpu_s, 3),
            "a_second": round(work.count / work.wall_s, 1),
            "recall3": recall,
        }
        print(*record.values(), flush=True)
        records.append(record)

    load_libraries(retriever_name, config)
    for case in ("index", "reopen"):  # loading the encoder counts; importing libraries does not
        stopwatch = Stopwatch()
        retriever = make_retriever(config)
        add_row(case, 0, stopwatch.stop(len(world.documents)))

    questions = [question for _, question in world.questions[:2000]]
    queries = [question.text for question in questions]
    recall = recall_at_3(retriever, questions)
    for batch in (1, 64):
        add_row("process", batch, search_for_a_while(retriever, queries, batch), recall)
    add_row("http", 1, search_over_http(retriever_name, corpus, queries))
    return records


def load_libraries(retriever_name: str, config: SearchConfig) -> None:
    """Imports the libraries that a retriever needs, by indexing one document."""
    settings = SearchConfig.model_validate({"retriever": retriever_name, "encoder": config.encoder})
    make_retriever(settings, [("0", "warm")])


def recall_at_3(retriever: Retriever, questions: list[Question]) -> float:
    """The share of questions whose first document is among the three found."""
    results = retriever.search([question.text for question in questions], 3)
    found_count = 0
    for question, documents in zip(questions, results, strict=True):
        first_line = f'"{question.hops[0]}"\n'
        found_count += any(document.contents.startswith(first_line) for document in documents)
    return round(found_count / len(questions), 4)


def search_over_http(retriever_name: str, corpus: Path, queries: list[str]) -> Work:
    """Starts `paw serve retriever` and searches with CLIENTS threads."""
    arguments = ("--corpus", str(corpus), "--retriever", retriever_name, "--port", "0")
    command = [sys.executable, "-m", "paw", "serve", "retriever", *arguments]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stderr is not None
    # Libraries may write other lines before the address.
    matches = (re.match(r"(http://\S+): ", line) for line in server.stderr)
    url_match = next((match for match in matches if match), None)
    assert url_match is not None, "the server ended"
    client = RemoteRetriever(url_match[1], timeout_s=60)

    def search(number: int) -> int:
        return search_for_a_while(client, queries[number::CLIENTS], batch=1).count

    stopwatch = Stopwatch()
    with ThreadPoolExecutor(CLIENTS) as threads:
        counts = list(threads.map(search, range(CLIENTS)))
    work = stopwatch.stop(sum(counts))
    server.terminate()
    server.wait()
    return work


def search_for_a_while(retriever: Retriever, queries: list[str], batch: int) -> Work:
    """Searches for three documents per query, `batch` queries per call, for at least SECONDS."""
    stopwatch = Stopwatch()
    searched = 0
    next_query = 0
    while stopwatch.seconds <= SECONDS:
        if next_query + batch > len(queries):
            next_query = 0
        searched += len(retriever.search(queries[next_query : next_query + batch], 3))
        next_query += batch
    return stopwatch.stop(searched)


if __name__ == "__main__":
    main()
