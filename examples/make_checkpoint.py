"""Writes a small random DeepSeek checkpoint in the real Hugging Face format.

    python examples/make_checkpoint.py DIR [--model v2|v3|v3.2|v4] [--dtype bfloat16|float32] [--fp8] [--tied]
                                           [--seed N]

It has config.json, sharded safetensors with their index, a byte-level tokenizer.json, tokenizer_config.json,
generation_config.json; and prompts.txt, something to say to it. The attention has DeepSeek's own head dimensions (128 +
64 and 128 over a latent of 512, or V4's 512), its indexers and compressors, and the experts their model's routing; the
rest is small enough for a laptop. It needs only numpy and ml_dtypes, which jax brings.

The model knows nothing. In its output projection all rows but those of whole words are 0 (with --tied: small), so that
its output can at least be read. --fp8 isn't for v4.
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
""".split()  # noqa: SIM905 (a list of 130 quoted words reads worse)

PROMPTS = """\
the river runs to the
when the moon is high the wolf sings and the wind holds
one token at a time the model reads the cache, one page at a time the kernel reads the table, and
attention
"""

BOS, EOS = "<|begin_of_sentence|>", "<|end_of_sentence|>"
FP8_BLOCK = 128
SHARD_BYTES = 8 << 20

MODELS = ("v2", "v3", "v3.2", "v4")
Tensors = Iterator[tuple[str, np.ndarray]]

_SAFETENSORS_NAMES = {"bfloat16": "BF16", "float32": "F32", "float8_e4m3fn": "F8_E4M3", "int64": "I64"}


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


def shared_fields(vocab_size: int, dtype: str, tied: bool) -> dict:
    """The fields of config.json that every model has; V2 replaces two of them."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "q_lora_rank": 192,
        "qk_rope_head_dim": 64,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "bos_token_id": vocab_size - 2,
        "eos_token_id": vocab_size - 1,
    }


def make_config(vocab_size: int, dtype: str, tied: bool, fp8: bool, model: str = "v3") -> dict:
    """A config.json with one model's attention and routing, everything else small."""
    if model == "v4":
        return make_v4_config(vocab_size, dtype, tied)
    config = shared_fields(vocab_size, dtype, tied) | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "intermediate_size": 768,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_key_value_heads": 8,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
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
    }
    if model == "v2":
        config |= {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
        }
    if model == "v3.2":
        indexer = {"index_n_heads": 16, "index_head_dim": 128, "index_topk": 64}
        config |= {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", **indexer}
    if fp8:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        }
    return config


def make_v4_config(vocab_size: int, dtype: str, tied: bool) -> dict:
    """A config.json with DeepSeek-V4's attention, residual streams and routing, everything else small."""
    return shared_fields(vocab_size, dtype, tied) | {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "num_key_value_heads": 1,
        "head_dim": 512,
        "o_groups": 2,
        "o_lora_rank": 128,
        "sliding_window": 128,
        "compress_ratios": [0, 4, 128, 4],
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 64,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "num_hash_layers": 1,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "max_position_embeddings": 1048576,
    }


class Source:
    """Random matrices, norms and other tensors of a model, f32, one after the other."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def linear(self, out_features: int, in_features: int) -> np.ndarray:
        values = self.rng.standard_normal((out_features, in_features), dtype=np.float32)
        return values / np.float32(in_features**0.5)

    def norm(self, features: int) -> np.ndarray:
        return 1 + 0.1 * self.small(features)

    def small(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape, dtype=np.float32)

    def embedding(self, config: dict, words: list[int]) -> np.ndarray:
        embedding = self.small(config["vocab_size"], config["hidden_size"])
        if config["tie_word_embeddings"]:
            spoken = np.isin(np.arange(config["vocab_size"]), words)
            embedding[~spoken] *= 0.05
        return embedding

    def head(self, config: dict, words: list[int]) -> np.ndarray:
        """Only words have rows that are not 0."""
        head = np.zeros((config["vocab_size"], config["hidden_size"]), dtype=np.float32)
        head[words] = self.linear(len(words), config["hidden_size"]) * 4
        return head


def weights(config: dict, words: list[int], seed: int) -> Tensors:
    """All tensors by their names in the checkpoints of the config's model, in the order of the layers."""
    source = Source(seed)
    return (
        v4_weights(config, words, source)
        if config["model_type"] == "deepseek_v4"
        else v3_weights(config, words, source)
    )


def v3_weights(config: dict, words: list[int], source: Source) -> Tensors:
    """The tensors of V2-Lite, V3 and V3.2, under the names Hugging Face has for them. V2-Lite's queries have no low
    rank, and its router has no bias; V3.2 has an indexer in every layer."""
    linear, norm = source.linear, source.norm

    def mlp(prefix: str, width: int) -> Tensors:
        yield f"{prefix}.gate_proj.weight", linear(width, hidden)
        yield f"{prefix}.up_proj.weight", linear(width, hidden)
        yield f"{prefix}.down_proj.weight", linear(hidden, width)

    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    latent, q_lora = config["kv_lora_rank"], config["q_lora_rank"]

    yield "model.embed_tokens.weight", source.embedding(config, words)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", norm(hidden)
        if q_lora is None:
            yield f"{prefix}.self_attn.q_proj.weight", linear(heads * (nope + rope), hidden)
        else:
            yield f"{prefix}.self_attn.q_a_proj.weight", linear(q_lora, hidden)
            yield f"{prefix}.self_attn.q_a_layernorm.weight", norm(q_lora)
            yield f"{prefix}.self_attn.q_b_proj.weight", linear(heads * (nope + rope), q_lora)
        yield f"{prefix}.self_attn.kv_a_proj_with_mqa.weight", linear(latent + rope, hidden)
        yield f"{prefix}.self_attn.kv_a_layernorm.weight", norm(latent)
        yield f"{prefix}.self_attn.kv_b_proj.weight", linear(heads * (nope + value), latent)
        yield f"{prefix}.self_attn.o_proj.weight", linear(hidden, heads * value)
        if config["model_type"] == "deepseek_v32":
            index_heads, width = config["index_n_heads"], config["index_head_dim"]
            yield f"{prefix}.self_attn.indexer.wq_b.weight", linear(index_heads * width, q_lora)
            yield f"{prefix}.self_attn.indexer.wk.weight", linear(width, hidden)
            yield f"{prefix}.self_attn.indexer.k_norm.weight", norm(width)
            yield f"{prefix}.self_attn.indexer.k_norm.bias", 0.1 * source.small(width)
            yield f"{prefix}.self_attn.indexer.weights_proj.weight", linear(index_heads, hidden)
        yield f"{prefix}.post_attention_layernorm.weight", norm(hidden)
        if layer < config["first_k_dense_replace"]:
            yield from mlp(f"{prefix}.mlp", config["intermediate_size"])
            continue
        experts = config["n_routed_experts"]
        yield f"{prefix}.mlp.gate.weight", linear(experts, hidden)
        if config["topk_method"] == "noaux_tc":
            yield f"{prefix}.mlp.gate.e_score_correction_bias", 0.1 * source.small(experts)
        for expert in range(experts):
            yield from mlp(f"{prefix}.mlp.experts.{expert}", config["moe_intermediate_size"])
        yield from mlp(f"{prefix}.mlp.shared_experts", config["moe_intermediate_size"] * config["n_shared_experts"])
    yield "model.norm.weight", norm(hidden)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", source.head(config, words)


def v4_weights(config: dict, words: list[int], source: Source) -> Tensors:
    """The tensors of V4, under the names DeepSeek's own checkpoints have for them."""
    linear, norm, small = source.linear, source.norm, source.small
    hidden, heads, width = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    q_lora, groups, o_lora = config["q_lora_rank"], config["o_groups"], config["o_lora_rank"]
    experts, top_k, streams = config["n_routed_experts"], config["num_experts_per_tok"], config["hc_mult"]

    def compressor(prefix: str, ratio: int, width: int) -> Tensors:
        columns = 2 * width if ratio == 4 else width
        yield f"{prefix}.wkv.weight", linear(columns, hidden)
        yield f"{prefix}.wgate.weight", linear(columns, hidden)
        yield f"{prefix}.ape", small(ratio, columns)
        yield f"{prefix}.norm.weight", norm(width)

    def mix(prefix: str, rows: int, scales: int) -> Tensors:
        yield f"{prefix}_fn", linear(rows, streams * hidden)
        yield f"{prefix}_base", 0.3 * small(rows)
        yield f"{prefix}_scale", 1 + 0.1 * small(scales)

    def mlp(prefix: str) -> Tensors:
        inner = config["moe_intermediate_size"]
        yield f"{prefix}.w1.weight", linear(inner, hidden)
        yield f"{prefix}.w2.weight", linear(hidden, inner)
        yield f"{prefix}.w3.weight", linear(inner, hidden)

    yield "embed.weight", source.embedding(config, words)
    for layer, ratio in enumerate(config["compress_ratios"][: config["num_hidden_layers"]]):
        prefix = f"layers.{layer}"
        yield f"{prefix}.attn_norm.weight", norm(hidden)
        yield from mix(f"{prefix}.hc_attn", (2 + streams) * streams, 3)
        yield f"{prefix}.attn.wq_a.weight", linear(q_lora, hidden)
        yield f"{prefix}.attn.q_norm.weight", norm(q_lora)
        yield f"{prefix}.attn.wq_b.weight", linear(heads * width, q_lora)
        yield f"{prefix}.attn.wkv.weight", linear(width, hidden)
        yield f"{prefix}.attn.kv_norm.weight", norm(width)
        yield f"{prefix}.attn.attn_sink", small(heads)
        yield f"{prefix}.attn.wo_a.weight", linear(groups * o_lora, heads * width // groups)
        yield f"{prefix}.attn.wo_b.weight", linear(hidden, groups * o_lora)
        if ratio:
            yield from compressor(f"{prefix}.attn.compressor", ratio, width)
        if ratio == 4:
            index_heads, index_width = config["index_n_heads"], config["index_head_dim"]
            yield from compressor(f"{prefix}.attn.indexer.compressor", ratio, index_width)
            yield f"{prefix}.attn.indexer.wq_b.weight", linear(index_heads * index_width, q_lora)
            yield f"{prefix}.attn.indexer.weights_proj.weight", linear(index_heads, hidden)
        yield f"{prefix}.ffn_norm.weight", norm(hidden)
        yield from mix(f"{prefix}.hc_ffn", (2 + streams) * streams, 3)
        yield f"{prefix}.ffn.gate.weight", linear(experts, hidden)
        if layer < config["num_hash_layers"]:
            table = np.argsort(source.rng.random((config["vocab_size"], experts)), axis=1)[:, :top_k]
            yield f"{prefix}.ffn.gate.tid2eid", table
        else:
            yield f"{prefix}.ffn.gate.bias", 0.1 * small(experts)
        for expert in range(experts):
            yield from mlp(f"{prefix}.ffn.experts.{expert}")
        yield from mlp(f"{prefix}.ffn.shared_experts")
    yield from mix("hc_head", streams, 1)
    yield "norm.weight", norm(hidden)
    if not config["tie_word_embeddings"]:
        yield "head.weight", source.head(config, words)


def quantize_blocks(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """e4m3 weights and one f32 scale per 128 x 128 block, as DeepSeek-V3 stores them (weight = e4m3 * scale)."""
    rows, cols = (-(-size // FP8_BLOCK) for size in weight.shape)
    padded = np.zeros((rows * FP8_BLOCK, cols * FP8_BLOCK), np.float32)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.reshape(rows, FP8_BLOCK, cols, FP8_BLOCK)
    scale = np.maximum(np.abs(blocks).max(axis=(1, 3)), 1e-12) / 448
    quantized = (blocks / scale[:, None, :, None]).reshape(padded.shape)[: weight.shape[0], : weight.shape[1]]
    return quantized.astype(ml_dtypes.float8_e4m3fn), scale.astype(np.float32)


def stored(tensors: Tensors, dtype: str, fp8: bool) -> Tensors:
    """The tensors in the dtypes that a checkpoint stores: tables as they are, f32 for routers' biases and for what V4
    computes with in f32, e4m3 for projections if `fp8`, and `dtype` for all others."""
    f32 = ("e_score_correction_bias", "gate.bias", "attn_sink", ".ape", "_fn", "_base", "_scale")
    for name, value in tensors:
        if name.endswith(f32) or value.dtype == np.int64:
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


def write_shards(directory: Path, tensors: Tensors) -> int:
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
    directory: Path,
    *,
    model: str = "v3",
    dtype: str = "bfloat16",
    fp8: bool = False,
    tied: bool = False,
    seed: int = 0,
) -> int:
    """Writes the checkpoint; returns the bytes of its tensors.

    Args:
      directory: made if it is not there; files of the same names are replaced.
      model: "v2" (as V2-Lite), "v3", "v3.2" or "v4".
      dtype: "bfloat16" or "float32".
      fp8: store the projections as e4m3 with one scale per 128 x 128 block; not for v4.
      tied: no lm_head; the embedding is the output projection.
      seed: the seed of all random weights.

    Raises:
      ValueError: fp8 with model "v4".
    """
    if fp8 and model == "v4":
        raise ValueError("fp8: got True with model 'v4'; legal: False, as its checkpoints have formats of their own")
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer, words = make_tokenizer()
    vocab_size = len(tokenizer["model"]["vocab"]) + len(tokenizer["added_tokens"])
    config = make_config(vocab_size, dtype, tied, fp8, model)
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
    parser = argparse.ArgumentParser(description="Write a small random DeepSeek checkpoint.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", choices=MODELS, default="v3")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--fp8", action="store_true", help="block-scaled e4m3 projections, as DeepSeek-V3 has them")
    parser.add_argument("--tied", action="store_true", help="the embedding is the output projection")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.fp8 and args.model == "v4":
        parser.error("--fp8 is not for --model v4")
    options = {"dtype": args.dtype, "fp8": args.fp8, "tied": args.tied, "seed": args.seed}
    total = make_checkpoint(args.directory, model=args.model, **options)
    print(f"{args.directory}: {total / 1e6:.1f} MB of random weights")


if __name__ == "__main__":
    main()
