"""The quickstart model: a small random Qwen3, and a tokenizer learnt from the environment's text.

Whole phrases are tokens ("go to shelf 1", " mug 1", " you see a"), because a tiny model is slowest
to learn copying object ids token by token (docs/quickstart.md). Everything is saved in ordinary
Hugging Face format, and loads with AutoTokenizer / AutoModelForCausalLM and in vLLM. Any text still
encodes without loss, because unknown pieces fall back to bytes.
"""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from paw.config.sections import WarmupConfig

PAD = "<|pad|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"
CHAT_TEMPLATE = (
    "{% if tools %}<|user|>{% for tool in tools %}"
    "{{ (' ' if loop.index0 else '') + tool['function']['name'] }}"
    "{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}"
    "{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}"
    "{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\n' if loop.index0 or message['content'] else '' }}"
    """{{ '<tool_call>\n{"name": "' + call['function']['name'] }}"""
    """{{ '", "arguments": ' + call['function']['arguments'] | tojson }}"""
    "{{ '}\n</tool_call>' }}"
    "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The user's turn shows only the tools' names. So small a model learns from play what they do."""
CALL = r"<tool_call>\n[^\n]*\n</tool_call>"
"""Pattern of a call of a tool, as `Reply.of` writes it."""
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": ASSISTANT,
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}
"""How transformers reads calls in an answer, so that none of vLLM's parsers is needed."""
ENTITY = r" ?[a-z]+ \d+"
"""Pattern of a numbered thing, "mug 1"."""
LABEL = r"\n?[a-z]+:"
"""Pattern of the start of a section of the prompt, "task:"."""
WORD = r" ?[A-Za-z']+| ?\d+|\s|[^\sA-Za-z\d]"
"""Pattern of anything else: a word, a number, a space or a sign."""


def phrases(observations: Iterable[str]) -> list[str]:
    """Return texts between numbered things that occur at least three times, longest first.

    Examples are "You arrive at" and ", and a".
    """
    counts: Counter[str] = Counter()
    for text in observations:
        for line in text.splitlines():
            if re.search(ENTITY, line):
                counts.update(part for part in re.split(ENTITY, line) if part)
    frequent = [phrase for phrase, occurrences in counts.items() if occurrences >= 3]
    return sorted(frequent, key=lambda phrase: (-len(phrase), phrase))


def build_tokenizer(
    prompts: list[str], actions: set[str], observations: list[str]
) -> PreTrainedTokenizerFast:
    """Build a lossless tokenizer. Its tokens are actions, numbered things, phrases, words and
    bytes.

    `actions` that are whole lines, each with the line break before it, become one token each, and
    so do calls of tools.
    """
    # The order matters, because the first pattern that matches at a position is used.
    patterns = []
    has_calls = any(re.search(CALL, action) for action in actions)
    if has_calls:
        patterns.append(CALL)
    verbs = sorted({re.escape(action.split()[0]) for action in actions})
    if verbs:
        patterns.append(rf"\n(?:{'|'.join(verbs)})(?: [^\n]*)?(?![^\n])")  # a line with an action
    patterns += [LABEL, ENTITY]
    patterns += [re.escape(phrase) for phrase in phrases(observations)]
    patterns.append(WORD)
    pattern = "|".join(patterns)

    splitter = re.compile(pattern)
    pieces = set(actions)
    for text in [*prompts, *observations, *sorted(actions)]:
        pieces.update(splitter.findall(text))
    special = [PAD, USER, ASSISTANT, END]
    single_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = [*special, *single_bytes, *sorted(pieces)]
    ids = {piece: i for i, piece in enumerate(vocabulary)}

    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    if has_calls:
        fast.response_template = RESPONSE_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast, config: WarmupConfig) -> Qwen3ForCausalLM:
    """Build a random Qwen3 with tied embeddings. Head size 32 is the smallest that vLLM serves.

    Qwen2 does not work: transformers 5 gives every folder of model type qwen2 the pre-tokenizer of
    Qwen2, whatever its tokenizer.json says. AutoTokenizer would then silently cut the text
    differently.
    """
    torch.manual_seed(config.seed)
    heads = config.hidden_size // config.head_size
    ids = tokenizer.get_vocab()
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
    """Write the model and its tokenizer to `folder`, in Hugging Face format."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
