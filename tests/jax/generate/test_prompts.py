"""Prompts of the command: the special tokens around a text."""

from pathlib import Path
from typing import Any

import pytest

from examples.make_checkpoint import write_json
from tsmla_jax.generate.prompts import Tokenizer, load_tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers: pip install 'tsmla-jax[hf]'")
from tokenizers import processors  # noqa: E402

BOS, EOS, MARK, A, H, LOW_I = range(6)
SPECIAL = [("<bos>", BOS), ("<eos>", EOS), ("<mark>", MARK)]


def backend(processor: Any = None) -> Any:
    vocab = {**dict(SPECIAL), "a": A, "H": H, "i": LOW_I}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    made.add_special_tokens([name for name, _ in SPECIAL])
    if processor is not None:
        made.post_processor = processor
    return made


def template(single: str) -> Any:
    return processors.TemplateProcessing(single=single, special_tokens=SPECIAL)


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("single", [None, "<bos> $A", "<bos> $A <eos>", "$A", "$A <eos>"])
def test_one_token_begins_a_prompt_and_none_ends_it(single: str | None, asked: bool, tmp_path: Path) -> None:
    """As a template of tokenizer.json says, or tokenizer_config.json, or the text, or all of them."""
    backend(single and template(single)).save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", {"bos_token": "<bos>", "add_bos_token": asked})
    encode = load_tokenizer(tmp_path).encode
    begun = asked or (single or "").startswith("<bos>")
    assert encode("Hi") == [BOS, H, LOW_I][not begun :]
    assert encode("") == [BOS][not begun :]
    assert encode("<bos>Hi") == [BOS, H, LOW_I] and encode("<bos>") == [BOS]
    assert encode("<bos><bos>Hi") == [BOS, BOS, H, LOW_I]  # as it was written
    assert encode("Hi<eos>") == [BOS, H, LOW_I, EOS][not begun :]


@pytest.mark.parametrize(
    ("processor", "before"),
    [
        (template("<mark> $A"), [MARK]),
        (template("<bos> <mark> $A <eos>"), [BOS, MARK]),
        (processors.Sequence([processors.ByteLevel(), template("<bos> $A")]), [BOS]),
        (processors.RobertaProcessing(("<eos>", EOS), ("<bos>", BOS)), [BOS]),
        (processors.BertProcessing(("<eos>", EOS), ("<bos>", BOS)), [BOS]),
    ],
)
def test_other_processors(processor: Any, before: list[int]) -> None:
    tokenizer = Tokenizer(backend(processor), None)
    assert tokenizer.encode("Hi") == [*before, H, LOW_I]
    # A text that begins as they do is taken as it stands.
    assert tokenizer.encode(f"{SPECIAL[before[0]][0]}Hi") == [before[0], H, LOW_I]
    assert Tokenizer(backend(template("<mark> $A")), BOS).encode("Hi") == [BOS, MARK, H, LOW_I]


def test_a_prompt_is_neither_cut_nor_filled_up() -> None:
    made = backend()
    made.enable_truncation(3)
    made.enable_padding(length=8)
    assert Tokenizer(made, BOS).encode("HiHiHi") == [BOS, *[H, LOW_I] * 3]
