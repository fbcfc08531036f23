"""`paw data`: where an environment's files are, whether a folder has them, or generated ones in their place.

ALFWorld's games come by their own command (`paw.envs.alfworld.data`). The files of WebShop and of
search-augmented QA are the user's to get: the command names the places, checks a folder and prints what is in it.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paw.envs.alfworld import data as alfworld
from paw.envs.alfworld.tables import DIFFICULTIES
from paw.envs.settings import WebshopConfig
from paw.errors import UserError

WEBSHOP = """\
WebShop's files (arXiv 2207.01206; princeton-nlp/WebShop, setup.sh), from Google Drive, by `gdown ID -O FILE`:
  1EgHdxQ_YxqIQlvvq5iKlCrkEKR6-j0Ib  items_shuffle_1000.json   1,000 products
  1IduG0xl544V_A_jv3tHXC0kyFi7PnyBu  items_ins_v2_1000.json    their attributes
  1A2whVgOO0euk5O13n2iYDM0bQRkkRduB  items_shuffle.json        all products (webshop.catalogue = "full")
  1s2j6NgHljiZzQNL3veZaAiyW_qDEgBNi  items_ins_v2.json         their attributes
  14Kb5SPBk_jfdLZ_CDBNitW98QLDlKR5O  items_human_ins.json      instructions by people (webshop.goals = "human")"""
SEARCH = """\
Questions and documents of Search-R1 (arXiv 2503.09516), from Hugging Face, into one folder, by
`hf download NAME --repo-type dataset --local-dir ~/.cache/search`:
  PeterJinGo/nq_hotpotqa_train  train.parquet (NQ and HotpotQA) and test.parquet (seven sets)
  PeterJinGo/wiki-18-corpus     wiki-18.jsonl.gz, Wikipedia of 2018: gzip -d, 14 GB
  PeterJinGo/wiki-18-e5-index   part_aa, part_ab, for dense retrieval: cat part_* > e5_Flat.index"""
CORPORA = ("corpus.jsonl", "wiki-18.jsonl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("env", choices=["alfworld", "webshop", "search"], help="the environment whose files are meant")
    parser.add_argument("--dir", type=Path, help="their folder (default: ~/.cache/ENV; alfworld: $ALFWORLD_DATA first)")
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--download", action="store_true", help="alfworld: get the games with alfworld's own command")
    task.add_argument("--generate", type=int, metavar="N", help="write N games, products or entities to --out")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for what is generated")
    parser.add_argument("--seed", type=int, default=0, help="seed of what is generated (default: %(default)s)")
    parser.add_argument("--difficulty", choices=DIFFICULTIES, default="full", help="alfworld: size of generated games")
    parser.add_argument("--corpus", type=Path, help=f"search: the documents (default: DIR/{' or DIR/'.join(CORPORA)})")


def run(args: argparse.Namespace) -> int:
    """Do what `args` ask and print what the folder holds.

    Raises:
        UserError: nothing is there, a file is damaged, or the options do not fit together.
    """
    if args.env == "alfworld":
        return alfworld.run(args)
    folder: Path = (args.dir or Path.home() / ".cache" / args.env).expanduser()
    if args.download:
        raise UserError(f"paw data {args.env}: --download is for alfworld; `paw data {args.env}` says where to get it")
    if (args.generate is None) != (args.out is None) or (args.generate is not None and args.generate < 20):
        raise UserError(f"paw data {args.env}: --generate takes a number from 20 on, and --out DIR to write to")
    generate, report = (_generate_shop, _report_shop) if args.env == "webshop" else (_generate_world, _report_search)
    if args.generate is not None:
        folder = args.out
        try:
            folder.mkdir(parents=True, exist_ok=True)
            generate(folder, args.generate, args.seed)
        except OSError as error:
            raise UserError(f"--out {folder}: cannot be written: {error.strerror or error}") from None
    report(folder, args.corpus)
    return 0


def _generate_shop(folder: Path, products: int, seed: int) -> None:
    from paw.envs.webshop import generator

    generator.write(folder, products, seed)


def _report_shop(folder: Path, _: object) -> None:
    from paw.envs.webshop import catalogue

    choices = [
        WebshopConfig(catalogue=size, goals=goals) for size in ("small", "full") for goals in ("synthetic", "human")
    ]
    there = {"small": folder / "items_shuffle_1000.json", "full": folder / "items_shuffle.json"}
    choices = [c for c in choices if there[c.catalogue].is_file()]
    if not choices:
        print(WEBSHOP)
        raise UserError(f"--dir {folder} has none of WebShop's products; the places above have them")
    for choice in choices:
        if choice.goals == "synthetic" or (folder / catalogue.HUMAN).is_file():
            made = catalogue.load(folder, choice)
            train = len(made.goals) - made.n_test
            counts = f"{len(made.products):,} products, {made.n_test:,} goals to test, {train:,} to train"
            print(f"{choice.catalogue:<6} {choice.goals:<10} {counts}, sha256 {made.digest[:16]}")
    keys = ("", " --env.catalogue full")[all(choice.catalogue == "full" for choice in choices)]
    print(f"use them with --env.data {folder}{keys}")


def _generate_world(folder: Path, entities: int, seed: int) -> None:
    from paw.envs.search.world import World, split

    world = World(entities, seed=seed)
    questions = split([world])
    _write(folder / CORPORA[0], ({"id": name, "contents": contents} for name, contents in world.documents))
    for name in ("train", "test"):
        rows = ({"question": q.text, "golden_answers": q.answers, "data_source": kind} for kind, q in questions[name])
        _write(folder / f"{name}.jsonl", rows)


def _report_search(folder: Path, corpus: Path | None) -> None:
    from paw.envs.search import data
    from paw.envs.search.retrieval.corpus import Corpus

    splits = [split for split in ("train", "test") if data.candidates(folder, split)]
    if not splits:
        print(SEARCH)
        raise UserError(f"--dir {folder} has neither train nor test questions; the places above have them")
    for split in splits:
        path = data.find_file(folder, split)
        tasks = data.load(path)
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in Counter(task.kind for task in tasks).items())
        print(f"{split:<6} {len(tasks):,} questions ({kinds}), sha256 {data.digest(path)}")
    corpus = corpus or next((folder / name for name in CORPORA if (folder / name).is_file()), None)
    if corpus is None:
        print(f"no documents: {folder} has no {' or '.join(CORPORA)}; name them with --corpus")
        return
    print(f"corpus {len(Corpus(corpus)):,} documents in {corpus}")
    print(f"use them with --env.data {folder} --env.corpus {corpus}")


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
