"""Groups of ranks, as processes: whatever the layout, the tokens are those of one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.group_job import load, serve
from tests.unit.llama_reference import save_folder
from tests.unit.tiny_gguf import save_gguf_case
from tests.unit.tiny_models import CASES, tensors

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[2]
_ONE_KV_HEAD = CASES["qwen3"] | {"num_key_value_heads": 1}

LAYOUTS: dict[str, tuple[str, dict[str, int], list[int]]] = {
    "tp2": ("llama", {"tensor": 2}, []),
    "tp2-tied": ("llama-tied", {"tensor": 2}, []),
    "tp2-biases": ("llama-biased", {"tensor": 2}, []),
    "tp2-one-kv-head": ("one-kv-head", {"tensor": 2}, []),
    "tp4-shared-kv-heads": ("qwen2", {"tensor": 4}, []),
    "tp2-gguf": ("gguf", {"tensor": 2}, []),
    "pp2": ("mistral", {"pipeline": 2}, []),
    "pp2-tied": ("llama-tied", {"pipeline": 2}, [1, 2]),
    "pp3": ("qwen3-windows", {"pipeline": 3}, []),
    "tp2-pp2": ("qwen3", {"tensor": 2, "pipeline": 2}, []),
    "tp2-pp2-experts": ("qwen3-moe-mixed", {"tensor": 2, "pipeline": 2, "moe_ep": 2}, []),
    "tp2-experts": ("qwen3-moe", {"tensor": 2}, []),
    "ep2": ("qwen3-moe", {"tensor": 2, "moe_ep": 2}, []),
    "ep2-in-tp4": ("qwen3-moe", {"tensor": 4, "moe_ep": 2}, []),
    "cp2": ("mistral", {"tensor": 2, "attn_cp": 2}, []),
    "cp2-biases": ("llama-biased", {"tensor": 2, "attn_cp": 2}, []),
    "cp2-in-tp4": ("qwen3-windows", {"tensor": 4, "attn_cp": 2}, []),
    "moe-dp2": ("qwen3-moe", {"tensor": 2, "moe_dp": 2}, []),
}
"""Model, sizes and partition of the layers. The vocabulary has 61 tokens, which nothing divides."""


def save(folder: Path, model: str) -> Path:
    if model == "gguf":
        return save_gguf_case(folder / "model.gguf", "llama-linear")
    if (folder / model).exists():
        return folder / model
    config = _ONE_KV_HEAD if model == "one-kv-head" else CASES[model]
    return save_folder(folder / model, config, tensors(config))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank of each layout saw. Four processes play all of them, for each has to load torch."""
    # Sockets have short paths.
    folder = tmp_path_factory.mktemp("g")
    stores = [socket.create_server(("127.0.0.1", 0)) for _ in LAYOUTS]
    jobs = [
        {
            "name": name,
            "model": str(save(folder, model)),
            "sizes": sizes,
            "partition": partition,
            "address": f"127.0.0.1:{store.getsockname()[1]}",
            "listener": store.fileno(),
        }
        for (name, (model, sizes, partition)), store in zip(LAYOUTS.items(), stores, strict=True)
    ]
    (folder / "jobs").write_text(json.dumps(jobs))
    outputs = [folder / f"rank{world}" for world in range(4)]
    ranks = []
    for world, output in enumerate(outputs):
        with output.open("wb") as file:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.unit.group_job", str(folder / "jobs"), str(world)],
                    stdout=file,
                    cwd=ROOT,
                    pass_fds=[store.fileno() for store in stores],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                )
            )
    for store in stores:
        store.close()
    try:
        # Where one fails, the others wait for it.
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            time.sleep(0.02)
        assert not any(rank.returncode for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    told = [json.loads(output.read_text().splitlines()[-1]) for output in outputs]
    return {name: [each[name] for each in told if name in each] for name in LAYOUTS}


@pytest.mark.parametrize("name", LAYOUTS)
def test_tokens_are_those_of_one_process(ran: dict[str, list[dict[str, Any]]], name: str, tmp_path: Path) -> None:
    model, sizes, _ = LAYOUTS[name]
    alone = serve(load(str(save(tmp_path, model)), []), 1)
    leader, *followers = ran[name]
    assert leader["ids"] == {str(rid): ids for rid, ids in alone["ids"].items()}
    assert alone["all free"] and leader["all free"]
    # Every stage has something to do at the same time.
    assert leader["flights"] == sizes.get("pipeline", 1)
    assert len({tuple(rank["sampled"]) for rank in ran[name] if rank["last"]}) == 1
    assert {rank["sampled"][0] for rank in followers} == {leader["sampled"][0]}
