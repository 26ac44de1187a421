"""Which checks of test_kauldron.py are needed: those that some fault needs.

A check is an `assert`, a `with pytest.raises(...)` or a comparison of
`np.testing`. It is needed if, under some fault, it is the only one of its test
to fail, over all rows of the test's table, and nothing else ends the test: if
it were deleted, nobody would notice that fault.

A fault changes one statement of one function of Kauldron, or of a package
beside it (a mutant). mutants.txt has a list of them, each with the checks that
alone notice it. What no such change brings about, a function below breaks.

  python tests/mutants.py                     # the faults on record: minutes
  python tests/mutants.py --test test_remainder test_transform
  python tests/mutants.py --search kauldron/ optax/  # more faults: hours

The first two make each fault, run its tests, and print the checks that no fault
needs. The exit status is 0 if there are none, if each fault is noticed by the
checks that it was recorded for, and if all tests pass without a fault. With
--search, what is found for other checks is added to mutants.txt; it tries
changes of lines which the test executes, in the files of which the paths start
so.
"""

import argparse
import ast
import builtins
import contextlib
import contextvars
import copy
import dataclasses
import gc
import inspect
import io
import itertools
import os
import pathlib
import random
import sys
import tempfile
import threading
import time
import types
import warnings

# Before JAX is imported. Most of the time goes into compiling.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TQDM_DISABLE", "1")

import conftest  # noqa: F401  The settings of the tests come first.
import flax
import jax
import kauldron
from kauldron import kd
from kauldron.konfig import fake_import_utils
from kauldron.ktyping import config
from proofs import is_check
from proofs import OutOfTime
from proofs import time_limit
import pytest

import kauldron_tour as tour

TESTS = pathlib.Path(__file__).parent
RECORD = TESTS / "mutants.txt"
PACKAGES = pathlib.Path(kauldron.__file__).parents[1]
ELSEWHERE = "an error outside the checks"
TIME_LIMIT = 10  # Seconds that a test may take under a fault.


# The tests


class Noting(ast.NodeTransformer):
  """Puts each check into `with noting(check):`, where it has its source."""

  def __init__(self):
    self.checks = []

  def visit(self, node):
    self.generic_visit(node)
    if not is_check(node):
      return node
    check = ast.unparse(node).splitlines()[0]
    assert check not in self.checks, f"it is there twice: {check}"
    self.checks.append(check)
    block = ast.parse(f"with noting({check!r}):\n  pass").body[0]
    block.body = [node]
    return ast.copy_location(block, node)


class Suite:
  """The tests, with checks that note their failure and go on."""

  def __init__(self):
    path = TESTS / "test_kauldron.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    self.checks = {}  # Test -> its checks.
    self.shared = set()  # The fixtures that are made once.
    self.fixtures = set()
    for node in tree.body:
      if not isinstance(node, ast.FunctionDef):
        continue
      decorators = " ".join(map(ast.unparse, node.decorator_list))
      if "pytest.fixture" in decorators:
        node.decorator_list = []
        self.fixtures.add(node.name)
        if "module" in decorators:
          self.shared.add(node.name)
      elif node.name.startswith("test_"):
        transformer = Noting()
        transformer.visit(node)
        self.checks[node.name] = transformer.checks
    # Its configs say "test_kauldron:Backbone".
    self.module = sys.modules["test_kauldron"] = types.ModuleType(
        "test_kauldron")
    self.module.__file__ = str(path)
    self.failed = set()
    self.module.noting = self.noting
    code = compile(ast.fix_missing_locations(tree), path, "exec")
    exec(code, vars(self.module))

  @contextlib.contextmanager
  def noting(self, check):
    try:
      yield
    except (Exception, pytest.fail.Exception) as error:
      self.failed.add(check)
      del error

  def rows(self, test):
    """Returns the arguments that a test has from its tables."""
    tables = []
    for mark in getattr(getattr(self.module, test), "pytestmark", []):
      names, rows = mark.args
      if "," in names:
        names = [name.strip() for name in names.split(",") if name.strip()]
        tables.append([dict(zip(names, row, strict=True)) for row in rows])
      else:
        tables.append([{names: row} for row in rows])
    for row in itertools.product(*tables):
      yield {name: value for part in row for name, value in part.items()}

  def run(self, test, made, folder):
    """Runs all rows of a test; returns what has failed.

    `made` keeps the fixtures that are made once, or the error of one of them.
    """
    self.failed = set()
    for row in self.rows(test):
      with pytest.MonkeyPatch.context() as monkeypatch:
        given = row | {
            "monkeypatch": monkeypatch, "tmp_path": new_folder(folder),
            "capsys": types.SimpleNamespace(readouterr=lambda: (
                types.SimpleNamespace(out=sys.stdout.getvalue()))),
            "tmp_path_factory": types.SimpleNamespace(
                mktemp=lambda _: new_folder(folder))}
        try:
          self.call(test, given, made)
        except pytest.skip.Exception:
          pass
        except (Exception, pytest.fail.Exception, OutOfTime, SystemExit):
          self.failed.add(ELSEWHERE)
    return self.failed

  def made_once(self, name):
    """Returns the fixtures of a test that are made once for all tests."""
    names = set(inspect.signature(getattr(self.module, name)).parameters)
    if "continued" in names:
      names.add("run")
    return names & self.shared

  def call(self, name, given, made):
    """Calls a test or a fixture with what it asks for."""
    function = getattr(self.module, name)
    return function(**{
        key: given[key] if key in given else self.fixture(key, given, made)
        for key in inspect.signature(function).parameters})

  def fixture(self, name, given, made):
    """Returns a fixture; one for all tests is made only once."""
    if name not in self.shared:
      return self.call(name, given, made)
    if name not in made:
      try:
        made[name] = self.call(name, given, made), None
      except Exception as error:
        made[name] = None, error
    value, error = made[name]
    if error:
      raise error
    return value


def new_folder(folder):
  return pathlib.Path(tempfile.mkdtemp(dir=folder))


# Faults


def header(statement):
  """Returns a statement without the statements inside it, as a tree.

  None if nothing remains to be changed.
  """
  match statement:
    case ast.FunctionDef() | ast.ClassDef() | ast.Try() | ast.Pass():
      return None
    case ast.Expr(ast.Constant()):
      return None
  found = copy.copy(statement)
  if hasattr(found, "body"):
    found.body = [ast.Pass()]
    if hasattr(found, "orelse"):
      found.orelse = []
  if hasattr(found, "cases"):
    return None
  return found


def text_of(tree):
  """Returns the source of a header, in one line."""
  return ast.unparse(tree).removesuffix("\n    pass")


def header_from(text):
  """Returns the tree of which `text_of` is the text."""
  return ast.parse(text + ("\n  pass" if text.endswith(":") else "")).body[0]


@dataclasses.dataclass(frozen=True)
class Fault:
  """A statement of a function that is replaced by another."""

  path: str  # Of the file, below the folder with the packages.
  function: str  # With its classes: "Trainer.train".
  before: str
  after: str

  def __str__(self):
    return (f"{self.path} {self.function}\n"
            f"- {self.before}\n+ {self.after}\n")

  def code(self):
    """Returns file, name and first line of the function, and its new code."""
    path = PACKAGES / self.path
    tree = ast.parse(path.read_text(encoding="utf-8"))
    before = ast.dump(header_from(self.before))
    for name, function in functions_of(tree):
      if name != self.function:
        continue
      for parent in ast.walk(function):
        for statements in blocks_of(parent):
          for index, statement in enumerate(statements):
            found = header(statement)
            # Through the text, since unparse() may write it another way.
            if found is None or ast.dump(header_from(text_of(found))) != before:
              continue
            new = header_from(self.after)
            if hasattr(statement, "body") and hasattr(new, "body"):
              new.body = statement.body
              if hasattr(statement, "orelse"):
                new.orelse = statement.orelse
            statements[index] = ast.copy_location(new, statement)
            first = min([function.lineno] + [
                decorator.lineno for decorator in function.decorator_list])
            code = compile(
                ast.fix_missing_locations(tree), path, "exec",
                dont_inherit=True)
            key = (str(path), name, first)
            return key, codes_of(code)[key]
    raise LookupError("there is no such statement")


def blocks_of(node):
  """Returns the lists of statements in a node."""
  return [value for _, value in ast.iter_fields(node)
          if isinstance(value, list) and value
          and isinstance(value[0], ast.stmt)]


def functions_of(tree, prefix=""):
  """Yields name and tree of each function that is in no other function."""
  for node in tree.body:
    if isinstance(node, ast.FunctionDef):
      yield prefix + node.name, node
    elif isinstance(node, ast.ClassDef):
      yield from functions_of(node, f"{prefix}{node.name}.")
    elif isinstance(node, ast.If):
      yield from functions_of(node, prefix)


def codes_of(code):
  """Returns (file, name, first line) -> code, of all that is in a code."""
  found = {(code.co_filename, code.co_qualname, code.co_firstlineno): code}
  for constant in code.co_consts:
    if isinstance(constant, types.CodeType):
      found |= codes_of(constant)
  return found


class Functions:
  """The functions that are there, and their faults."""

  def __init__(self):
    gc.unfreeze()  # What is frozen would not be found.
    self.found = {}
    for function in gc.get_objects():
      if type(function) is types.FunctionType:
        code = function.__code__
        key = (code.co_filename, code.co_qualname, code.co_firstlineno)
        self.found.setdefault(key, []).append(function)
    gc.freeze()  # Each collection would take a second.

  @contextlib.contextmanager
  def broken(self, fault):
    """Makes a fault for as long as the block runs."""
    key, code = fault.code()
    functions = [function for function in self.found.get(key, ())
                 if function.__code__.co_freevars == code.co_freevars]
    if not functions:
      raise LookupError("there is no such function")
    codes = [function.__code__ for function in functions]
    for function in functions:
      function.__code__ = code
    try:
      yield
    finally:
      for function, code in zip(functions, codes, strict=True):
        function.__code__ = code


def run(suite, tests, starts=lambda test: None):
  """Returns test -> what has failed. `starts` is told when a test starts."""
  failures = {}
  made = {}
  imports = builtins.__import__
  jax.clear_caches()  # What is compiled already would not notice a fault.
  with (tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()), contextlib.chdir(folder)):
    for test in tests:
      starts(test)
      try:
        context = contextvars.copy_context()
        with time_limit(TIME_LIMIT):
          failures[test] = context.run(suite.run, test, made, folder)
      except OutOfTime:
        failures[test] = {ELSEWHERE}
      finally:
        config.CONFIG_OVERRIDES.clear()  # Failures leave them: tests/upstream.
        builtins.__import__ = imports
  return failures


# The search


OPPOSITE = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt,
    ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Add, ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}


def opposite(operator):
  return OPPOSITE.get(type(operator), type(operator))()


def changed(node):
  """Yields what may stand in the place of an expression."""
  match node:
    case ast.Compare(left, [operator], right):
      yield ast.Compare(left, [opposite(operator)], right)
    case ast.BoolOp(operator, values):
      yield ast.BoolOp(opposite(operator), values)
      for index in range(len(values)):
        yield values[index]
    case ast.BinOp(left, operator, right):
      yield ast.BinOp(left, opposite(operator), right)
      yield left
      yield right
    case ast.UnaryOp(_, operand):
      yield operand
    case ast.Constant(bool(value)):
      yield ast.Constant(not value)
    case ast.Constant(int(value)):
      yield ast.Constant(value + 1)
      yield ast.Constant(value - 1)
    case ast.Constant(float(value)):
      yield ast.Constant(2 * value + 1)
    case ast.Constant(str(value)):
      yield ast.Constant("fault")
      if value:
        yield ast.Constant("")
    case ast.JoinedStr():
      yield ast.Constant("fault")
    case ast.Call(function, arguments, keywords):
      for argument in [*arguments, *(k.value for k in keywords)]:
        if not isinstance(argument, ast.Starred):
          yield argument
      if isinstance(function, ast.Attribute):
        yield function.value
      for index in range(len(arguments)):
        left = arguments[:index] + arguments[index + 1:]
        yield ast.Call(function, left, keywords)
      for index in range(len(keywords)):
        left = keywords[:index] + keywords[index + 1:]
        yield ast.Call(function, arguments, left)
      if len(arguments) > 1:
        yield ast.Call(function, arguments[::-1], keywords)
    case ast.IfExp(_, body, orelse):
      yield body
      yield orelse
    case ast.Tuple(items, ast.Load()) | ast.List(items, ast.Load()):
      yield type(node)(items[1:], ast.Load())
      yield type(node)(items[:-1], ast.Load())
      yield type(node)(items[::-1], ast.Load())
    case ast.Dict(keys, values):
      yield ast.Dict(keys[1:], values[1:])
      yield ast.Dict(keys[:-1], values[:-1])
    case ast.Attribute(value, _, ast.Load()):
      yield value
    case ast.Subscript(value, _, ast.Load()):
      yield value
    case ast.comprehension(target, iterator, conditions, is_async) if (
        conditions):
      yield ast.comprehension(target, iterator, [], is_async)


class Replace(ast.NodeTransformer):
  """Replaces one node."""

  def __init__(self, old, new):
    self.old, self.new = old, new

  def visit(self, node):
    return self.new if node is self.old else self.generic_visit(node)


def mutants_of(statement):
  """Yields texts that may stand in the place of a header."""
  match statement:
    case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Assert():
      yield "pass"
    case ast.Continue():
      yield "break"
    case ast.Assign([ast.Attribute() | ast.Subscript()]):
      yield "pass"
  match statement:
    case ast.Raise():
      yield "raise RuntimeError('fault')"
    case ast.Return(value) if value is not None:
      yield "return None"
      yield "return 0"
      yield f"return ({ast.unparse(value)},)"
      yield f"return not ({ast.unparse(value)})"
    case ast.Assign(targets):
      yield f"{' = '.join(map(ast.unparse, targets))} = None"
    case ast.If(test):
      yield f"if not ({ast.unparse(test)}):"
      yield "if True:"
      yield "if False:"
    case ast.While(test):
      yield "while False:"
    case ast.For(target, iterator):
      loop = f"for {ast.unparse(target)} in "
      yield f"{loop}():"
      yield f"{loop}list({ast.unparse(iterator)})[1:]:"
      yield f"{loop}list({ast.unparse(iterator)})[:-1]:"
      yield f"{loop}list({ast.unparse(iterator)})[::-1]:"
  size = len(list(ast.walk(statement)))
  for index in range(size):
    number = len(list(changed(list(ast.walk(statement))[index])))
    for choice in range(number):
      tree = copy.deepcopy(statement)
      node = list(ast.walk(tree))[index]
      new = list(changed(node))[choice]
      yield text_of(ast.fix_missing_locations(Replace(node, new).visit(tree)))


def faults_of(path, lines):
  """Yields (fault, its lines) for the statements on some lines of a file."""
  tree = ast.parse((PACKAGES / path).read_text(encoding="utf-8"))
  for name, function in functions_of(tree):
    for statement in ast.walk(function):
      if not isinstance(statement, ast.stmt) or statement is function:
        continue
      found = header(statement)
      if found is None:
        continue
      end = statement.end_lineno
      if hasattr(statement, "body"):
        end = statement.body[0].lineno - 1
      here = lines & set(range(statement.lineno, max(
          end, statement.lineno) + 1))
      if not here:
        continue
      before = text_of(found)
      for after in dict.fromkeys(mutants_of(found)):
        try:
          header_from(after)
        except SyntaxError:
          continue
        if after != before and "\n" not in before + after:
          yield Fault(path, name, before, after), here


def executed(suite, tests, paths):
  """Returns test -> the (file, line) that it executes, and its seconds.

  Its fixtures are included. The quickest test comes first.
  """
  lines = {test: set() for test in tests}
  starts = []  # (test, time).
  names = {}

  def trace(frame, event, argument):
    del argument
    filename = frame.f_code.co_filename
    if filename not in names:
      path = pathlib.Path(filename)
      inside = path.is_relative_to(PACKAGES) and str(
          path.relative_to(PACKAGES))
      names[filename] = inside and inside.startswith(tuple(paths)) and inside
    if not names[filename]:
      return None
    if event == "line" and starts:
      lines[starts[-1][0]].add((names[filename], frame.f_lineno))
    return trace

  groups = {}
  for test in tests:
    groups.setdefault(frozenset(suite.made_once(test)), []).append(test)
  for made, group in groups.items():
    threading.settrace(trace)
    sys.settrace(trace)
    try:
      run(suite, group, lambda test: starts.append((test, time.time())))
    finally:
      sys.settrace(None)
      threading.settrace(None)
    if made:  # The first test has made them for all.
      for test in group:
        lines[test] |= lines[group[0]]
  ends = [start for _, start in starts[1:]] + [time.time()]
  seconds = {test: end - start
             for (test, start), end in zip(starts, ends, strict=True)}
  return {test: (lines[test], seconds[test])
          for test in sorted(lines, key=seconds.get)}


def search(suite, missing, paths, seconds, most):
  """Looks for faults for missing checks, a set of (test, check)."""
  print("looking at what the tests execute", flush=True)
  lines = executed(suite, sorted({test for test, _ in missing}), paths)
  functions = Functions()
  seconds_of = {test: taken for test, (_, taken) in lines.items()}
  lines = {test: places for test, (places, _) in lines.items()}
  users = {}  # (file, line) -> the tests that execute it.
  for test, executes in lines.items():
    for place in executes:
      users.setdefault(place, set()).add(test)
  shuffle = random.Random(0)
  tried = set()
  stop = time.time() + seconds
  for test in lines:
    if not any(name == test for name, _ in missing):
      continue
    candidates = []
    for path in sorted({path for path, _ in lines[test]}):
      wanted = {line for other, line in lines[test] if other == path}
      for fault, here in faults_of(path, wanted):
        rarity = min(len(users[path, line]) for line in here)
        candidates.append(
            (rarity * (0.5 + shuffle.random()), str(fault), fault, here))
    candidates.sort(key=lambda candidate: candidate[:2])
    number = 0
    for *_, fault, here in candidates:
      if not any(name == test for name, _ in missing) or (
          number >= most or time.time() > stop):
        break
      if fault in tried:
        continue
      tried.add(fault)
      number += 1
      tests = [test]
      left = 0.5  # Seconds for other tests that may notice it, too.
      others = set.union(*(users[fault.path, line] for line in here))
      for name in sorted(others & {name for name, _ in missing} - {test},
                         key=seconds_of.get):
        if suite.made_once(name) & suite.made_once(test):
          tests.append(name)
        elif left > seconds_of[name]:
          left -= seconds_of[name]
          tests.append(name)
      try:
        with functions.broken(fault):
          failures = run(suite, tests)
      except (LookupError, SyntaxError, ValueError):
        continue
      proved = missing & alone(failures)
      if proved:
        missing -= proved
        add(fault, proved)
        print(f"{fault}  {sorted(proved)}", flush=True)
    left = sum(name == test for name, _ in missing)
    print(f"{test}: {number} faults tried, {left} checks left", flush=True)


def alone(failures):
  """Returns the (test, check) in which one check is all that fails."""
  return {(test, check) for test, failed in failures.items()
          if len(failed) == 1 for check in failed - {ELSEWHERE}}


# Faults by hand: in what is no function's statement


BY_HAND = {}  # Function that breaks something -> the tests that notice it.


def noticed_by(*tests):
  """Registers a function that breaks something, for its tests."""

  def register(function):
    BY_HAND[function] = tests
    return function

  return register


@noticed_by("test_workers_are_sixteen_by_default")
def there_is_one_worker(monkeypatch):
  field = kd.data.py.DataSource.__dataclass_fields__["num_workers"]
  monkeypatch.setattr(field, "default", 1)


@noticed_by("test_loss_may_be_the_metric_that_decides")
def a_loss_is_no_metric(monkeypatch):
  monkeypatch.setattr(kd.losses, "Loss", object)


@noticed_by("test_class_derives_from")
def a_loss_is_no_loss(monkeypatch):
  monkeypatch.setattr(kd.losses, "L2", object)


@noticed_by("test_summary_is_a_metric")
def a_summary_is_no_metric(monkeypatch):
  monkeypatch.setattr(kd.summaries, "ShowTexts", object)


@noticed_by("test_each_module_gets_another_key_each_time")
def all_modules_get_one_key(monkeypatch):
  def same_key(self, name):
    return self.scope.rngs[name].rng

  monkeypatch.setattr(flax.linen.Module, "make_rng", same_key)


@noticed_by("test_quoted_config_for_finetuning")
def a_new_task_has_the_old_labels(monkeypatch):
  monkeypatch.setattr(tour, "new_task_images", tour.train_images)


@noticed_by("test_public_name")
def a_name_is_no_function(monkeypatch):
  monkeypatch.setattr(kd.optim, "ema_params", "moved")


@noticed_by("test_type_has_its_name", "test_tf_type_takes_no_numpy",
            "test_x_type_takes_arrays_of_any_library")
def a_type_has_another_name(monkeypatch):
  for name in ("Float", "TfFloat", "XFloat"):
    made = getattr(kd.ktyping, name)
    monkeypatch.setattr(kd.ktyping, name, type(made)(
        "Real", array_types=made.array_types, dtype=made.dtype))


@noticed_by("test_subclass_of_a_checked_dataclass_is_not_checked",
            "test_types_of_fields_are_not_checked")
def every_dataclass_is_checked(monkeypatch):
  for name in ("Derived", "Collected"):
    made = getattr(sys.modules["test_kauldron"], name)
    monkeypatch.setattr(
        made, "__init__", kd.ktyping.typechecked(made.__init__))


@noticed_by("test_metrics_are_hashable")
def metrics_have_the_hash_of_an_object(monkeypatch):
  monkeypatch.setattr(kd.metrics.Norm, "__hash__", object.__hash__)


@noticed_by("test_profiler_traces_so_long")
def profiling_starts_later(monkeypatch):
  defaults = kd.inspect.Profiler.__init__.__kwdefaults__
  monkeypatch.setitem(defaults, "first_profile", 100)


@noticed_by("test_mock_modules_replaces_every_module")
def modules_stay_replaced(monkeypatch):
  test = vars(sys.modules["test_kauldron"])
  for name, value in list(test.items()):
    if isinstance(value, types.ModuleType):
      monkeypatch.setitem(test, name, value)  # For the tests that follow.
  mocked = fake_import_utils._mock_modules
  entered = []

  def enter(**arguments):
    entered.append(mocked(**arguments))
    entered[-1].__enter__()
    return contextlib.nullcontext()

  monkeypatch.setattr(fake_import_utils, "_mock_modules", enter)


@noticed_by("test_light_parts_import_no_tensorflow")
def python_imports_tensorflow(monkeypatch):
  every_process_runs(monkeypatch, "sys.modules['tensorflow'] = sys")


@noticed_by("test_evaluator_is_a_dataclass_already")
def an_evaluator_may_be_decorated(monkeypatch):
  test = sys.modules["test_kauldron"]

  class Evaluator(test.ScaledEvaluator):
    pass

  del Evaluator.__setattr__, Evaluator.__delattr__
  monkeypatch.setattr(test, "ScaledEvaluator", Evaluator)


def every_process_runs(monkeypatch, line):
  """Has each new Python run a line first."""
  folder = new_folder(None)
  (folder / "sitecustomize.py").write_text(f"import sys\n{line}\n")
  monkeypatch.setenv("PYTHONPATH", str(folder))


# The record


def add(fault, proved):
  """Writes down a fault, and for which checks it is needed."""
  with open(RECORD, "a", encoding="utf-8") as record:
    record.write(f"{fault}")
    for test, check in sorted(proved):
      record.write(f"  {test}: {check}\n")


def recorded():
  """Yields each fault that is written down, with its (test, check)."""
  if not RECORD.exists():
    return
  lines = [line for line in RECORD.read_text(encoding="utf-8").splitlines()
           if line and not line.startswith("#")]
  while lines:
    path, function = lines.pop(0).split()
    before, after = lines.pop(0)[2:], lines.pop(0)[2:]
    proved = set()
    while lines and lines[0].startswith("  "):
      test, _, check = lines.pop(0).strip().partition(": ")
      proved.add((test, check))
    yield Fault(path, function, before, after), proved


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--test", nargs="+")
  parser.add_argument("--search", nargs="+", metavar="PATH")
  parser.add_argument("--seconds", type=float, default=3600)
  parser.add_argument("--most", type=int, default=300,
                      help="how many faults to try for a test")
  options = parser.parse_args()
  warnings.simplefilter("ignore")
  suite = Suite()
  tests = options.test or list(suite.checks)
  missing = {(test, check) for test in tests for check in suite.checks[test]}
  total = len(missing)
  if options.search:
    for _, proved in recorded():
      missing -= proved
    search(suite, missing, options.search, options.seconds, options.most)
    return 0
  problems = without_fault(suite, tests)
  functions = Functions()
  for fault, proved in recorded():
    proved = {(test, check) for test, check in proved if test in tests}
    if not proved:
      continue
    try:
      with functions.broken(fault):
        failures = run(suite, sorted({test for test, _ in proved}))
    except LookupError as error:
      print(f"{fault}  {error}")
      continue
    found = alone(failures)
    for test, check in sorted(proved - found):
      print(f"{fault}  is not noticed by {test} alone: {check}")
      problems += 1
    missing -= found
  by_record = total - len(missing)
  problems += faults_by_hand(suite, tests, missing)
  for test, check in sorted(missing):
    print(f"{test}: no fault needs {check}")
    problems += 1
  problems += without_fault(suite, tests)
  print(f"{total} checks: {by_record} needed by a fault on record, "
        f"{total - len(missing) - by_record} by one by hand only, "
        f"{len(missing)} by none; {problems} problems")
  return int(problems > 0)


def faults_by_hand(suite, tests, missing):
  """Makes each fault by hand; returns the number of problems."""
  problems = 0
  for function, noticed in BY_HAND.items():
    concerned = [test for test in noticed if test in tests]
    if not concerned:
      continue
    with pytest.MonkeyPatch.context() as monkeypatch:
      function(monkeypatch)
      failures = run(suite, concerned)
    found = alone(failures)
    for test in set(concerned) - {test for test, _ in found}:
      print(f"{function.__name__} proves nothing for {test}: "
            f"{sorted(failures[test])}")
      problems += 1
    missing -= found
  return problems


def without_fault(suite, tests):
  """Returns how many tests fail although nothing is broken."""
  failing = {test: failed for test, failed in run(suite, tests).items()
             if failed}
  for test, failed in failing.items():
    print(f"{test} fails without a fault: {sorted(failed)}", flush=True)
  return len(failing)


if __name__ == "__main__":
  sys.exit(main())
