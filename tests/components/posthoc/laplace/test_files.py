"""The posterior in its adapter's folder: whole, strict, and never in the way of the adapter."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.config import AdapterConfig, ModelConfig
from components.config_data import PromptConfig
from components.errors import ModelError
from components.models.adapter import adapter_state, attach_adapter, trainable_parameters
from components.models.adapter_checks import verify_adapter
from components.models.adapter_extras import add_file
from components.models.adapter_files import AdapterRecord, load_adapter, save_adapter
from components.models.base import load_model, resolve_model
from components.models.smollm2 import sha256_of
from components.posthoc.laplace.files import FILE_NAME, load_posterior, save_posterior
from components.posthoc.laplace.layers import lora_layers


@pytest.fixture
def adapter(tiny_model_folder, tiny_tokenizer, tmp_path):
    """An adapter folder like that of `scoring`, and its LoRA matrices."""
    config = ModelConfig(name=str(tiny_model_folder), adapter=AdapterConfig(r=2))
    resolved = resolve_model(config)
    model = attach_adapter(load_model(resolved, config), config.adapter, seed=1)
    with torch.no_grad():
        for p in trainable_parameters(model).values():
            p += 0.1
    folder = save_adapter(
        tmp_path / "adapter",
        model=model,
        state=adapter_state(model),
        head=None,
        tokenizer=tiny_tokenizer,
        config=config,
        adapter=config.adapter,
        resolved=resolved,
        record=AdapterRecord("laplace", 3, PromptConfig()),
    )
    loaded, _ = load_adapter(folder, load_model(resolved, config))
    return folder, lora_layers(loaded)


def test_it_comes_back_as_it_was(adapter, posterior):
    folder, layers = adapter
    save_posterior(folder, replace(posterior, samples=7))
    save_posterior(folder, posterior)  # again, in the earlier one's place
    found = load_posterior(folder, layers)
    assert found.figures == posterior.figures
    assert found.blocks.keys() == posterior.blocks.keys()
    for name, block in posterior.blocks.items():
        for part, tensor in vars(block).items():
            assert torch.equal(getattr(found.blocks[name], part), tensor)
    assert FILE_NAME in verify_adapter(folder)["files"]
    (folder / FILE_NAME).write_bytes(b"other")
    with pytest.raises(ModelError, match="posterior"):
        verify_adapter(folder)


def test_without_one_is_refused(adapter):
    folder, layers = adapter
    with pytest.raises(ModelError, match="never fitted"):
        load_posterior(folder, layers)


def drop(tensors, name):
    del tensors[f"{name}.wide_values"]


def misshape(tensors, name):
    tensors[f"{name}.narrow_values"] = torch.ones(5)


def negate(tensors, name):
    tensors[f"{name}.wide_values"] -= 1e6


def add(tensors, name):
    tensors["more"] = torch.ones(1)


@pytest.mark.parametrize(
    ("change", "words"),
    [(drop, "missing key"), (misshape, "expected"), (negate, "cannot have"), (add, "unexpected key 'more'")],
)
def test_what_does_not_fit_is_refused(adapter, posterior, change, words):
    folder, layers = adapter
    save_posterior(folder, posterior)
    rewrite(folder, lambda tensors: change(tensors, layers[0].name))
    with pytest.raises(ModelError, match=words):
        load_posterior(folder, layers)


def rewrite(folder, change):
    """Changes the tensors and makes the checksum agree again."""
    path, record = folder / FILE_NAME, json.loads((folder / "caltune.json").read_text())
    tensors = load_file(path)
    figures = {"version": 1, "prior_variance": 1.0, "samples": 9, "n": 1, "log_likelihood": 0.0, "squared_norm": 1.0}
    change(tensors)
    save_file(tensors, path, metadata={"caltune_posterior": json.dumps(figures)})
    record["files"][path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    (folder / "caltune.json").write_text(json.dumps(record))


def test_broken_off_it_leaves_the_adapter_whole(adapter, posterior):
    """Before the new file is written, and after, with an earlier one there."""
    folder, layers = adapter
    save_posterior(folder, posterior)

    def fail(path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        add_file(folder, FILE_NAME, fail)
    assert FILE_NAME not in verify_adapter(folder)["files"]
    save_posterior(folder, posterior)
    assert load_posterior(folder, layers).n == 12
