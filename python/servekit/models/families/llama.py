"""Llama 2 and 3, SmolLM and others of their shape (https://arxiv.org/abs/2302.13971).

In GGUF files Mistral's models go by this name too.
"""

from __future__ import annotations

from servekit.models.decoder import DecoderConfig, Family
from servekit.models.gguf_file import GgufFile


def _from_gguf(file: GgufFile) -> DecoderConfig:
    window = file.metadata.get("llama.attention.sliding_window")
    return DecoderConfig.from_gguf(file, windows=(window,) * file.metadata["llama.block_count"] if window else ())


FAMILY = Family(
    architectures=("LlamaForCausalLM",),
    gguf=("llama",),
    from_gguf=_from_gguf,
    interleaved=True,
)
