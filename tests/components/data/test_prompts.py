"""Questions to token ids, on the tiny tokenizer: bytes plus a few merges such as ` A` and ` Paris`; `<s>` by itself."""

from __future__ import annotations

import copy
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.config_data import PromptConfig
from components.data.prompts import EncodedQuestion, PromptEncoder, PromptError, adds_bos, render_prompt

PLAIN = PromptConfig(style="plain", template="Question: {question}\nAnswer:", delimiter=" ")
LETTERS = PromptConfig(style="plain", scoring="letter", template="{question}\n{options}\nAnswer:")
CHAT = PromptConfig(style="chat", system="Be brief.")
TEXT = st.text(st.sampled_from("AaePrsil ?"), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def bare_tokenizer(tiny_tokenizer):
    """The tiny tokenizer without the step that puts `<s>` in front, as SmolLM2's and Qwen's are."""
    from tokenizers import processors

    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    return tokenizer


@pytest.fixture
def encode(tiny_tokenizer, question):
    """Encode one question under a configuration; the question's fields by keyword."""

    def encoded(config, *, tokenizer=tiny_tokenizer, max_length=512, **fields) -> EncodedQuestion:
        return PromptEncoder(tokenizer, config, max_length).encode(question("q", **fields))

    return encoded


def tokens(tokenizer, ids) -> list[str]:
    return tokenizer.convert_ids_to_tokens(list(ids))


@pytest.mark.parametrize("config", [PLAIN, LETTERS, CHAT], ids=["plain", "letters", "chat"])
def test_one_bos_whether_tokenizer_or_chat_template_writes_it(tiny_tokenizer, encode, config):
    encoded = encode(config)
    assert encoded.prompt[0] == tiny_tokenizer.bos_token_id
    everything = [*encoded.prompt, *(token for option in encoded.options for token in option)]
    assert everything.count(tiny_tokenizer.bos_token_id) == 1


def test_tokenizer_alone_would_write_bos_twice_in_a_chat(tiny_tokenizer, question):
    """What the encoder guards against; were it not so, the test above could not fail."""
    text = render_prompt(question("q"), CHAT, tiny_tokenizer)
    assert tiny_tokenizer(text).input_ids[:2] == [tiny_tokenizer.bos_token_id] * 2


def test_no_bos_where_the_tokenizer_uses_none(bare_tokenizer, encode):
    assert not adds_bos(bare_tokenizer)
    assert bare_tokenizer.bos_token_id not in encode(PLAIN, tokenizer=bare_tokenizer).prompt


def test_bos_of_the_chat_template_stays_where_the_tokenizer_uses_none(bare_tokenizer, encode):
    assert encode(CHAT, tokenizer=bare_tokenizer).prompt.count(bare_tokenizer.bos_token_id) == 1


def test_answer_is_tokenised_together_with_the_prompt(tiny_tokenizer, encode):
    """` Paris` is one token, `Paris` is three; after `Answer:` and a space it is the one."""
    encoded = encode(PLAIN, choices=("Paris", "Oslo"))
    assert tokens(tiny_tokenizer, encoded.options[0]) == ["ĠParis"]
    assert len(tiny_tokenizer("Paris", add_special_tokens=False).input_ids) > 1


def test_prompt_and_option_together_are_the_whole_text(tiny_tokenizer, encode):
    encoded = encode(PLAIN, text="Where is Lima?", choices=("In Peru", "in Kenya", "Oslo"))
    for option, choice in zip(encoded.options, ("In Peru", "in Kenya", "Oslo"), strict=True):
        whole = f"Question: Where is Lima?\nAnswer: {choice}"
        assert encoded.prompt + option == tuple(tiny_tokenizer(whole).input_ids)
        assert tiny_tokenizer.decode(option) == f" {choice}"


def test_letters_are_one_distinct_token_each(tiny_tokenizer, encode):
    encoded = encode(LETTERS, choices=("yes", "no", "maybe"), answer=2)
    assert [tokens(tiny_tokenizer, option) for option in encoded.options] == [["A"], ["B"], ["C"]]
    assert encoded.answer == 2


def test_letters_of_several_tokens_are_refused_with_their_ids(tiny_tokenizer, encode):
    """After a space `A` is one token and `B` is two, since ` A` was merged and ` B` was not."""
    space, b = tiny_tokenizer.convert_tokens_to_ids(["Ġ", "B"])
    with pytest.raises(PromptError, match=rf"'q': letters need one distinct token.*B=\[{space}, {b}\].*delimiter"):
        encode(LETTERS.model_copy(update={"delimiter": " "}), choices=("yes", "no"))


def test_letters_that_share_a_token_are_refused(tiny_tokenizer, encode):
    """A tokenizer without capitals knows none of the letters: all become its unknown token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")
    with pytest.raises(PromptError, match=r"A=\[0\], B=\[0\]"):
        encode(LETTERS, tokenizer=tokenizer, choices=("yes", "no"))


def test_space_at_the_end_of_the_prompt_is_refused_where_it_joins_the_answer(encode):
    """`Answer: ` ends with the token of a space; with `Paris` behind it, ` Paris` is one token and that space is gone.

    Cutting the ids at the prompt's length would leave no token of the answer, or not all of them.
    """
    config = PLAIN.model_copy(update={"answer_prefix": " ", "delimiter": ""})
    with pytest.raises(PromptError, match=r"'q': the tokenizer joins.*'Paris is i'.*data\.prompt\.delimiter"):
        encode(config, choices=("Paris is it", "Oslo"))
    assert encode(PLAIN, choices=("Paris is it", "Oslo"))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXT, choices=st.lists(TEXT, min_size=2, max_size=5), prefix=TEXT | st.just(""), delimiter=TEXT)
def test_encoding_is_the_whole_text_or_an_error(tiny_tokenizer, encode, text, choices, prefix, delimiter):
    """Whatever the border between prompt and answer looks like, ids that are scored are those of the whole text."""
    config = PromptConfig(style="plain", template="{question}", answer_prefix=prefix, delimiter=delimiter)
    prompt = tuple(tiny_tokenizer(text + prefix).input_ids)
    wholes = [tuple(tiny_tokenizer(text + prefix + delimiter + choice).input_ids) for choice in choices]
    if any(whole[: len(prompt)] != prompt for whole in wholes):
        with pytest.raises(PromptError, match="joins"):
            encode(config, text=text, choices=tuple(choices))
        return
    encoded = encode(config, text=text, choices=tuple(choices))
    for option, whole in zip(encoded.options, wholes, strict=True):
        assert encoded.prompt + option == whole
        assert option


def test_answer_without_a_token_is_refused(encode):
    with pytest.raises(PromptError, match="'q': answer '' has no tokens"):
        encode(PLAIN.model_copy(update={"delimiter": ""}), choices=("yes", ""))


def test_longest_row_counts_prompt_and_longest_option(encode):
    encoded = encode(PLAIN, choices=("Paris", "no no no"))
    longest = len(encoded.prompt) + max(len(option) for option in encoded.options)
    assert encode(PLAIN, choices=("Paris", "no no no"), max_length=longest) == encoded
    with pytest.raises(PromptError, match=rf"'q' is {longest} tokens long, data.max_length is {longest - 1}"):
        encode(PLAIN, choices=("Paris", "no no no"), max_length=longest - 1)


def test_chat_needs_a_chat_template(tiny_tokenizer, encode):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(PromptError, match=r"no chat template; set data\.prompt\.style to 'plain'"):
        encode(CHAT, tokenizer=tokenizer)
    assert encode(PLAIN, tokenizer=tokenizer)


def test_chat_prompt_has_system_question_and_the_opened_answer(tiny_tokenizer, question):
    config = CHAT.model_copy(update={"answer_prefix": "Answer:"})
    assert render_prompt(question("q", "Why?"), config, tiny_tokenizer) == (
        "<s><|system|>\nBe brief.</s>\n<|user|>\nWhy?</s>\n<|assistant|>\nAnswer:"
    )
    without_system = render_prompt(question("q", "Why?"), PromptConfig(), tiny_tokenizer)
    assert without_system == "<s><|user|>\nWhy?</s>\n<|assistant|>\n"


def test_braces_in_question_options_and_template_are_text(tiny_tokenizer, question):
    config = PromptConfig(style="plain", template='{"q": {question}}\n{options}\n{answer}')
    asked = question("q", "What is {options} in {0}?", choices=("{question}", "{x}"))
    assert render_prompt(asked, config, tiny_tokenizer) == (
        '{"q": What is {options} in {0}?}\nA. {question}\nB. {x}\n{answer}'
    )


def test_backslashes_are_text(tiny_tokenizer, question):
    """A replacement string of `re.sub` would read `\\1` as a group."""
    asked = question("q", r"Is \1 \g<0> \n?", choices=(r"\frac", "no"))
    assert render_prompt(asked, LETTERS, tiny_tokenizer) == "Is \\1 \\g<0> \\n?\nA. \\frac\nB. no\nAnswer:"


def test_26_choices(tiny_tokenizer, encode):
    encoded = encode(LETTERS, choices=tuple(f"{i} apples" for i in range(26)), answer=25)
    assert [tokens(tiny_tokenizer, option) for option in encoded.options] == [[c] for c in string.ascii_uppercase]
    assert "Z. 25 apples\nAnswer:" in tiny_tokenizer.decode(encoded.prompt)


def test_duplicate_choices_keep_their_places(encode):
    encoded = encode(PLAIN, choices=("yes", "no", "yes"), answer=2)
    assert encoded.options[0] == encoded.options[2] != encoded.options[1]
    assert encoded.answer == 2
    assert len(encode(LETTERS, choices=("yes", "no", "yes")).options) == 3


def test_packed_length_counts_the_prompt_once_and_no_last_token():
    """2 prompt tokens, options of 3, 1 and 2 tokens of which all but the last are fed: 2 + 2 + 0 + 1 = 5."""
    assert EncodedQuestion("q", (1, 2), ((3, 4, 5), (6,), (7, 8)), 0).packed_length == 5


def test_encode_all_keeps_the_order(tiny_tokenizer, question):
    encoder = PromptEncoder(tiny_tokenizer, PLAIN, 512)
    questions = [question(name, f"Which is {name}?") for name in "bac"]
    assert encoder.encode_all(questions) == [encoder.encode(q) for q in questions]
    assert [q.id for q in encoder.encode_all(questions)] == ["b", "a", "c"]
