"""The Python blocks of each page of docs/ can be pasted in their order.

They parse, and every name is defined before. They run with the built-in model, or with a small random one, in place of
the model that the page names; but for the blocks of `NOT_RUN`.
"""

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.adapters import save_adapter
from helpers.paths import ROOT
from transformers import AutoModelForCausalLM

NOT_RUN = {
    ("answers", 0): "needs tokens of thinking: tests/api/test_reasoning.py runs the page",
    ("answers", 1): "as the first block",
    ("answers", 3): "as the first block",
    ("any-model", 0): "is for a model of the hub: tests/models/test_any_model.py has small ones",
    ("evaluation", 0): "reads its tasks from the Hugging Face hub: tests/api/test_lm_eval.py has tasks of its own",
    ("gguf", 0): "names large files: tests/gguf/test_files.py has small ones",
    ("parallelism", 0): "starts two processes: tests/ranks/test_replicas.py does",
    **{("programs", number): "needs a program, with which it was run by hand" for number in range(5)},
    ("ray", 0): "starts a cluster: tests/jobs/test_ray.py does",
}
"""The blocks that do not run here, by page and number, and why."""
HUB_ID = re.compile(r'"Qwen/[^"]+"')
TINY = ROOT / "nanovllm" / "assets" / "tiny-qwen3"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def list_bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that one node of the syntax tree binds."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in aliases)
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name


def find_undefined(blocks: list[str]) -> list[str]:
    """Return the names that a statement uses, and that neither it, an earlier statement nor Python defines."""
    known = {*dir(builtins), "__name__"}
    missing = []
    for statement in (statement for block in blocks for statement in ast.parse(block).body):
        bound = {name for node in ast.walk(statement) for name in list_bound(node)}
        # The targets of an assignment exist after it. What a function, a loop or a comprehension binds is its own.
        scope = getattr(statement, "value", None) or statement
        own = {name for node in ast.walk(scope) for name in list_bound(node)}
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
        missing += [node.id for node in names if node.id not in known | own]
        known |= bound
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_can_be_pasted_from_its_top(page: Path) -> None:
    assert not find_undefined(BLOCK.findall(page.read_text()))


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    if page.stem == "structured":
        pytest.importorskip("llguidance")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, block in enumerate(BLOCK.findall(page.read_text())):
        if (page.stem, number) in NOT_RUN:
            continue
        if "path/to/adapter" in block:
            save_adapter(AutoModelForCausalLM.from_pretrained(TINY), tmp_path)
        code = HUB_ID.sub('"tiny-qwen3"', block).replace("path/to/adapter", str(tmp_path))
        exec(compile(code, f"{page.name}, block {number}", "exec"), namespace)
    if "llm" in namespace:
        namespace["llm"].close()


def test_a_name_that_nothing_defines_is_found() -> None:
    assert find_undefined(["import a.b as c, d.e\nc, d, len", "x = x + y", "x\nwith d as (f, *g): f, g"]) == ["x", "y"]
    assert find_undefined(["def f(n): return [m for m in n] + late", "late = 1\nasync def g(): f(late)"]) == ["late"]
    assert find_undefined(["for i in range(3): print(i)\ntry: pass\nexcept OSError as e: print(e)\nprint(j)"]) == ["j"]
