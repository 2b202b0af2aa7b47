"""The recall task's tokenizer in Hugging Face's files, for other programs than generate.py."""

import json
from typing import Any

from .recall import BOS, EOS, SPECIAL, vocabulary

SPACE = "Ġ"  # the letter for a space in tokens of bytes, the kind of tokens that engines know
NAME, NUMBER = f"{SPACE}[a-z]+=", r"\d\d"
BEFORE_NAMES = "(?<![a-z])(?=[a-z])"


def files() -> dict[str, str]:
    """Return the names and the texts of the files. What is no name or number is read as `<s>`."""
    whole = {"tokenizer.json": _tokenizer(), "tokenizer_config.json": _config()}
    return {name: json.dumps(content) + "\n" for name, content in whole.items()}


def _tokenizer() -> dict[str, Any]:
    start = SPECIAL[BOS]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    # Spaces are optional, and a token of a name begins with one.
    spaces = [_replace(r"\s+", ""), _replace(BEFORE_NAMES, SPACE)]
    pattern = {"Regex": f"{NAME}|{NUMBER}"}
    begin = {"SpecialToken": {"id": start, "type_id": 0}}
    texts = [{"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB")]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": text, "special": True} | flags for i, text in enumerate(SPECIAL)
        ],
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "pre_tokenizer": {
            "type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, texts[0]],
            "pair": [begin, *texts],
            "special_tokens": {start: {"id": start, "ids": [BOS], "tokens": [start]}},
        },
        "decoder": {
            "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True
        },
        "model": {
            "type": "WordLevel",
            "vocab": {text.replace(" ", SPACE): i for i, text in enumerate(vocabulary())},
            "unk_token": start,
        },
    }  # fmt: skip


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _config() -> dict[str, Any]:
    start, end = SPECIAL[BOS], SPECIAL[EOS]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": start,
        "eos_token": end,
        "unk_token": start,
        "clean_up_tokenization_spaces": False,
        # A chat is one text: each message goes on where the one before ended.
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
