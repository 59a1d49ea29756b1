"""Writes `family_logits.json`: what transformers makes of the tiny checkpoints of every family.

Needs `pip install transformers`; run it from the repository's root, with `PYTHONPATH=python:.`.
"""

import json
import tempfile
from pathlib import Path

import torch
import transformers

from tests.unit.tiny_checkpoints import VARIANTS, sequences, write_checkpoint


def positions(n: int) -> list[int]:
    """Places whose logits are kept."""
    return sorted({n // 2, n - 1})


def logits(model: transformers.PreTrainedModel, ids: list[int], one_by_one: bool) -> torch.Tensor:
    if not one_by_one:
        return model(torch.tensor([ids])).logits[0]
    cache, rows = None, []
    for i in ids:
        out = model(torch.tensor([[i]]), cache=cache, use_cache=True)
        cache = out.cache
        rows.append(out.logits[0, -1])
    return torch.stack(rows)


def main() -> None:
    kept = {}
    for variant in VARIANTS:
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            path = write_checkpoint(Path(folder) / "m", variant)
            lines = []
            for ids in sequences():
                # Anew each time: dynamic scaling remembers the longest sequence.
                model, said = transformers.AutoModelForCausalLM.from_pretrained(
                    path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
                )
                assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), said
                found = logits(model.eval(), ids, "dynamic" in variant)
                lines.append({str(at): [round(x, 5) for x in found[at].tolist()] for at in positions(len(ids))})
            kept[variant] = lines
    rows = (f"{json.dumps(variant)}: {json.dumps(lines)}" for variant, lines in kept.items())
    Path(__file__).with_name("family_logits.json").write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
