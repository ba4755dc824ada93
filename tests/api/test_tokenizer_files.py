"""The files of a tokenizer: tokenizer.json is read for token ids, and the others for names and templates."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.tiny import END, SMALL, edit_json, make_tokenizer
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from nanovllm import LLM, SamplingParams
from nanovllm.text.tokenizer import Tokenizer as ModelTokenizer

TEXTS = ("Hello  world 12345", "  e\u0301 ABC\n\n", f"a{END}xyz", "<s>x</s> <|endoftext|><unk>")
CLASSES = (
    "PreTrainedTokenizerFast",
    "GPT2Tokenizer",
    "LlamaTokenizerFast",
    "Qwen2Tokenizer",
    "GemmaTokenizer",
    "Unknown",
)


def make_bytes() -> Tokenizer:
    """Other texts than any class would make of these bytes: digits stand alone, all is lower case, and END follows."""
    tokenizer = make_tokenizer()
    tokenizer.normalizer = normalizers.Lowercase()
    digits = pre_tokenizers.Split(Regex(r"\\d"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
    end = [(END, tokenizer.token_to_id(END))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=end)
    return tokenizer


def make_pieces() -> Tokenizer:
    """Pieces as those of old Llama files, whose normalizer writes the spaces. Newer classes have none."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)} | {"▁": 259}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer, model_type: str = "llama", **settings: object) -> Path:
    edit_json(folder / "config.json", model_type=model_type)
    tokenizer.save(str(folder / "tokenizer.json"))
    edit_json(folder / "tokenizer_config.json", **settings)
    return folder


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral", "gemma2"])
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("make", [make_bytes, make_pieces])
def test_the_file_says_what_ids_and_texts_are_whatever_the_class_is(
    make: type, cls: str, model_type: str, tmp_path: Path
) -> None:
    right = make()
    file = make()
    file.enable_truncation(3)
    file.enable_padding(pad_token=file.id_to_token(2), pad_id=2, length=64)
    tokenizer = ModelTokenizer(save(tmp_path, file, model_type, tokenizer_class=cls))
    ids = [right.encode(text).ids for text in TEXTS]
    assert tokenizer.encode_batch(TEXTS) == ids
    assert [tokenizer.decode(i, True) for i in ids] == [right.decode(i) for i in ids]
    assert [tokenizer.decode(i, False) for i in ids] == [right.decode(i, skip_special_tokens=False) for i in ids]
    assert tokenizer.vocabulary == right.get_vocab(), "no token that only the class has"
    assert (
        tokenizer.transformers.get_vocab() == right.get_vocab() and tokenizer.transformers.all_special_ids is not None
    )
    assert [tokenizer.transformers.encode(text) for text in TEXTS] == ids
    saved = json.loads(tokenizer.to_str())
    assert saved["truncation"] is None and saved["padding"] is None


def test_what_a_caller_asks_of_the_tokenizer_changes_no_prompt(reciter: Path) -> None:
    tokenizer = ModelTokenizer(reciter)
    right = tokenizer.encode_batch(TEXTS)
    theirs = tokenizer.transformers
    theirs.pad_token = END
    padded = theirs(list(TEXTS), padding=True, truncation=True, max_length=4).input_ids
    assert {len(ids) for ids in padded} == {4}
    assert tokenizer.encode_batch(TEXTS) == right and tokenizer.transformers is theirs


def test_a_folder_without_tokenizer_json_is_read_as_its_class_says(tmp_path: Path) -> None:
    right = make_tokenizer()
    model = json.loads(right.to_str())["model"]
    edit_json(tmp_path / "config.json", model_type="gpt2")
    edit_json(tmp_path / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", unk_token=END, eos_token=END)
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    assert ModelTokenizer(tmp_path).encode_batch(["a xyz"]) == [right.encode("a xyz").ids]


def test_tokens_that_tokenizer_config_alone_has_are_added(tmp_path: Path) -> None:
    size = make_tokenizer().get_vocab_size()
    tool = {"content": "<tool>", "special": False, "normalized": False} | dict.fromkeys(
        ("lstrip", "rstrip", "single_word"), False
    )
    for cls in CLASSES:
        save(tmp_path, make_tokenizer(), tokenizer_class=cls, added_tokens_decoder={str(size): tool}, pad_token="<pad>")
        tokenizer = ModelTokenizer(tmp_path)
        assert tokenizer.encode_batch(["<tool>a<pad>"]) == [[size, tokenizer.find_token("a"), size + 1]]
        assert tokenizer.decode([size, size + 1], True) == "<tool>"


@pytest.mark.parametrize("adds", [False, True])
def test_the_texts_own_bos_tokens_stay_and_one_is_added_where_there_is_none(adds: bool, tmp_path: Path) -> None:
    file = make_tokenizer()
    bos = file.token_to_id(END)
    a = file.token_to_id("a")
    if adds:
        file.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, bos)])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END}
    tokenizer = ModelTokenizer(save(tmp_path, file, **settings))
    texts = [END * count + "a" for count in range(4)]
    own = [[bos] * count + [a] for count in range(4)]
    assert own == [tokenizer.transformers.encode(text, add_special_tokens=False) for text in texts]
    assert tokenizer.encode_batch(texts, add_special_tokens=False) == own
    assert tokenizer.encode_batch(texts) == ([[bos, a], *own[1:]] if adds else own)


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json"])
def test_a_tokenizer_in_another_format_is_named_with_the_way_to_convert_it(
    name: str, random_model: Path, tmp_path: Path
) -> None:
    shutil.copytree(random_model, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text("{}")
    with LLM(tmp_path, **SMALL) as llm:
        talk = [{"role": "user", "content": "hi"}]
        for ask in (
            lambda: llm.generate("hi"),
            lambda: llm.chat(talk),
            lambda: llm.score("hi", "ho"),
            lambda: llm.embed("hi"),
            lambda: llm.tokenizer,
        ):
            with pytest.raises(ValueError, match=rf"tokenizer is in {name}, .*save_pretrained"):
                ask()
        assert len(llm.generate([[1, 2]], SamplingParams(0, 2, ignore_eos=True), use_tqdm=False)[0].token_ids) == 2
