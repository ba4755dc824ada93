"""Scores of whole texts are transformers' and sentence-transformers', whatever runs beside them."""

import ast
import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.paths import BOX_MODEL, ROOT
from helpers.tiny import BLOCK, PADDING, draw_prompts, edit_json, save_classifier, save_random, save_text_classifier
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm import LLM, SamplingParams

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 160, "kvcache_block_size": BLOCK}
CROWDED = OPTIONS | {"num_kvcache_blocks": 13, "max_num_seqs": 8, "max_num_batched_tokens": 48}
PREFIX, *REST = draw_prompts([40, 1, 15, 16, 17, 70, 120])
KINDS = [("qwen3", 1), ("qwen3", 3), ("qwen2", 3), ("llama", 1), ("mistral", 3), ("gemma2", 1), ("phi3", 3)]
KINDS += [("gpt_neox", 1)]
"""The same head stands on each family. Each number of labels is tried on our layers and on transformers'."""
PROMPTS = [*REST, PREFIX + REST[1], PREFIX + REST[3]]


@torch.inference_mode()
def expect(model: Any, prompt: list[int]) -> np.ndarray:
    return model(torch.tensor([prompt])).logits[0].numpy()


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize(("kind", "num_labels"), KINDS)
def test_scores_are_transformers(kind: str, num_labels: int, backend: str, tmp_path: Path) -> None:
    """In a cache that preempts, in chunks, and with prefixes in common."""
    model = save_classifier(tmp_path, kind, num_labels)
    with LLM(tmp_path, **CROWDED, attention_backend=backend) as llm:
        found = llm.classify(PROMPTS, use_tqdm=False)
        assert llm.stats()["num_generated_tokens"] == 0
    for prompt, one in zip(PROMPTS, found, strict=True):
        expected = expect(model, prompt)
        np.testing.assert_allclose(one.scores, expected, atol=5e-4)
        probs = torch.tensor(expected).sigmoid() if num_labels == 1 else torch.tensor(expected).softmax(0)
        np.testing.assert_allclose(one.probs, probs.numpy(), atol=2e-4)
        assert one.label == f"LABEL_{expected.argmax()}"
        assert one.outputs.probs is one["probs"] and one.prompt_token_ids == prompt


@pytest.mark.parametrize("ending", [[], [PADDING], [PADDING] * 5, [7, PADDING]], ids=str)
def test_padding_at_the_end_is_not_the_last_token(ending: list[int], tmp_path: Path) -> None:
    model = save_classifier(tmp_path, "qwen3", 2)
    prompt = [5, PADDING, 9, 11, *ending]
    with LLM(tmp_path, **OPTIONS) as llm:
        (found,) = llm.classify([prompt])
        with pytest.raises(ValueError, match="no token but 2, the padding"):
            llm.classify([[PADDING, PADDING]])
    np.testing.assert_allclose(found.scores, expect(model, prompt), atol=5e-4)


def test_each_activation_makes_its_probabilities(tmp_path: Path) -> None:
    save_classifier(tmp_path, "llama", 3)
    scores = None
    for changes, activate in (
        ({"problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"problem_type": "single_label_classification"}, lambda x: x.softmax(0)),
        ({"problem_type": "regression"}, lambda x: x),
        (
            {"problem_type": None, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            lambda x: x,
        ),
    ):
        edit_json(tmp_path / "config.json", **changes)
        with LLM(tmp_path, **OPTIONS) as llm:
            (found,) = llm.classify([[5, 6, 7]])
        scores = found.scores if scores is None else scores
        np.testing.assert_array_equal(found.scores, scores)
        np.testing.assert_allclose(found.probs, activate(torch.from_numpy(scores)).numpy(), rtol=1e-5)
    for changes, words in (
        ({"sentence_transformers": {"activation_fn": "os.system"}}, "activation_fn"),
        ({"sentence_transformers": {"activation_fn": ["a"]}}, "activation_fn"),
        ({"sentence_transformers": None, "problem_type": "ranking"}, "problem_type"),
    ):
        edit_json(tmp_path / "config.json", **changes)
        with pytest.raises(ValueError, match=words):
            LLM(tmp_path, **OPTIONS)


def test_a_folder_whose_head_cannot_be_had_is_refused(tmp_path: Path) -> None:
    """Labels without a number, two heads, codes, and prompts of a wrong form. Weights that are NaN give no score."""
    save_text_classifier(tmp_path, 3)
    (path,) = tmp_path.glob("*.safetensors")
    saved = load_file(path)
    weight = saved["score.weight"]
    for changes, words in (
        ({"score.weight": weight.to(torch.int8)}, r"score.weight is of the type torch.int8"),
        ({"classifier.weight": weight + 1}, r"two heads: classifier.weight, score.weight"),
        ({"score.weight_scale": weight[0].clone()}, r"tensors of the shapes .*weight_scale"),
    ):
        save_file({**saved, **changes}, path, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=words):
            LLM(tmp_path, **OPTIONS)
    save_file({**saved, "score.weight": weight * float("nan")}, path, metadata={"format": "pt"})
    with LLM(tmp_path, **OPTIONS) as llm, pytest.raises(RuntimeError, match="NaN or infinity"):
        llm.classify([[5, 6]])
    save_file(saved, path, metadata={"format": "pt"})
    (tmp_path / "modules.json").write_text("[]")
    names: tuple[dict[str, Any], ...] = ({}, {"prompts": {"b": "c"}}, {"prompts": "abc"})
    for prompts in [{"default_prompt_name": ["a"]}, *({"default_prompt_name": "a"} | name for name in names)]:
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
        with pytest.raises(ValueError, match="default_prompt_name is"):
            LLM(tmp_path, **OPTIONS)
    (tmp_path / "config_sentence_transformers.json").unlink()
    for options in ({"text": {"max_length": 3}}, {"chat_template": {"max_length": 3}}, {"chat_template": []}):
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"processing_kwargs": options}))
        with pytest.raises(ValueError, match=r"sentence_bert_config.json is"):
            LLM(tmp_path, **OPTIONS)
    edit_json(tmp_path / "config.json", id2label={"0": "a", "1": "b", "5": "c"}, label2id=None)
    with pytest.raises(ValueError, match=r"id2label of config.json has the numbers \[0, 1, 5\]"):
        LLM(tmp_path, **OPTIONS)


def test_a_reward_is_the_only_score(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "one", "qwen2", 1)
    with LLM(tmp_path / "one", **OPTIONS) as llm:
        rewards = llm.reward(PROMPTS[:3])
    assert rewards == pytest.approx([float(expect(model, prompt)[0]) for prompt in PROMPTS[:3]], abs=5e-4)
    save_classifier(tmp_path / "three", "qwen2", 3)
    with LLM(tmp_path / "three", **OPTIONS) as llm, pytest.raises(ValueError, match="has 3 labels"):
        llm.reward(PROMPTS[:1])


def test_the_example_shows_the_answers_with_the_highest_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_text_classifier(tmp_path, 1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    path = ROOT / "examples" / "best_of_n.py"
    monkeypatch.setattr(sys, "argv", [str(path), "--reward-model", str(tmp_path), "-n", "3"])
    runpy.run_path(str(path), run_name="__main__")
    shown = capsys.readouterr().out.splitlines()
    questions = shown[::2]
    found = shown[1::2]
    assert len(questions) == len(found) == 3
    for question, line in zip(questions, found, strict=True):
        reward = line.split(" of ")[0]
        answer = ast.literal_eval(line.split(": ", 1)[1])
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        expected = expect(model, tokenizer.apply_chat_template(messages, return_dict=False))
        assert float(reward) == pytest.approx(float(expected[0]), abs=0.05)  # the example runs in bfloat16 or float32
        assert line.split(" to ")[1].startswith(f"{reward.strip()}:"), "the highest"


def test_what_a_model_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    save_classifier(tmp_path / "scores", "qwen3", 2)
    with LLM(tmp_path / "scores", **OPTIONS) as llm:
        with pytest.raises(ValueError, match="makes no vectors: use classify"):
            llm.embed(PROMPTS)
        with pytest.raises(ValueError, match=r"no LM head, so it can only score: use classify\(\)"):
            llm.generate(PROMPTS, SamplingParams(max_tokens=1))
        with pytest.raises(ValueError, match=r"score\.weight"):
            llm.load_weights([("score.weight", torch.zeros(2, 64))])
    save_random(tmp_path / "text")
    with LLM(tmp_path / "text", **OPTIONS) as llm, pytest.raises(ValueError, match="no head that scores texts"):
        llm.classify(PROMPTS)
    edit_json(tmp_path / "scores" / "config.json", id2label={"0": "a", "1": "b", "2": "c"}, label2id=None)
    with pytest.raises(ValueError, match=r"shapes .*\[2, 64\].* 3 labels"):
        LLM(tmp_path / "scores", **OPTIONS)
    edit_json(tmp_path / "scores" / "config.json", architectures=["Qwen3ForTokenClassification"])
    with pytest.raises(ValueError, match="Qwen3ForTokenClassification"):
        LLM(tmp_path / "scores", **OPTIONS)


FORWARD = {"method": "forward", "method_output_name": "logits"}
DOCUMENTS = ["the capital of Spain is Madrid", "5 + 7 = 12", "count from 3 to 9", "the capital of Peru is Lima"]
QUERY = "what is the capital of Spain?"


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reranker")
    save_text_classifier(folder, 1)
    return folder


PAIR_TEMPLATE = """{% for m in messages %}{% if m.role == 'system' %}Find: {{ m.content }}
{% elif m.role == 'query' %}<Q>{{ m.content }}{% else %}<D>{{ m.content }}{% endif %}{% endfor %} relevant:"""


@pytest.mark.parametrize("template", [None, "chat", PAIR_TEMPLATE], ids=["none", "the model's", "of pairs"])
@pytest.mark.parametrize("instruction", [None, "given ", "default "])
def test_pairs_are_scored_as_a_cross_encoder_scores_them(
    template: str | None, instruction: str | None, reranker: Path, tmp_path: Path
) -> None:
    cross_encoder = pytest.importorskip("sentence_transformers").CrossEncoder
    shutil.copytree(reranker, tmp_path, dirs_exist_ok=True)
    if template is None:
        (tmp_path / "chat_template.jinja").unlink()
    elif template != "chat":
        (tmp_path / "chat_template.jinja").write_text(template)
    given = instruction if instruction == "given " else None
    encoder = cross_encoder(str(tmp_path), device="cpu")
    if instruction == "default ":
        encoder.activation_fn = torch.nn.Identity()
        encoder.prompts = {"a": instruction}
        encoder.default_prompt_name = "a"
        encoder.save_pretrained(str(tmp_path))
    expected = encoder.predict([(QUERY, document) for document in DOCUMENTS], prompt=given, show_progress_bar=False)
    with LLM(tmp_path, **OPTIONS) as llm:
        ranked = llm.rerank(QUERY, DOCUMENTS, instruction=given)
        assert llm.rerank(QUERY, []) == llm.rerank(QUERY, ()) == []
        for wrong in (None, "abc", 5, [5], iter(DOCUMENTS)):
            with pytest.raises(ValueError, match=r"documents is .*it must be a list of strings"):
                llm.rerank(QUERY, wrong)
    assert [one.index for one in ranked] == np.argsort(-np.asarray(expected), kind="stable").tolist()
    found = {one.index: one.relevance_score for one in ranked}
    np.testing.assert_allclose([found[i] for i in range(len(DOCUMENTS))], expected, atol=2e-4)
    assert all(one.document == DOCUMENTS[one.index] for one in ranked)


LONG = [text * count for text, count in zip(DOCUMENTS, (1, 3, 9, 2), strict=True)]


@pytest.mark.parametrize(
    ("template", "file", "change"),
    [
        ("", "tokenizer_config.json", {"model_max_length": 20}),
        ("", "sentence_bert_config.json", {"max_seq_length": 9}),
        ("", "config.json", {"max_position_embeddings": 24}),
        ("chat", "tokenizer_config.json", {"model_max_length": 30}),
        ("pairs", "sentence_bert_config.json", {"max_seq_length": 25}),
        ("pairs", "sentence_bert_config.json", {"max_seq_length": 3}),
        ("pairs", "tokenizer_config.json", {"model_max_length": 25, "truncation_side": "left"}),
        ("pairs", "tokenizer_config.json", {"model_max_length": 25, "chat_template": None}),
        ("chat", "sentence_bert_config.json", {"modality_config": {"text": FORWARD}, "max_seq_length": 20}),
        (
            "pairs",
            "sentence_bert_config.json",
            {"processing_kwargs": {"chat_template": {"restore_suffix": False}}},
        ),
    ],
    ids=str,
)
def test_longer_pairs_are_cut_as_a_cross_encoder_cuts_them(
    template: str, file: str, change: dict[str, Any], reranker: Path, tmp_path: Path
) -> None:
    """At the limit that the folder's files state, which are written by sentence-transformers and then changed."""
    cross_encoder = pytest.importorskip("sentence_transformers").CrossEncoder
    shutil.copytree(reranker, tmp_path, dirs_exist_ok=True)
    if template != "chat":
        (tmp_path / "chat_template.jinja").unlink()
    if template == "pairs":
        (tmp_path / "chat_template.jinja").write_text(PAIR_TEMPLATE)
    cross_encoder(str(tmp_path), device="cpu").save_pretrained(str(tmp_path))
    edit_json(tmp_path / "tokenizer_config.json", model_max_length=35)
    edit_json(tmp_path / file, **change)
    encoder = cross_encoder(str(tmp_path), device="cpu")
    expected = encoder.predict([(QUERY, document) for document in LONG], show_progress_bar=False)
    with LLM(tmp_path, **{**OPTIONS, "max_model_len": None}) as llm:
        found = {one.index: one.relevance_score for one in llm.rerank(QUERY, LONG)}
    np.testing.assert_allclose([found[i] for i in range(len(LONG))], expected, atol=2e-4)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"modality_config": {"message": FORWARD}}, "has no chat template, and modality_config"),
        ({"modality_config": {"text": {**FORWARD, "method": "encode"}}}, "modality_config in .*'encode'"),
        ({"modality_config": {"image": FORWARD}}, "modality_config in .*image"),
        ({"do_lower_case": True}, "do_lower_case is True"),
        ({"max_seq_length": 0}, "max_seq_length is 0"),
    ],
    ids=str,
)
def test_what_a_folder_asks_of_pairs_and_cannot_be_had_is_refused(
    change: dict[str, Any], error: str, reranker: Path, tmp_path: Path
) -> None:
    shutil.copytree(reranker, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "modules.json").write_text("[]")
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(change))
    with pytest.raises(ValueError, match=error), LLM(tmp_path, **OPTIONS) as llm:
        llm.rerank(QUERY, DOCUMENTS)


@pytest.mark.parametrize(("activation", "limit"), [("Sigmoid", 4096), ("Identity", 30)])
@pytest.mark.parametrize("opens", [False, True])
def test_two_tokens_that_the_folder_names_are_compared_as_in_a_cross_encoder(
    activation: str, limit: int, opens: bool, tmp_path: Path
) -> None:
    """After the folder's own template, which may open an answer, with its activation, and cut at its limit."""
    encoders = pytest.importorskip("sentence_transformers")
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    options = {"chat_template": {"add_generation_prompt": opens}}
    kind = {"transformer_task": "text-generation", "model_kwargs": {"dtype": "float32"}}
    kind["processor_kwargs"] = {"model_max_length": limit}
    body = Transformer(str(BOX_MODEL), **kind, processing_kwargs=options)
    modules = [body, LogitScore(77, 78)]
    encoder = encoders.CrossEncoder(modules=modules, device="cpu", activation_fn=getattr(torch.nn, activation)())
    encoder.save_pretrained(str(tmp_path))
    expected = encoder.predict([(QUERY, document) for document in LONG], show_progress_bar=False)
    with LLM(tmp_path, **OPTIONS) as llm:
        found = {one.index: one.relevance_score for one in llm.rerank(QUERY, LONG)}
    np.testing.assert_allclose([found[i] for i in range(len(LONG))], expected, atol=2e-4, rtol=2e-4)


def test_a_template_that_leaves_a_text_of_the_pair_out_is_refused(reranker: Path, tmp_path: Path) -> None:
    shutil.copytree(reranker, tmp_path, dirs_exist_ok=True)
    for roles, lost in (("query", "document"), ("document", "query"), ("user", "query")):
        (tmp_path / "chat_template.jinja").write_text(
            "{% for m in messages if m.role in ['" + roles + "'] %}{{ m.content[:3] }}{% endfor %}."
        )
        with LLM(tmp_path, **OPTIONS) as llm, pytest.raises(ValueError, match=f"leaves out the role '{lost}'"):
            llm.rerank(QUERY, DOCUMENTS)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[-2].content }}|{{ messages[-1].content }}")
    with LLM(tmp_path, **OPTIONS) as llm:
        assert llm.rerank(QUERY, DOCUMENTS)
        with pytest.raises(ValueError, match="leaves out the role 'system'"):
            llm.rerank(QUERY, DOCUMENTS, instruction="find it")


def test_the_reranker_compares_yes_and_no() -> None:
    """Its scores are those of the two tokens' logits at the end of transformers' prompt."""
    from nanovllm.features.scoring.rerank import INSTRUCTION, TEMPLATE

    documents = ["12 + 5 is 17.", "apples", "17 and 4"]
    with LLM("tiny-qwen3", dtype="float32") as llm:
        ranked = llm.rerank("what is 12 + 5?", documents)
        asked = llm.rerank("what is 12 + 5?", documents, instruction="Find the sum")
        folder = llm.engine.facts.origin
    assert [one.relevance_score for one in asked] != [one.relevance_score for one in ranked]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert sorted(one.index for one in ranked) == [0, 1, 2]
    for one in ranked:
        text = TEMPLATE.format(instruction=INSTRUCTION, query="what is 12 + 5?", document=documents[one.index])
        likelihoods = []
        for word in ("yes", "no"):
            answer = tokenizer.encode(word, add_special_tokens=False)
            ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False) + answer])
            with torch.inference_mode():
                logprobs = model(ids).logits[0].log_softmax(-1)
            rows = range(ids.shape[1] - 1 - len(answer), ids.shape[1] - 1)
            likelihoods.append(sum(logprobs[row, token].item() for row, token in zip(rows, answer, strict=True)))
        yes, no = likelihoods
        assert one.relevance_score == pytest.approx(1 / (1 + np.exp(no - yes)), abs=1e-4)


def test_a_model_that_is_no_reranker_says_so(reciter: Path) -> None:
    with LLM(reciter, **OPTIONS) as llm, pytest.raises(ValueError, match="is no reranker"):
        llm.rerank(QUERY, DOCUMENTS)
