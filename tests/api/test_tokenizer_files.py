"""The files of a tokenizer: tokenizer.json is read for token ids, and the others for names and templates."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.tiny import END, SMALL, edit_json, make_tokenizer
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from nanovllm import LLM, SamplingParams
from nanovllm.models.hub import find_model
from nanovllm.models.model_folder import read_tokenizer
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


# ---- the option tokenizer


@pytest.fixture
def bare(reciter: Path, tmp_path: Path) -> Path:
    """The reciter's folder without its tokenizer."""
    folder = tmp_path / "bare"
    shutil.copytree(reciter, folder, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    return folder


def test_the_option_s_tokenizer_takes_the_place_of_the_model_s(reciter: Path, bare: Path, tmp_path: Path) -> None:
    """Ids, texts, the end of an answer and the template are its own. The model's is not read."""
    other = tmp_path / "other"
    other.mkdir()
    tokenizer = make_tokenizer()
    tokenizer.normalizer = normalizers.Replace("!", "a")
    save(other, tokenizer, tokenizer_class="PreTrainedTokenizerFast", eos_token=END)
    (other / "config.json").unlink()
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}")
    shutil.copytree(reciter, tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    talk = [{"role": "user", "content": "!"}]
    params = SamplingParams(temperature=0, max_tokens=60)
    with LLM(reciter, **SMALL) as llm:
        (right,) = llm.generate(["a"], params, use_tqdm=False)
    for model in (bare, tmp_path / "broken", reciter):
        with LLM(model, tokenizer=other, **SMALL) as llm:
            (output,) = llm.generate(["!"], params, use_tqdm=False)
            (answer,) = llm.chat([talk], params, use_tqdm=False)
        assert output["token_ids"] == answer["token_ids"] == right["token_ids"]
        assert output["text"] == right["text"] != "" and output["finish_reason"] == "stop"


def test_ids_of_a_tokenizer_that_the_model_does_not_have_are_refused(bare: Path) -> None:
    size = json.loads((bare / "config.json").read_text())["vocab_size"]
    with (
        LLM(bare, tokenizer="tiny-qwen3", **SMALL) as llm,
        pytest.raises(ValueError, match=f"vocabulary is 0..{size - 1}"),
    ):
        llm.generate(["what is the capital of Japan?"], use_tqdm=False)


def test_a_wrong_tokenizer_is_refused_by_name_before_weights_are_read(bare: Path, tmp_path: Path) -> None:
    (bare / "model.safetensors").write_bytes(b"not read")
    empty = tmp_path / "empty"
    empty.mkdir()
    for name, message in {
        str(tmp_path / "missing"): "tokenizer folder '.*missing' does not exist",
        str(bare / "config.json"): "tokenizer .*config.json is a file; it must be the folder",
        "": "tokenizer is ''; it must be a folder or a Hugging Face id, or None",
    }.items():
        with pytest.raises(ValueError, match=message):
            LLM(bare, tokenizer=name, **SMALL)
    with pytest.raises(ValueError, match="tokenizer is 7; it must be a folder or a Hugging Face id"):
        LLM(bare, tokenizer=7, **SMALL)  # type: ignore[arg-type]
    shutil.copy(find_model("tiny-qwen3") / "model.safetensors", bare)
    for folder, message in ((empty, "there is none in"), (bare, "there is none in")):
        with pytest.raises(ValueError, match=message):
            read_tokenizer(str(folder), None)
    (empty / "tokenizer.model").write_text("x")
    with pytest.raises(ValueError, match=r"tokenizer '.*empty': .*tokenizer\.model, which cannot be read"):
        read_tokenizer(str(empty), None)


def test_of_a_hub_id_the_tokenizer_alone_is_downloaded(
    bare: Path, reciter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        if name != "some/tokenizer":
            raise OSError("no network")
        asked.append(allow_patterns)
        return str(reciter)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with LLM(bare, tokenizer="some/tokenizer", **SMALL) as llm:
        assert len(llm.prepare("abc").prompt_token_ids) == 3
    assert asked and all("tokenizer*" in one and not any("safetensors" in part for part in one) for one in asked)
    with pytest.raises(ValueError, match="tokenizer 'other/one' is neither a local folder, nor an id"):
        LLM(bare, tokenizer="other/one", **SMALL)
