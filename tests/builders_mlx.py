"""MLX folders for tests: config.json, tokenizer and safetensors, made from a llama GGUF file.

Knows: how llama.cpp stores a llama model, how mlx_lm wants it, the safetensors format
(https://github.com/huggingface/safetensors, README: length, JSON header, data).
Must not know: mlx, or how kldtui reads such a folder.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL, _USER_DEFINED = 3, 4


def write_mlx_folder(model: Path, folder: Path) -> Path:
    """The llama model of a GGUF file as an MLX folder, dequantized to float32."""
    folder.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(model)
    config = _config(reader)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(reader)), encoding="utf-8")
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    says = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(says))
    heads = (config["num_attention_heads"], config["num_key_value_heads"])
    write_safetensors(folder / "model.safetensors", dict(_weights(reader, *heads)))
    return folder


def _config(reader: gguf.GGUFReader) -> dict[str, Any]:
    def value(key: str) -> Any:
        return reader.fields[key].contents()

    names = {tensor.name for tensor in reader.tensors}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": value("llama.embedding_length"),
        "num_hidden_layers": value("llama.block_count"),
        "intermediate_size": value("llama.feed_forward_length"),
        "num_attention_heads": value("llama.attention.head_count"),
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "rms_norm_eps": value("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": value("llama.rope.freq_base"),
        "max_position_embeddings": value("llama.context_length"),
        "vocab_size": value("llama.vocab_size"),
        "tie_word_embeddings": "output.weight" not in names,
        "torch_dtype": "float32",
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
    }


def _weights(
    reader: gguf.GGUFReader, n_head: int, n_head_kv: int
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for tensor in reader.tensors:
        data = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            if parts[2] in ("attn_q", "attn_k"):
                data = _unpermuted(data, n_head if parts[2] == "attn_q" else n_head_kv)
            yield f"model.layers.{parts[1]}.{_OF_A_LAYER[parts[2]]}.weight", data
        else:
            yield _NAMES[tensor.name], data


def _unpermuted(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """The inverse of `permute` in llama.cpp's conversion: its RoPE takes neighbouring pairs of
    rows, everybody else's the two halves of a head."""
    pairs = rows.shape[0] // heads // 2
    return rows.reshape(heads, pairs, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write_safetensors(path: Path, tensors: Mapping[str, NDArray[np.float32]]) -> Path:
    """A file of float32 tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for name, data in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(data.shape),
            "data_offsets": [at, at + data.nbytes],
        }
        at += data.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for data in tensors.values():
            file.write(np.ascontiguousarray(data, "<f4").tobytes())
    return path


def tokenizer_json(reader: gguf.GGUFReader) -> dict[str, Any]:
    """The tokenizer.json of a GGUF file whose tokenizer is a byte-level BPE that splits digits."""
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    types = reader.fields["tokenizer.ggml.token_type"].contents()
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": id, "content": token, "special": types[id] == _CONTROL, **flags}
            for id, token in enumerate(tokens)
            if types[id] in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "add_prefix_space": False},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": [
                line.split(" ") for line in reader.fields["tokenizer.ggml.merges"].contents()
            ],
        },
    }
