"""What encoding prompts costs on a CPU core.

    python bench/trainer/host_time.py [--repeats 5]

Prompts have ALFWorld's sizes (`paw.tools.plan.plan.Play`). They are text of docs/, encoded by a
byte-level BPE of 32,000 tokens that is trained on it, as no pretrained tokenizer is at hand. Writes
bench/results/host_cpu.csv. HOST_S of `paw plan` is the median, plus the rest of the host's part of
an update (`bench/trainer/host_part.py`).
"""

import argparse
import random
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, ROOT, cpu_name, write
from paw.config.recipe import load
from paw.tools.plan.plan import Play

CONFIG = load("alfworld-gigpo-paw")


def make_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=32_000, show_progress=False)
    )
    return tokenizer


def make_prompts(tokenizer: Tokenizer, text: str, play: Play) -> list[str]:
    """As many prompts as an update has, each of about `play.prompt` tokens of the text."""
    rng = random.Random(0)
    episodes = CONFIG.rollout.tasks * CONFIG.rollout.group_size
    characters_per_token = len(text) / len(tokenizer.encode(text))
    size = round(play.prompt * characters_per_token)
    prompts: list[str] = []
    for _ in range(episodes * round(play.turns)):
        start = rng.randrange(len(text) - size)
        prompts.append(text[start : start + size])
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    tokenizer = make_tokenizer(texts)
    prompts = make_prompts(tokenizer, "".join(texts), Play.of(CONFIG))

    rows = []
    for repeat in range(repeats):
        start = time.process_time()
        tokens = sum(len(tokenizer.encode(prompt)) for prompt in prompts)
        encode_s = time.process_time() - start
        row = {
            "date": datetime.now(UTC).date(),
            "cpu": cpu_name(),
            "torch": torch.__version__,
            "repeat": repeat,
            "tokens": tokens,
            "encode_us": round(1e6 * encode_s / tokens, 4),
        }
        print(row, flush=True)
        rows.append(row)
    write(RESULTS / "host_cpu.csv", rows)
    print(f"{median(row['encode_us'] for row in rows):.2f} us a token")


if __name__ == "__main__":
    main()
