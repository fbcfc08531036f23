"""Retrieval: time to index, and queries a second in this process and over HTTP, on the generated world's documents.

    OMP_NUM_THREADS=1 python bench/rollout/retriever.py [--bm25 20000] [--dense 1000]

Writes bench/results/retriever_cpu.csv. `index` reads, checks and indexes a JSONL file; `reopen`
opens what that left in the cache. `process` searches for `batch` queries a call; `http` is a real
`paw serve retriever` with 16 client threads, which share its processors, one query a request.
cpu_s: processor time of this process (http: of the clients alone). recall3: share of questions
whose document (of two, the first) is among three found.
"""

import argparse
import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, ROOT, commit, cpu_name, write
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
    made = commit("paw/envs/search/retrieval", "paw/envs/search/embedding.py")
    about = {"date": datetime.date.today().isoformat(), "commit": made, "device": cpu_name()}
    about |= {
        "threads": torch.get_num_threads(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }  # above 1: distrust the times
    about |= {"python": platform.python_version()}
    about |= {
        name: importlib.metadata.version(name)
        for name in ("bm25s", "faiss-cpu", "torch", "uvicorn")
    }
    rows: list[dict[str, Any]] = []
    for name, documents in vars(options).items():
        with tempfile.TemporaryDirectory() as folder:
            os.environ["PAW_CACHE"] = f"{folder}/cache"
            rows += [about | row for row in measure(name, documents, Path(folder) / "corpus.jsonl")]
    write(RESULTS / "retriever_cpu.csv", rows)


def measure(name: str, documents: int, corpus: Path) -> list[dict[str, Any]]:
    world = World(documents)
    corpus.write_text(
        "".join(json.dumps({"id": i, "contents": text}) + "\n" for i, text in world.documents)
    )
    questions = [question for _, question in world.questions[:2000]]
    config = SearchConfig.model_validate({"retriever": name, "corpus": corpus})
    encoder = config.encoder if name == "dense" else ""
    rows: list[dict[str, Any]] = []

    def note(
        case: str, batch: int, count: int, seconds: float, cpu: float, recall: float | str = ""
    ) -> None:
        rows.append(
            {
                "retriever": name,
                "encoder": encoder,
                "documents": documents,
                "case": case,
                "batch": batch,
            }
        )
        rows[-1] |= {"count": count, "wall_s": round(seconds, 3), "cpu_s": round(cpu, 3)}
        rows[-1] |= {"a_second": round(count / seconds, 1), "recall3": recall}
        print(*rows[-1].values(), flush=True)

    make_retriever(
        SearchConfig.model_validate({"retriever": name, "encoder": config.encoder}), [("0", "warm")]
    )
    retriever: Retriever | None = None
    for case in ("index", "reopen"):  # imports are not counted, loading the encoder is
        start, cpu = time.perf_counter(), time.process_time()
        retriever = make_retriever(config)
        note(case, 0, documents, time.perf_counter() - start, time.process_time() - cpu)
    assert retriever is not None
    texts = [question.text for question in questions]
    titles = [f'"{question.hops[0]}"\n' for question in questions]
    found = retriever.search(texts, 3)
    right = [
        any(hit.contents.startswith(title) for hit in hits)
        for hits, title in zip(found, titles, strict=True)
    ]
    for batch in (1, 64):
        note(
            "process",
            batch,
            *timed(retriever, texts, batch),
            recall=round(sum(right) / len(right), 4),
        )
    command = [
        sys.executable,
        "-m",
        "paw",
        "serve",
        "retriever",
        "--corpus",
        str(corpus),
        "--retriever",
        name,
    ]
    server = subprocess.Popen(
        [*command, "--port", "0"], stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert server.stderr is not None
    url = re.match(r"(http://\S+): ", server.stderr.readline())
    assert url is not None
    client = RemoteRetriever(url[1], timeout_s=60)
    start, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(CLIENTS) as pool:
        done = list(
            pool.map(lambda part: timed(client, texts[part::CLIENTS], 1)[0], range(CLIENTS))
        )
    note("http", 1, sum(done), time.perf_counter() - start, time.process_time() - cpu)
    server.terminate()
    server.wait()
    return rows


def timed(retriever: Retriever, texts: list[str], batch: int) -> tuple[int, float, float]:
    """Queries searched for, three hits each; seconds and processor seconds."""
    start, cpu, count = time.perf_counter(), time.process_time(), 0
    for at in itertools.cycle(range(0, len(texts) - batch + 1, batch)):
        count += len(retriever.search(texts[at : at + batch], 3))
        if (seconds := time.perf_counter() - start) > SECONDS:
            return count, seconds, time.process_time() - cpu
    raise AssertionError("without end")


if __name__ == "__main__":
    main()
