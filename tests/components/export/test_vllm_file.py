"""The file for vLLM, without vLLM: its tensors, and that it fits either interface's abstract class."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import types
from abc import ABC, abstractmethod
from pathlib import Path

import pytest
import torch

from components.export.standalone import calibrated_logits

V1, V2 = "vllm.v1.sample.logits_processor", "vllm.v1.worker.gpu.sample.logits_processor.interface"


class V1Processor(ABC):
    """vLLM's abstract methods, as of `vllm/v1/sample/logits_processor/interface.py`."""

    @abstractmethod
    def __init__(self, vllm_config, device, is_pin_memory): ...

    @abstractmethod
    def apply(self, logits): ...

    @abstractmethod
    def is_argmax_invariant(self): ...

    @abstractmethod
    def update_state(self, batch_update): ...


class V2Processor(ABC):
    """The same of `vllm/v1/worker/gpu/sample/logits_processor/interface.py` (since 0.32)."""

    def __init__(self, vllm_config, req_states):
        raise AssertionError("the file's own constructor is the one to run")

    def add_request(self, req_idx, sampling_params):
        return True

    @abstractmethod
    def apply(self, logits, ctx): ...


@pytest.fixture
def exported(tmp_path, random_head, monkeypatch):
    """A folder with head and files, on Python's path as the card says; and the head."""
    head = random_head()
    head.save(tmp_path)
    for name in ("calibrated_logits.py", "calibrated_logits_vllm.py"):
        shutil.copyfile(Path(calibrated_logits.__file__).with_name(name), tmp_path / name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "calibrated_logits", raising=False)
    yield tmp_path, head
    sys.modules.pop("calibrated_logits", None)


def load(folder: Path):
    spec = importlib.util.spec_from_file_location("calibrated_logits_vllm", folder / "calibrated_logits_vllm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CalibratedLogits


@pytest.mark.parametrize("interfaces", [{V1: V1Processor}, {V2: V2Processor}, {V1: V1Processor, V2: V2Processor}])
def test_rows_get_the_head_under_either_interface(interfaces, exported, monkeypatch):
    folder, head = exported
    for name, base in interfaces.items():
        module = types.ModuleType(name)
        module.LogitsProcessor = base
        monkeypatch.setitem(sys.modules, name, module)
        parts = name.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    logits = 5 * torch.randn(4, 320)
    logits[2, 7] = -torch.inf
    if V2 in interfaces:
        made = load(folder)(None, object())
        said = made.apply(logits, object())
        assert made.add_request(0, None), "vLLM would skip the request"
    else:
        made = load(folder)(None, torch.device("cpu"), False)
        said = made.apply(logits)
        assert made.update_state(None) is None
    assert all(isinstance(made, base) for base in interfaces.values())
    assert not made.is_argmax_invariant()
    assert torch.equal(said, head(logits))
    assert said[2, 7] == -torch.inf


def test_a_vllm_without_either_interface_is_named(exported):
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed, so what is said without it cannot be seen")
    with pytest.raises(ImportError, match="neither interface"):
        load(exported[0])
