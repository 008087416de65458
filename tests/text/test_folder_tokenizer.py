from __future__ import annotations

import pytest
from tokenizers.processors import TemplateProcessing

from benchmarks.support.tiny_tokenizers import byte_level_backend, write_folder
from headway.errors import InvalidRequestError, ModelLoadError
from headway.text import Tokenizer

CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False},
    "pad_token": None,
    "chat_template": "from config",
}


def ids_of(*tokens: str) -> tuple[int, ...]:
    vocab = byte_level_backend().get_vocab()
    return tuple(vocab[token] for token in tokens)


def test_reads_what_the_files_say(tmp_path):
    folder = write_folder(tmp_path, byte_level_backend(), tokenizer_config=CONFIG)
    tokenizer = Tokenizer.from_path(str(folder))
    assert tokenizer.vocab_size == byte_level_backend().get_vocab_size()
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.bos_token_id,) == ids_of("<s>")
    assert tokenizer.eos_token_ids == ids_of("</s>")
    assert tokenizer.chat_template == "from config"
    ids = tokenizer.encode("<s>hi 你<\u2581think></s>")
    assert tokenizer.decode(ids) == "hi 你<\u2581think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>hi 你<\u2581think></s>"


def test_a_bare_tokenizer_is_enough(tmp_path):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, byte_level_backend()))
    assert tokenizer.eos_token_ids == ()
    assert tokenizer.bos_token_id is None
    assert tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config": {"eos_token_id": 260}}, (260,)),
        ({"config": {"eos_token_id": 260}, "generation_config": {"eos_token_id": 261}}, (261,)),
        ({"config": {"eos_token_id": 260}, "generation_config": {}}, (260,)),
        (
            {"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": [7, 8, 7]}},
            (7, 8),
        ),
    ],
)
def test_ending_ids_of_the_configs_join_the_tokenizers_own(tmp_path, files, expected):
    folder = write_folder(tmp_path, byte_level_backend(), tokenizer_config=CONFIG, **files)
    assert Tokenizer.from_folder(folder).eos_token_ids == ids_of("</s>") + expected


def test_chat_template_files_win_over_the_config(tmp_path):
    folder = write_folder(tmp_path, byte_level_backend(), tokenizer_config=CONFIG)
    (folder / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert Tokenizer.from_folder(folder).chat_template == "from json"
    (folder / "chat_template.jinja").write_text("from jinja")
    assert Tokenizer.from_folder(folder).chat_template == "from jinja"


def test_the_default_of_several_templates(tmp_path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    folder = write_folder(tmp_path, byte_level_backend(), tokenizer_config={"chat_template": named})
    assert Tokenizer.from_folder(folder).chat_template == "d"


@pytest.mark.parametrize("does_add", [False, True])
@pytest.mark.parametrize("flag", [None, False, True])
def test_add_bos_token_wins_over_the_post_processor(tmp_path, does_add, flag):
    backend = byte_level_backend()
    (bos_id,) = ids_of("<s>")
    if does_add:
        backend.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", bos_id)]
        )
    config = CONFIG if flag is None else {**CONFIG, "add_bos_token": flag}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend, tokenizer_config=config))
    is_added = does_add if flag is None else flag
    assert (tokenizer.encode("hi")[0] == bos_id) == is_added
    assert tokenizer.encode("hi", add_special_tokens=False)[0] != bos_id


def test_truncation_and_padding_of_training_are_dropped(tmp_path):
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend))
    assert len(tokenizer.encode("a")) == 1
    assert len(tokenizer.encode("abcdefgh")) == 8


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)
    write_folder(tmp_path, byte_level_backend(), tokenizer_config=[])
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json does not hold"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_a_lone_surrogate_is_the_callers_mistake(byte_level):
    with pytest.raises(InvalidRequestError, match="surrogate"):
        byte_level.encode("a\ud800b")
