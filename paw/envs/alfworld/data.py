"""`paw data alfworld`: find, download or generate games, and index them.

The official games come through the alfworld package's own download command; a generated folder has the same layout
(json_2.1.1/<split>/<task>/<trial>/game.tw-pddl), so alfworld itself can play it too.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from paw.envs.alfworld import generator, index
from paw.envs.alfworld.problem import KINDS
from paw.errors import UserError

GENERATED = {"train": "train", "valid_unseen": "unseen"}
"""Split folder -> stream of the generator; the two share no game."""


def run(args: argparse.Namespace) -> int:
    """Do what `args` ask, then index the folder and print what it holds.

    Raises:
        UserError: there are no games, the download failed, or the options do not fit together.
    """
    folder: Path = args.dir or Path(os.environ.get("ALFWORLD_DATA") or Path.home() / ".cache" / "alfworld")
    if args.generate is not None:
        if args.out is None or args.generate < 1:
            raise UserError("paw data: --generate takes a number of games from 1 on, and --out DIR to write them to")
        folder = args.out
        generate(folder, args.generate, seed=args.seed, difficulty=args.difficulty)
    elif args.out is not None:
        raise UserError("paw data: --out belongs to --generate N; --dir names the folder of existing games")
    elif args.download:
        download(folder)
    report(folder)
    return 0


def generate(folder: Path, count: int, *, seed: int, difficulty: str) -> None:
    """Write `count` training games and a tenth as many unseen ones, of which training has none."""
    try:
        for split, stream in GENERATED.items():
            number = count if split == "train" else max(1, count // 10)
            for game in generator.games(stream, 0, number, seed=seed, difficulty=difficulty):
                generator.write(game, folder / index.FOLDER / split)
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written: {error.strerror or error}") from None


def download(folder: Path) -> None:
    """Run alfworld-download; its output goes to the terminal."""
    beside = Path(sys.executable).with_name("alfworld-download")
    command = str(beside) if beside.is_file() else shutil.which("alfworld-download")
    if command is None:
        raise UserError("alfworld-download is not installed: pip install 'paw-trainer[alfworld]'")
    status = subprocess.run([command, "--data-dir", str(folder)], check=False).returncode
    if status != 0:
        raise UserError(f"alfworld-download failed with exit code {status}; its own message is above")


def report(folder: Path) -> None:
    """Index `folder` and print games per split and kind, and the line that uses them."""
    root = index.find_root(folder, origin="--dir")
    for split in index.SPLITS:
        if (root / split).is_dir():
            found = index.load_split(root, split)
            kinds = Counter(kind for _, kind in found.games)
            shares = ", ".join(f"{kind} {kinds[kind]}" for kind in KINDS if kinds[kind])
            print(f"{split:<12} {len(found.games):>5} games ({shares}), sha256 {found.digest[:16]}")
    print(f"use them with --env.data {folder}")
