"""Writes `model_logits.json`: what transformers makes of the tiny checkpoints in `tests/unit/tiny_models.py`.

Needs `pip install transformers`; run it from the repository's root with `python -m tests.data.write_model_logits`.
"""

import json
import tempfile
from pathlib import Path

import torch
import transformers

from tests.unit.tiny_models import CASES, DATA, picked, save_case, sequences


def logits_of(model: transformers.PreTrainedModel, ids: list[int], one_by_one: bool) -> torch.Tensor:
    """Logits of every position, [positions, vocabulary]."""
    if not one_by_one:
        return model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64)).logits[0]
    cache, rows = transformers.DynamicCache(), []
    for position, token in enumerate(ids):
        out = model(torch.tensor([[token]]), cache=cache, position_ids=torch.tensor([[position]]))
        rows.append(out.logits[0, 0])
    return torch.stack(rows)


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        for case, config in CASES.items():
            model, said = transformers.AutoModelForCausalLM.from_pretrained(
                save_case(Path(scratch) / case, case),
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
            )
            if said["missing_keys"] or said["unexpected_keys"] or said["mismatched_keys"]:
                raise SystemExit(f"{case}: transformers expects other tensors: {said}")
            # Dynamic scaling depends on how a text is cut into steps; servekit's is that of steps of one token.
            one_by_one = "dynamic" in str(config)
            found[case] = [
                [round(row[token].item(), 5) for token in picked(position)]
                for ids in sequences()
                for position, row in enumerate(logits_of(model.eval(), ids, one_by_one))
            ]
    cases = (f'"{case}": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]" for case, rows in found.items())
    DATA.write_text("{\n" + ",\n".join(cases) + "\n}\n")


if __name__ == "__main__":
    main()
