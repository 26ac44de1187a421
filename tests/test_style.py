"""The tour's source keeps the rules that make it readable."""

import ast
import pathlib
import re
import tokenize

import kauldron_tour
import pytest

PATH = pathlib.Path(kauldron_tour.__file__)
SOURCE = PATH.read_text()
TREE = ast.parse(SOURCE)
LINES = SOURCE.splitlines()


def _decorator(function):
  """Returns the `@section(...)` of a function, or None."""
  for node in function.decorator_list:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "section":
      return node
  return None


FUNCTIONS = {
    node.name: node for node in TREE.body
    if isinstance(node, ast.FunctionDef) and _decorator(node)
}
each_section = pytest.mark.parametrize("name", FUNCTIONS)


def _code_lines(node):
  """Returns how many lines a function's body has, docstring and blanks out."""
  first, last = node.body[1].lineno, node.body[-1].end_lineno
  return sum(bool(line.strip()) for line in LINES[first - 1:last])


def test_sections_are_listed_in_order():
  assert list(FUNCTIONS) == kauldron_tour.SECTIONS


def test_titles_are_unique_and_short():
  titles = [_decorator(node).args[0].value for node in FUNCTIONS.values()]
  assert len(set(titles)) == len(titles)
  assert max(map(len, titles)) <= 60


@each_section
def test_docstring_claims_then_explains(name):
  claim, *why = ast.get_docstring(FUNCTIONS[name]).splitlines()
  assert claim.endswith("."), claim
  assert len(claim) <= 76, claim
  assert len([line for line in why if line]) <= 6, why


@each_section
def test_body_is_short(name):
  assert _code_lines(FUNCTIONS[name]) <= 25


@each_section
def test_section_proves_something_and_says_what_it_saw(name):
  proofs = [n for n in ast.walk(FUNCTIONS[name]) if isinstance(n, ast.Assert)]
  assert proofs
  assert all(proof.msg for proof in proofs)
  assert not any(isinstance(p.test, ast.Constant) for p in proofs)


@each_section
def test_section_is_a_percent_cell_with_its_number(name):
  number = kauldron_tour.SECTIONS.index(name)
  above = LINES[:FUNCTIONS[name].lineno]
  cells = [line for line in above if line.startswith("# %% ")]
  assert re.match(rf"# %% {number}\. \S", cells[-1]), cells[-1]


def test_budgets():
  plumbing, after = SOURCE.split("\n# %% ")[1:3]
  assert plumbing.startswith("Plumbing") and after.startswith("0. ")
  assert len(plumbing.strip().splitlines()) <= 120
  assert len(LINES) <= 1400


def test_comments_are_about_one_in_five_code_lines():
  with tokenize.open(PATH) as file:
    tokens = list(tokenize.generate_tokens(file.readline))
  comments = sum(token.type == tokenize.COMMENT for token in tokens)
  code = len({t.start[0] for t in tokens if t.type == tokenize.NAME})
  assert comments <= code / 5, (comments, code)


def test_it_can_be_pasted():
  words = {node.id for node in ast.walk(TREE) if isinstance(node, ast.Name)}
  assert not words & {"__file__", "get_ipython", "input"}
  future = [n for n in TREE.body if getattr(n, "module", "") == "__future__"]
  assert not future
  bare = [node for node in TREE.body[1:] if isinstance(node, ast.Expr)
          and isinstance(node.value, ast.Constant)]
  assert not bare, "a bare string at the top level"
  first_import = min(n.lineno for n in TREE.body if isinstance(n, ast.Import))
  assert not any("%%" in line for line in LINES[:first_import])


def test_every_function_has_a_docstring():
  for node in TREE.body:
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
      assert ast.get_docstring(node), node.name
