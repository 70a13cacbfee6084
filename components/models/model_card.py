"""The README.md of an adapter folder: YAML header for the hub, measured figures, how to load it with and without us."""

from __future__ import annotations

from components.config import ModelConfig
from components.models.base import ResolvedModel

LORA_USE = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, "path/to/this/folder")
```"""

FULL_USE = """```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
```"""

HEAD_USE = """The calibration head is part of the method: without it the confidence is not calibrated. Apply it to the
logits before the softmax:

```python
from safetensors.torch import load_file

head = load_file("path/to/this/folder/calibration_head.safetensors")
logits = logits.float() / head["rho"].exp() + head["l"]
```"""


def model_card(*, config: ModelConfig, resolved: ResolvedModel, method: str, with_head: bool, results: str) -> str:
    """Writes the card.

    Args:
        config: Model section of the run file.
        resolved: The base model.
        method: Name of the method.
        with_head: Whether the folder holds a calibration head.
        results: Markdown with the measured figures; may be empty where nothing was measured yet.

    Returns:
        The text of README.md.
    """
    import yaml

    lora = config.adapter.kind == "lora"
    header: dict[str, object] = {
        "base_model": resolved.public_id,
        "library_name": "peft" if lora else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["caltune", "calibration", method, config.adapter.kind],
    }
    if resolved.license is not None:
        header["license"] = resolved.license
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---",
        f"# {method} on {resolved.public_id}",
        f"Trained by caltune with the method `{method}`. The base weights came from: {resolved.origin}.",
    ]
    if results.strip():
        parts += ["## Measured", results.strip()]
    parts += ["## Use", (LORA_USE if lora else FULL_USE).format(base=resolved.public_id)]
    if with_head:
        parts.append(HEAD_USE)
    parts.append("`caltune.json` records the prompt, the versions and the checksums that belong to these figures.")
    return "\n\n".join(parts) + "\n"
