"""`paw data`: says where to get an environment's files and what a folder has, or generates files.

The user downloads the files of WebShop and search QA. ALFWorld's package has its own download
command. `paw data smollm2` makes a small pretrained model to try things with.
"""

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from paw.envs.alfworld import generator, index
from paw.envs.alfworld.problem import KINDS
from paw.envs.search import data
from paw.envs.search.retrieval.corpus import Corpus
from paw.envs.search.world import World
from paw.envs.search.world import split as split_questions
from paw.envs.settings import WebshopConfig
from paw.envs.webshop import catalogue
from paw.envs.webshop import generator as webshop
from paw.errors import UserError
from paw.io.files import writing

WEBSHOP = """\
WebShop's files (arXiv 2207.01206; princeton-nlp/WebShop, setup.sh), from Google Drive, \
by `gdown ID -O FILE`:
  1EgHdxQ_YxqIQlvvq5iKlCrkEKR6-j0Ib  items_shuffle_1000.json   1,000 products
  1IduG0xl544V_A_jv3tHXC0kyFi7PnyBu  items_ins_v2_1000.json    their attributes
  1A2whVgOO0euk5O13n2iYDM0bQRkkRduB  items_shuffle.json        all products (env.catalogue = "full")
  1s2j6NgHljiZzQNL3veZaAiyW_qDEgBNi  items_ins_v2.json         their attributes
  14Kb5SPBk_jfdLZ_CDBNitW98QLDlKR5O  items_human_ins.json      instructions by people \
(env.goals = "human")"""
"""Where to get WebShop's files."""
SEARCH = """\
Questions and documents of Search-R1 (arXiv 2503.09516), from Hugging Face, into one folder, by
`hf download NAME --repo-type dataset --local-dir ~/.cache/search`:
  PeterJinGo/nq_hotpotqa_train  train.parquet (NQ and HotpotQA) and test.parquet (seven sets)
  PeterJinGo/wiki-18-corpus     wiki-18.jsonl.gz, Wikipedia of 2018: gzip -d, 14 GB
  PeterJinGo/wiki-18-e5-index   part_aa, part_ab, for dense retrieval: cat part_* > e5_Flat.index"""
"""Where to get the files of search QA."""
CORPORA = ("corpus.jsonl", "wiki-18.jsonl")
"""Names of the file of documents. The first is written, either is read."""


class _Source(NamedTuple):
    """How `paw data` handles the files of an environment."""

    least: int
    """Smallest number for --generate."""
    generate: Callable[[Path, argparse.Namespace], None]
    """Writes generated files to a folder."""
    report: Callable[[Path, Path | None], None]
    """Prints what a folder contains. The second argument is --corpus."""


def run(options: argparse.Namespace, _: object) -> int:
    """Generate or download files if asked to, then print what the folder contains. Returns 0."""
    if options.env == "smollm2":
        from paw.tools.smollm2 import smollm2  # loads torch

        print(smollm2(options.out))
        return 0

    sources = {
        "alfworld": _Source(1, _generate_games, _report_games),
        "webshop": _Source(20, _generate_shop, _report_shop),
        "search": _Source(20, _generate_world, _report_search),
    }
    source = sources[options.env]
    _check_arguments(options, source)

    if options.out:
        folder = options.out
        with writing(f"--out {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            source.generate(folder, options)
    else:
        folder = _folder_of(options)
        if options.download:
            _download_games(folder)
    source.report(folder, options.corpus)
    return 0


def _check_arguments(options: argparse.Namespace, source: _Source) -> None:
    """Raise UserError if the arguments do not fit the environment or each other."""
    if options.download and options.env != "alfworld":
        raise UserError(
            f"paw data {options.env}: --download is for alfworld; "
            f"`paw data {options.env}` says where to get it"
        )
    one_is_missing = (options.generate is None) != (options.out is None)
    too_few = options.generate is not None and options.generate < source.least
    if one_is_missing or too_few:
        raise UserError(
            f"paw data {options.env}: --generate takes a number of at least {source.least}, "
            "and --out DIR to write to; --dir names an existing folder"
        )


def _folder_of(options: argparse.Namespace) -> Path:
    """Return the folder of the environment's files: --dir, $ALFWORLD_DATA, or one in ~/.cache."""
    if options.dir:
        return options.dir.expanduser()
    home = os.environ.get("ALFWORLD_DATA") if options.env == "alfworld" else None
    return Path(home or Path.home() / ".cache" / options.env).expanduser()


def _generate_games(folder: Path, options: argparse.Namespace) -> None:
    """Write --generate training games, and a tenth as many unseen ones. No game is in both."""
    for split, stream, count in (
        ("train", "train", options.generate),
        ("valid_unseen", "unseen", max(1, options.generate // 10)),
    ):
        for game in generator.games(
            stream, 0, count, seed=options.seed, difficulty=options.difficulty
        ):
            generator.write(game, folder / index.FOLDER / split)


def _generate_shop(folder: Path, options: argparse.Namespace) -> None:
    webshop.write(folder, options.generate, options.seed)


def _download_games(folder: Path) -> None:
    # Prefer the command beside this Python, because the environment need not be on the PATH.
    beside = Path(sys.executable).with_name("alfworld-download")
    command = str(beside) if beside.is_file() else shutil.which("alfworld-download")
    if command is None:
        raise UserError("alfworld-download is not installed: pip install 'paw-trainer[alfworld]'")
    status = subprocess.run([command, "--data-dir", str(folder)], check=False).returncode
    if status != 0:
        raise UserError(
            f"alfworld-download failed with exit code {status}; its own message is above"
        )


def _report_games(folder: Path, _: object) -> None:
    root = index.find_root(folder, origin="--dir")
    for split in index.SPLITS:
        if not (root / split).is_dir():
            continue
        games = index.load_split(root, split)
        kinds = Counter(kind for _, kind in games.games)
        counts = ", ".join(f"{kind} {kinds[kind]}" for kind in KINDS if kinds[kind])
        print(f"{split:<12} {len(games.games):>5} games ({counts}), sha256 {games.digest[:16]}")
    print(f"use them with --env.data {folder}")


def _report_shop(folder: Path, _: object) -> None:
    files = {"small": folder / catalogue.ITEMS, "full": folder / "items_shuffle.json"}
    sizes = [size for size, path in files.items() if path.is_file()]
    if not sizes:
        print(WEBSHOP)
        raise UserError(
            f"--dir {folder} has none of WebShop's products; the places above have them"
        )
    goals = ["synthetic"]
    if (folder / catalogue.HUMAN).is_file():
        goals.append("human")
    for size, kind in itertools.product(sizes, goals):
        config = WebshopConfig.model_validate({"catalogue": size, "goals": kind})
        shop = catalogue.load(folder, config)
        train = len(shop.goals) - shop.n_test
        print(
            f"{size:<6} {kind:<10} {len(shop.products):,} products, {shop.n_test:,} goals to test, "
            f"{train:,} to train, sha256 {shop.digest[:16]}"
        )
    full = " --env.catalogue full" if sizes == ["full"] else ""
    print(f"use them with --env.data {folder}{full}")


def _generate_world(folder: Path, options: argparse.Namespace) -> None:
    world = World(options.generate, seed=options.seed)

    def write(name: str, rows: Iterable[dict[str, Any]]) -> None:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / name).write_text(text, encoding="utf-8")

    write(CORPORA[0], ({"id": name, "contents": contents} for name, contents in world.documents))

    splits = split_questions([world])
    for split in ("train", "test"):
        rows = []
        for kind, question in splits[split]:
            rows.append(
                {"question": question.text, "golden_answers": question.answers, "data_source": kind}
            )
        write(f"{split}.jsonl", rows)


def _report_search(folder: Path, corpus: Path | None) -> None:
    splits = [split for split in ("train", "test") if data.candidates(folder, split)]
    if not splits:
        print(SEARCH)
        raise UserError(
            f"--dir {folder} has neither train nor test questions; the places above have them"
        )
    for split in splits:
        path = data.find_file(folder, split)
        tasks = data.load(path)
        kinds = Counter(task.kind for task in tasks)
        counts = ", ".join(f"{kind} {task_count:,}" for kind, task_count in kinds.items())
        print(f"{split:<6} {len(tasks):,} questions ({counts}), sha256 {data.digest(path)}")

    for name in CORPORA:
        if not corpus and (folder / name).is_file():
            corpus = folder / name
    if corpus is None:
        print(f"no documents: {folder} has no {' or '.join(CORPORA)}; name them with --corpus")
        return
    print(f"corpus {len(Corpus(corpus)):,} documents in {corpus}")
    print(f"use them with --env.data {folder} --env.corpus {corpus}")
