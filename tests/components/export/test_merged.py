"""A merged model says what the adapter says, opened as anybody opens it."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, PhiConfig, PhiForCausalLM

from components.config import MixLoraConfig
from components.data.facts.builder import build_facts
from components.data.prompts import PromptEncoder
from components.errors import ModelError
from components.export.fold import require_foldable
from components.export.merged import export_merged
from components.export.source import open_source, require_mergeable
from components.export.standalone import calibrated_logits as shipped
from components.models.calibrated_logits import calibrated_logits
from components.models.score_questions import score_questions
from components.models.scoring import ScoringModel

TEXT = "Question: What is the capital of Peru?\nAnswer:"


def file_of(folder: Path):
    """`calibrated_logits.py` of an exported folder, imported from there."""
    spec = importlib.util.spec_from_file_location("exported_logits", folder / "calibrated_logits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain_scores(folder: Path, adjust) -> list[list[float]]:
    """Option scores by transformers alone, one option at a time."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    found = []
    for question in build_facts("geography", seed=3).with_choices[:12]:
        prompt = tokenizer(f"Question: {question.question}\nAnswer:").input_ids
        scores = []
        for choice in question.choices:
            whole = tokenizer(f"Question: {question.question}\nAnswer: {choice}").input_ids
            with torch.no_grad():
                logits = model(torch.tensor([whole])).logits[0].float()
            values = adjust(logits).log_softmax(-1)[range(len(prompt) - 1, len(whole) - 1), whole[len(prompt) :]]
            scores.append(float(values.sum()))
        found.append(scores)
    return found


def adapter_scores(folder: Path) -> torch.Tensor:
    """The same by caltune's own scoring."""
    source = open_source(folder)
    model, head = source.load()
    tokenizer = source.tokenizer()
    questions = PromptEncoder(tokenizer, source.prompt, 256).encode_all(build_facts("geography", 3).with_choices[:12])
    scores = score_questions(
        ScoringModel(model).eval(), head, questions, pad_id=tokenizer.pad_token_id, token_budget=1024
    )
    return torch.tensor(scores.log_probs)


def test_the_merged_model_scores_as_the_adapter_does(make_adapter, random_head, tmp_path):
    adapter = make_adapter(head=random_head())
    exported = export_merged(open_source(adapter), tmp_path / "out", fold=False, results="")
    assert exported.alpha == "beside"
    adjust = file_of(tmp_path / "out").CalibratedLogits.from_pretrained(tmp_path / "out").adjust
    expected = adapter_scores(adapter)
    torch.testing.assert_close(
        torch.tensor(plain_scores(tmp_path / "out", adjust)).double(), expected, atol=1e-4, rtol=0
    )
    without = torch.tensor(plain_scores(tmp_path / "out", lambda logits: logits)).double()
    assert (without - expected).abs().max() > 0.1, "the head should show"


def test_the_base_model_is_found_from_another_folder_than_the_training_s(make_adapter, tiny_model_folder):
    """A run file names it relative to itself; the adapter says the whole path beside."""
    adapter = make_adapter()
    content = json.loads((adapter / "caltune.json").read_text())
    assert content["base_model"]["public_id"] == str(tiny_model_folder)
    content["base_model"]["name"] = "models/tiny"
    (adapter / "caltune.json").write_text(json.dumps(content))
    assert Path(open_source(adapter).resolved.path_or_id) == tiny_model_folder


def test_generation_is_that_of_the_adapter_under_its_head(make_adapter, random_head, tmp_path):
    adapter = make_adapter(head=random_head())
    export_merged(open_source(adapter), tmp_path / "out", fold=False, results="")
    source = open_source(adapter)
    model, head = source.load()
    inputs = source.tokenizer()(TEXT, return_tensors="pt")
    with calibrated_logits(model, head) as processors:
        ours = model.generate(**inputs, logits_processor=processors, max_new_tokens=12, do_sample=False)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    alpha = file_of(tmp_path / "out").CalibratedLogits.from_pretrained(tmp_path / "out")
    theirs = plain.generate(**inputs, logits_processor=[alpha], max_new_tokens=12, do_sample=False)
    assert theirs.tolist() == ours.tolist()
    assert plain.generate(**inputs, max_new_tokens=12, do_sample=False).tolist() != ours.tolist()
    with pytest.raises(ValueError, match="beam search"):
        plain.generate(**inputs, logits_processor=[alpha], max_new_tokens=4, num_beams=2, do_sample=False)


def test_the_shipped_file_is_the_head_to_the_bit(random_head, tmp_path):
    logits = 10 * torch.randn(3, 5, 320)
    for form in ("vocabulary", "scalar"):
        head = random_head(form)
        head.save(tmp_path)
        assert torch.equal(shipped.CalibratedLogits.from_pretrained(tmp_path).adjust(logits), head(logits))
    random_head("vocabulary").save(tmp_path)
    with pytest.raises(ValueError, match="7 columns"):
        shipped.CalibratedLogits.from_pretrained(tmp_path).adjust(torch.zeros(1, 7))


def test_shipped_files_need_no_caltune():
    for path in Path(shipped.__file__).parent.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        assert not [name for name in names if name.split(".")[0] in ("components", "pipelines", "ray_jobs")]


@pytest.fixture
def phi_folder(tiny_tokenizer, tmp_path) -> Path:
    """A tiny model whose output layer has a bias."""
    config = PhiConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    model = PhiForCausalLM(config).eval()
    torch.nn.init.normal_(model.lm_head.bias, std=0.5)
    model.save_pretrained(tmp_path / "phi")
    tiny_tokenizer.save_pretrained(tmp_path / "phi")
    return tmp_path / "phi"


def test_a_whole_head_folds_into_an_output_layer_with_a_bias(make_adapter, random_head, phi_folder, tmp_path):
    adapter = make_adapter(head=random_head(), model_folder=phi_folder)
    exported = export_merged(open_source(adapter), tmp_path / "out", fold=True, results="")
    assert exported.alpha == "folded"
    assert exported.folding.greatest <= 1e-4
    assert not (tmp_path / "out" / "calibrated_logits.py").exists()
    scores = torch.tensor(plain_scores(tmp_path / "out", lambda logits: logits)).double()
    torch.testing.assert_close(scores, adapter_scores(adapter), atol=1e-4, rtol=0)


def test_one_temperature_folds_into_tied_embeddings_and_unties_them(make_adapter, random_head, tmp_path):
    adapter = make_adapter(head=random_head("scalar"), method="learned_ts")
    source = open_source(adapter)
    export_merged(source, tmp_path / "out", fold=True, results="")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert plain.config.tie_word_embeddings is False
    before = AutoModelForCausalLM.from_pretrained(source.resolved.path_or_id)
    assert torch.equal(plain.get_input_embeddings().weight, before.get_input_embeddings().weight)
    scores = torch.tensor(plain_scores(tmp_path / "out", lambda logits: logits)).double()
    torch.testing.assert_close(scores, adapter_scores(adapter), atol=1e-4, rtol=0)


def test_offsets_are_not_folded_where_there_is_no_bias(make_adapter, random_head, tmp_path):
    source = open_source(make_adapter(head=random_head()))
    with pytest.raises(ModelError, match=r"LlamaForCausalLM has no bias.*Nothing was written"):
        export_merged(source, tmp_path / "out", fold=True, results="")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calm"], "nothing is left behind"


def test_soft_capped_logits_are_not_folded():
    with pytest.raises(ModelError, match="soft-caps"):
        require_foldable(Gemma2Config(), "Gemma2ForCausalLM")


def test_settings_that_come_before_the_head_are_left_out(
    make_adapter, random_head, tiny_model, tiny_tokenizer, tmp_path
):
    tiny_model.generation_config.repetition_penalty = 1.3
    tiny_model.save_pretrained(tmp_path / "base")
    tiny_tokenizer.save_pretrained(tmp_path / "base")
    settings = []
    for method, head in (("calm", random_head()), ("sft", None)):
        adapter = make_adapter(method=method, head=head, model_folder=tmp_path / "base")
        export_merged(open_source(adapter), tmp_path / f"{method}-out", fold=False, results="")
        settings.append(json.loads((tmp_path / f"{method}-out" / "generation_config.json").read_text()))
    assert "repetition_penalty" not in settings[0]
    assert settings[0]["eos_token_id"] == 2
    assert settings[1]["repetition_penalty"] == 1.3
    assert not (tmp_path / "sft-out" / "calibrated_logits.py").exists()


def test_what_cannot_be_merged_is_refused_by_name(make_adapter, tmp_path):
    source = open_source(make_adapter(method="uq4ct", spec=MixLoraConfig(r=2, alpha=4, num_experts=4)))
    with pytest.raises(ModelError, match=r"MixLoRA.*caltune export mixlora"):
        export_merged(source, tmp_path / "out", fold=False, results="")
    with pytest.raises(ModelError, match=r"'mc_dropout'.*caltune evaluate --adapter"):
        require_mergeable(open_source(make_adapter(method="mc_dropout")))
    plain = open_source(make_adapter(method="sft"))
    with pytest.raises(ModelError, match="no calibration head"):
        export_merged(plain, tmp_path / "out", fold=True, results="")
    with pytest.raises(ModelError, match="exists"):
        export_merged(plain, tmp_path, fold=False, results="")


def test_a_base_model_that_has_moved_is_named(make_adapter, tiny_model_folder, tmp_path):
    adapter = make_adapter()
    stated = json.loads((adapter / "caltune.json").read_text())
    stated["base_model"]["public_id"] = str(tmp_path / "gone")
    (adapter / "caltune.json").write_text(json.dumps(stated))
    with pytest.raises(ModelError, match="--base-model"):
        open_source(adapter)
    assert open_source(adapter, str(tiny_model_folder)).resolved.path_or_id == str(tiny_model_folder)
