"""The README.md of an adapter folder: YAML header for the hub, measured figures, how to load it with and without us."""

from __future__ import annotations

from typing import Literal

from components.models.adapter import AdapterKind
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

MIXLORA_USE = """A mixture of LoRA experts: in each layer a router sends every token to a few of them. PEFT and
transformers do not know this kind of adapter; caltune loads it:

```python
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from components.models.adapter_files import load_adapter

base = AutoModelForCausalLM.from_pretrained("{base}", dtype=torch.float32)
model, head = load_adapter(Path("path/to/this/folder"), base)
```

For programs that read the public MixLoRA format, such as the package `mixlora`:

```python
from components.models.mixlora.public_format import export_public

export_public(Path("path/to/this/folder"), Path("path/to/a/new/folder"))
```"""

BLOB_USE = """LoRA whose A is Gaussian (BLoB): `lora_A` is its mean, the square of `lora_G` its standard deviation. PEFT
does not know this kind of adapter; caltune loads it, with A at its mean:

```python
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from components.models.adapter_files import load_adapter

base = AutoModelForCausalLM.from_pretrained("{base}", dtype=torch.float32)
model, head = load_adapter(Path("path/to/this/folder"), base)
```

Its confidence is the mean over several draws of A: `caltune evaluate --adapter path/to/this/folder`."""

ENSEMBLE_USE = """An ensemble: every folder `member-<i>` is an adapter of its own, which PEFT reads:

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, "path/to/this/folder/member-0", adapter_name="member-0")
model.load_adapter("path/to/this/folder/member-1", adapter_name="member-1")  # and so on; model.set_adapter chooses
```

The confidence is the mean of the members' probabilities: `caltune evaluate --adapter path/to/this/folder`."""

USE = {"lora": LORA_USE, "full": FULL_USE, "mixlora": MIXLORA_USE, "blob": BLOB_USE, "ensemble": ENSEMBLE_USE}
LIBRARY = {"lora": "peft", "full": "transformers", "mixlora": "caltune", "blob": "caltune", "ensemble": "peft"}

HEAD_USE = """The calibration head is part of the method: without it the confidence is not calibrated. Apply it to the
logits before the softmax:

```python
from safetensors.torch import load_file

head = load_file("path/to/this/folder/calibration_head.safetensors")
logits = logits.float() / head["rho"].exp() + head["l"]
```"""


def model_card(
    *,
    kind: AdapterKind | Literal["ensemble"],
    resolved: ResolvedModel,
    method: str,
    with_head: bool,
    results: str,
) -> str:
    """Writes the card.

    Args:
        kind: Of the adapter, or that it is several.
        resolved: The base model.
        method: Name of the method.
        with_head: Whether the folder holds a calibration head.
        results: Markdown with the measured figures; may be empty where nothing was measured yet.

    Returns:
        The text of README.md.
    """
    import yaml

    header: dict[str, object] = {
        "base_model": resolved.public_id,
        "library_name": LIBRARY[kind],
        "pipeline_tag": "text-generation",
        "tags": ["caltune", "calibration", method, kind],
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
    parts += ["## Use", USE[kind].format(base=resolved.public_id)]
    if with_head:
        parts.append(HEAD_USE)
    parts.append("`caltune.json` records the prompt, the versions and the checksums that belong to these figures.")
    return "\n\n".join(parts) + "\n"
