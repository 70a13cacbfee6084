"""Models from a hub: a small server that speaks the few requests a download makes, on loopback."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants, hf_api
from transformers import LlamaForCausalLM
from transformers.utils import hub as transformers_hub

from components.config import ModelConfig
from components.errors import ModelError
from components.models import smollm2
from components.models.base import load_model, load_tokenizer, resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
KNOWN = ("someone/tiny", smollm2.HUB_ID)
TOKENS = torch.arange(3, 23)[None]


class Hub(BaseHTTPRequestHandler):
    """Serves one folder under every known name, at `main` and at its commit; anything else is unknown."""

    folder: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def log_message(self, *words: object) -> None:
        """Keeps quiet."""

    def answer(self) -> None:
        path = self.path.split("?")[0].lstrip("/")
        self.asked.append(path)
        name = next((name for name in KNOWN if path.removeprefix("api/models/").startswith(name)), None)
        if name is None:
            self.send(404, b"", {"X-Error-Code": "RepoNotFound"})
            return
        rest = path.removeprefix("api/models/").removeprefix(name).strip("/").split("/")
        if "nowhere" in rest:
            self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif rest[0] == "resolve":
            self.send_one_file(rest[-1])
        elif rest[0] == "tree":
            self.send_json([{"type": "file", "path": p.name, **self.describe(p)} for p in self.folder.iterdir()])
        else:
            siblings = [{"rfilename": path.name} for path in self.folder.iterdir()]
            self.send_json({"id": name, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings})

    def describe(self, path: Path) -> dict[str, object]:
        return {"oid": hashlib.sha1(path.read_bytes()).hexdigest(), "size": path.stat().st_size}

    def send_one_file(self, name: str) -> None:
        path = self.folder / name
        if not path.is_file():
            self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        self.send(200, path.read_bytes(), {"X-Repo-Commit": COMMIT, "ETag": f'"{self.describe(path)["oid"]}"'})

    def send_json(self, content: object) -> None:
        self.send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def send(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub with two models, switched on; yields the list of paths it was asked for."""
    asked: list[str] = []
    handler = type("ThisHub", (Hub,), {"folder": tiny_model_folder, "asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    for client in (hf_api.api, transformers_hub.hf_api()):  # made once, with the address of that moment
        monkeypatch.setattr(client, "endpoint", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("CALTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield asked
    server.shutdown()
    server.server_close()


def test_a_hub_id_is_pinned_to_its_commit_and_loads(hub: list[str], tiny_model: LlamaForCausalLM) -> None:
    config = ModelConfig(name="someone/tiny")
    resolved = resolve_model(config)
    assert (resolved.path_or_id, resolved.revision, resolved.origin) == ("someone/tiny", COMMIT, "hub")
    assert torch.equal(load_model(resolved, config)(TOKENS).logits, tiny_model(TOKENS).logits)
    assert len(load_tokenizer(resolved, config)) == 320


def test_what_was_fetched_works_without_the_hub(hub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(name="someone/tiny")
    resolved = resolve_model(config)
    load_model(resolved, config)
    load_tokenizer(resolved, config)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.clear()
    again = resolve_model(config)
    assert (again.revision, again.origin, again.offline) == (COMMIT, "hub cache, hub not asked", True)
    load_model(again, config)
    load_tokenizer(again, config)
    assert hub == []


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("someone/else", None, "the hub has no model 'someone/else'"),
        ("someone/tiny", "nowhere", "has no revision 'nowhere'"),
    ],
)
def test_what_the_hub_does_not_know(hub: list[str], name: str, revision: str | None, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_model(ModelConfig(name=name, revision=revision))


def test_smollm2_comes_from_the_hub_where_there_is_one(hub: list[str]) -> None:
    found = smollm2.find_smollm2()
    assert found.origin == f"hub {smollm2.HUB_ID} at {COMMIT}"
    assert {"config.json", "model.safetensors", "tokenizer.json", smollm2.SOURCE_FILE} <= {
        path.name for path in found.folder.iterdir()
    }
    hub.clear()
    assert smollm2.find_smollm2() == found
    assert hub == []
