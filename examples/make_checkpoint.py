"""Writes a small random DeepSeek-V3 checkpoint in the real Hugging Face format.

    python examples/make_checkpoint.py DIR [--dtype bfloat16|float32] [--fp8] [--tied] [--seed N]

config.json, sharded safetensors with their index, a byte-level tokenizer.json, generation_config.json; and prompts.txt,
something to say to it. The attention has DeepSeek's own head dimensions (128 + 64 and 128 over a latent of 512) and the
experts V3's routing; the rest is small enough for a laptop. It needs numpy and ml_dtypes alone, which jax brings.

The model knows nothing. Only whole words have rows in its output projection, so that what it says can at least be read.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

WORDS = """
a the of to and in is it that with for on as at by from one two many few some each every all no not only also
attention latent cache page token head query key value layer expert router model kernel block table score mask
sun moon river stone wind rain snow leaf tree bird fish wolf night morning winter summer light shadow fire
water small large old new quiet bright cold warm slow quick deep high long short first last same other open
hidden runs reads writes sees keeps finds turns falls grows waits holds moves sings shines returns begins ends
opens we you they he she who what when where why how then now here there again always never soon still . , ; :
! ?
""".split()  # noqa: SIM905 (a list of 140 quoted words reads worse)

PROMPTS = """\
the river runs to the
when the moon is high the wolf sings and the wind holds
one token at a time the model reads the cache, one page at a time the kernel reads the table, and
attention
"""

BOS, EOS = "<|begin_of_sentence|>", "<|end_of_sentence|>"
FP8_BLOCK = 128
SHARD_BYTES = 8 << 20

_SAFETENSORS_NAMES = {"bfloat16": "BF16", "float32": "F32", "float8_e4m3fn": "F8_E4M3"}


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def make_tokenizer() -> tuple[dict, list[int]]:
    """A tokenizer.json: all bytes, and the words with the space before them, merged from left to right.

    Returns the parsed file and the ids of the whole words.
    """
    alphabet = byte_alphabet()
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    merges: list[list[str]] = []
    words = []
    for word in WORDS:
        text = word if word in ".,;:!?" else alphabet[ord(" ")] + word
        for end in range(2, len(text) + 1):
            if text[:end] not in vocabulary:
                vocabulary[text[:end]] = len(vocabulary)
                merges.append([text[: end - 1], text[end - 1]])
        words.append(vocabulary[text])
    special = [
        {"id": len(vocabulary) + i, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for i, content in enumerate((BOS, EOS))
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
    return tokenizer, words


def make_config(vocab_size: int, dtype: str, tied: bool, fp8: bool) -> dict:
    """A config.json with DeepSeek-V3's attention and routing, everything else small."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "intermediate_size": 768,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 192,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "max_position_embeddings": 163840,
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "bos_token_id": vocab_size - 2,
        "eos_token_id": vocab_size - 1,
    }
    if fp8:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        }
    return config


def weights(config: dict, words: list[int], seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """All tensors by their Hugging Face names, f32, in the order of the layers."""
    rng = np.random.default_rng(seed)

    def linear(out_features: int, in_features: int) -> np.ndarray:
        return rng.standard_normal((out_features, in_features), dtype=np.float32) / np.float32(in_features**0.5)

    def norm(features: int) -> np.ndarray:
        return 1 + 0.1 * rng.standard_normal(features, dtype=np.float32)

    def mlp(prefix: str, width: int) -> Iterator[tuple[str, np.ndarray]]:
        yield f"{prefix}.gate_proj.weight", linear(width, hidden)
        yield f"{prefix}.up_proj.weight", linear(width, hidden)
        yield f"{prefix}.down_proj.weight", linear(hidden, width)

    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    latent, q_lora = config["kv_lora_rank"], config["q_lora_rank"]

    embedding = rng.standard_normal((config["vocab_size"], hidden), dtype=np.float32)
    if config["tie_word_embeddings"]:
        spoken = np.isin(np.arange(config["vocab_size"]), words)
        embedding[~spoken] *= 0.05
    yield "model.embed_tokens.weight", embedding
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", norm(hidden)
        yield f"{prefix}.self_attn.q_a_proj.weight", linear(q_lora, hidden)
        yield f"{prefix}.self_attn.q_a_layernorm.weight", norm(q_lora)
        yield f"{prefix}.self_attn.q_b_proj.weight", linear(heads * (nope + rope), q_lora)
        yield f"{prefix}.self_attn.kv_a_proj_with_mqa.weight", linear(latent + rope, hidden)
        yield f"{prefix}.self_attn.kv_a_layernorm.weight", norm(latent)
        yield f"{prefix}.self_attn.kv_b_proj.weight", linear(heads * (nope + value), latent)
        yield f"{prefix}.self_attn.o_proj.weight", linear(hidden, heads * value)
        yield f"{prefix}.post_attention_layernorm.weight", norm(hidden)
        if layer < config["first_k_dense_replace"]:
            yield from mlp(f"{prefix}.mlp", config["intermediate_size"])
            continue
        experts = config["n_routed_experts"]
        yield f"{prefix}.mlp.gate.weight", linear(experts, hidden)
        yield f"{prefix}.mlp.gate.e_score_correction_bias", 0.1 * rng.standard_normal(experts, dtype=np.float32)
        for expert in range(experts):
            yield from mlp(f"{prefix}.mlp.experts.{expert}", config["moe_intermediate_size"])
        yield from mlp(f"{prefix}.mlp.shared_experts", config["moe_intermediate_size"] * config["n_shared_experts"])
    yield "model.norm.weight", norm(hidden)
    if not config["tie_word_embeddings"]:
        head = np.zeros((config["vocab_size"], hidden), dtype=np.float32)
        head[words] = linear(len(words), hidden) * 4
        yield "lm_head.weight", head


def quantize_blocks(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """e4m3 weights and one f32 scale per 128 x 128 block, as DeepSeek-V3 stores them (weight = e4m3 * scale)."""
    rows, cols = (-(-size // FP8_BLOCK) for size in weight.shape)
    padded = np.zeros((rows * FP8_BLOCK, cols * FP8_BLOCK), np.float32)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.reshape(rows, FP8_BLOCK, cols, FP8_BLOCK)
    scale = np.maximum(np.abs(blocks).max(axis=(1, 3)), 1e-12) / 448
    quantized = (blocks / scale[:, None, :, None]).reshape(padded.shape)[: weight.shape[0], : weight.shape[1]]
    return quantized.astype(ml_dtypes.float8_e4m3fn), scale.astype(np.float32)


def stored(tensors: Iterator[tuple[str, np.ndarray]], dtype: str, fp8: bool) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors in the dtypes a checkpoint stores: the router's bias in f32, projections in e4m3 if wanted."""
    for name, value in tensors:
        if name.endswith("e_score_correction_bias"):
            yield name, value
        elif fp8 and name.endswith(("_proj.weight", "_with_mqa.weight")):
            quantized, scale = quantize_blocks(value)
            yield name, quantized
            yield f"{name}_scale_inv", scale
        else:
            yield name, value.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """One safetensors file: length of the header, the header as JSON, the bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, value in tensors.items():
        end = offset + value.nbytes
        kind = _SAFETENSORS_NAMES[value.dtype.name]
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for value in tensors.values():
            file.write(np.ascontiguousarray(value).tobytes())


def write_shards(directory: Path, tensors: Iterator[tuple[str, np.ndarray]]) -> int:
    """Shards of about SHARD_BYTES and their index; returns the bytes of all tensors."""
    shards: list[dict[str, np.ndarray]] = [{}]
    sizes = [0]
    for name, value in tensors:
        if sizes[-1] and sizes[-1] + value.nbytes > SHARD_BYTES:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = value
        sizes[-1] += value.nbytes
    weight_map = {}
    for index, shard in enumerate(shards, start=1):
        file_name = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(directory / file_name, shard)
        weight_map.update(dict.fromkeys(shard, file_name))
    index_file = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    write_json(directory / "model.safetensors.index.json", index_file)
    return sum(sizes)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def make_checkpoint(
    directory: Path, *, dtype: str = "bfloat16", fp8: bool = False, tied: bool = False, seed: int = 0
) -> int:
    """Writes the checkpoint; returns the bytes of its tensors.

    Args:
      directory: made if it is not there; files of the same names are replaced.
      dtype: "bfloat16" or "float32".
      fp8: store the projections as e4m3 with one scale per 128 x 128 block.
      tied: no lm_head; the embedding is the output projection.
      seed: of all random weights.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer, words = make_tokenizer()
    vocab_size = len(tokenizer["model"]["vocab"]) + len(tokenizer["added_tokens"])
    config = make_config(vocab_size, dtype, tied, fp8)
    total = write_shards(directory, stored(weights(config, words, seed), dtype, fp8))
    write_json(directory / "tokenizer.json", tokenizer)
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    write_json(directory / "tokenizer_config.json", {**tokenizer_config, "add_bos_token": True})
    ids = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    write_json(directory / "generation_config.json", ids)
    (directory / "prompts.txt").write_text(PROMPTS, encoding="utf-8")
    # Last: a directory that has a config.json is complete.
    write_json(directory / "config.json", config)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a small random DeepSeek-V3 checkpoint.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--fp8", action="store_true", help="block-scaled e4m3 projections, as DeepSeek-V3 has them")
    parser.add_argument("--tied", action="store_true", help="the embedding is the output projection")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    total = make_checkpoint(args.directory, dtype=args.dtype, fp8=args.fp8, tied=args.tied, seed=args.seed)
    print(f"{args.directory}: {total / 1e6:.1f} MB of random weights")


if __name__ == "__main__":
    main()
