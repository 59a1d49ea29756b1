"""`GET /model_info`, alias `/get_model_info`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from servekit.http.generation import manager_of

router = APIRouter()


@router.get("/model_info")
@router.get("/get_model_info")
async def model_info(request: Request) -> dict[str, Any]:
    """What is known of the model."""
    config = manager_of(request).config
    model = config.model_info
    return {
        "model_path": model.path,
        "tokenizer_path": model.tokenizer_file,
        "served_model_name": model.name,
        "architecture": model.architecture,
        "is_generation": True,
        "max_model_len": model.max_model_len,
        "vocab_size": model.vocab_size,
        "bos_token_id": model.bos_id,
        "eos_token_ids": model.end_ids,
        "preferred_sampling_params": model.default_sampling or None,
        "has_chat_template": model.chat_template is not None,
    }
