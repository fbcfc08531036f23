"""The quickstart model: a phrase tokenizer learnt from the environment's own text, and a small random Qwen3.

Whole phrases are tokens ("go to shelf 1", " mug 1", " you see a"), because copying object ids token
by token is what a tiny model learns last (docs/quickstart.md). Everything is saved in ordinary
Hugging Face format, loads with AutoTokenizer / AutoModelForCausalLM and in vLLM, and any text still
encodes without loss: unknown pieces fall back to bytes.
"""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from paw.config import WarmupConfig

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|user|>' if message['role'] == 'user' else '<|assistant|>' }}{{ message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ENTITY = r" ?[a-z]+ \d+"
"""A numbered thing, "mug 1"."""
LABEL = r"\n?[a-z]+:"
"""What opens a section of the prompt, "task:"."""
WORD = r" ?[A-Za-z']+| ?\d+|\s|[^\sA-Za-z\d]"


def phrases(observations: Iterable[str]) -> list[str]:
    """The text between numbered things, if there three times: "You arrive at", ", and a", ...

    Longest first.
    """
    seen: Counter[str] = Counter()
    for text in observations:
        for line in text.splitlines():
            if re.search(ENTITY, line):
                seen.update(part for part in re.split(ENTITY, line) if part)
    return sorted((part for part, n in seen.items() if n >= 3), key=lambda part: (-len(part), part))


def build_tokenizer(
    prompts: list[str], actions: set[str], observations: list[str]
) -> PreTrainedTokenizerFast:
    """A lossless tokenizer whose tokens are actions, numbered things, recurring phrases, words and bytes.

    `actions` are whole lines, each with the line break before it, that must become one token each.
    """
    verbs = sorted({re.escape(action.split()[0]) for action in actions})
    whole_line = [rf"\n(?:{'|'.join(verbs)})(?: [^\n]*)?(?![^\n])"] if verbs else []
    known = [re.escape(part) for part in phrases(observations)]
    pattern = "|".join([*whole_line, LABEL, ENTITY, *known, WORD])
    splitter = re.compile(pattern)
    pieces: set[str] = set(actions)
    for text in [*prompts, *observations]:
        pieces.update(splitter.findall(text))
    vocabulary = [
        PAD,
        USER,
        ASSISTANT,
        END,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *sorted(pieces),
    ]
    ids = {piece: i for i, piece in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (PAD, USER, ASSISTANT, END)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast, config: WarmupConfig) -> Qwen3ForCausalLM:
    """A random Qwen3 with tied embeddings. Head size 32 is the smallest that vLLM serves.

    Not Qwen2: transformers 5 gives every folder of model type qwen2 the pre-tokenizer of Qwen2,
    whatever its tokenizer.json says, so AutoTokenizer would silently cut the text differently.
    """
    torch.manual_seed(config.seed)
    heads, ids = config.hidden_size // config.head_size, tokenizer.get_vocab()
    shape = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=config.head_size,
        max_position_embeddings=2048,
        initializer_range=config.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ids[END],
        pad_token_id=ids[PAD],
        use_cache=False,
    )
    return Qwen3ForCausalLM(shape)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
