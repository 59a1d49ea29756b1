"""Runs in the peers' environment: `transformers` in float32 in its own process, no server around it.

python peer_transformers.py DEMO.gguf THREADS      prints one JSON object: name of a figure to its value
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def best(run: Callable[[], float], times: int = 3) -> float:
    return max(run() for _ in range(times))


def main() -> None:
    path, threads = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, torch_dtype=torch.float32).eval()

    def generate(rows: int, length: int, new: int) -> float:
        """Seconds of a whole job."""
        ids = torch.randint(1000, 45000, (rows, length))
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, min_new_tokens=new
            )
        return time.perf_counter() - began

    generate(1, 16, 2)
    figures = {"batch16_256_64_output_tokens_per_s": 16 * 64 / generate(16, 256, 64)}
    for rows, new in ((1, 32), (16, 32), (64, 16)):
        # The time of the prompts is taken off.
        figures[f"decode_{rows}_tokens_per_s"] = rows * (new - 1) / (generate(rows, 16, new) - generate(rows, 16, 1))
    figures["prefill_512_tokens_per_s"] = best(lambda: 512 / generate(1, 512, 1))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
