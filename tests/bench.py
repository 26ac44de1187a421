"""Measures what the tour takes: `make bench`, or tests/bench.py --runs 5.

First whole processes, one at a time: importing JAX, importing all that the tour
imports, the tour, and the tour with a compilation cache that is kept. Then, in
one process, where the time of each section goes. Nothing is asserted of a time.
"""

import argparse
import collections
import contextlib
import functools
import io
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
TOUR = str(ROOT / "kauldron_tour.py")
JAX = "import jax, flax, optax"
IMPORT_ALL = """
import contextlib, importlib, json, sys
for name in json.load(open(sys.argv[1])):
  with contextlib.suppress(Exception):  # Some modules are made, not imported.
    importlib.import_module(name)
"""


def run(*arguments, cache=None):
  """Runs Python; returns seconds, and when the first lesson had passed."""
  environ = {name: value for name, value in os.environ.items()
             if not name.startswith(("JAX_", "XLA_"))}
  environ.update(JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="3")
  if cache:
    environ["JAX_COMPILATION_CACHE_DIR"] = cache
  first_lesson = None
  lines = []
  start = time.perf_counter()
  with subprocess.Popen(
      [sys.executable, *arguments], env=environ, text=True,
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
    for line in child.stdout:
      lines.append(line)
      if line.startswith("PASS config_tree"):
        first_lesson = time.perf_counter() - start
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
  seconds = time.perf_counter() - start
  if child.returncode:
    sys.exit("".join(lines[-30:]) + f"bench: this failed: {arguments}")
  return {"seconds": seconds, "CPU": usage.ru_utime + usage.ru_stime,
          "MB": usage.ru_maxrss // 1024, "first lesson": first_lesson}


def whole_processes(runs):
  """Prints the medians of whole processes, and the ratios that matter."""
  with tempfile.TemporaryDirectory() as folder:
    cache = f"{folder}/cache"
    run(TOUR, cache=cache)  # Fills that cache, and those of byte code.
    modules = f"{folder}/modules.json"
    run(__file__, "--modules", modules)
    commands = {
        JAX: functools.partial(run, "-c", JAX),
        "all imports of the tour": functools.partial(
            run, "-c", IMPORT_ALL, modules),
        "the tour": functools.partial(run, TOUR),
        "the tour, cache kept": functools.partial(run, TOUR, cache=cache),
    }
    results = collections.defaultdict(list)
    for _ in range(runs):
      for name, command in commands.items():
        results[name].append(command())

  def median(name, key):
    return statistics.median(result[key] for result in results[name])

  print(f"{'whole processes, medians':32} seconds     CPU      MB")
  for name in commands:
    print(f"{name:32} {median(name, 'seconds'):7.1f} {median(name, 'CPU'):7.1f}"
          f" {median(name, 'MB'):7.0f}")
  first_lesson = median("the tour", "first lesson")
  imports = median("all imports of the tour", "seconds")
  print(f"first lesson / {JAX}: "
        f"{first_lesson / median(JAX, 'seconds'):.2f}")
  for name in ("the tour", "the tour, cache kept"):
    print(f"{name} / its imports: {median(name, 'seconds') / imports:.2f}")


def timed(function, spent, cause):
  """Returns the function, adding the seconds of each call to spent[cause]."""
  @functools.wraps(function)
  def call(*args, **kwargs):
    start = time.perf_counter()
    try:
      return function(*args, **kwargs)
    finally:
      spent[cause] += time.perf_counter() - start
  return call


def sections():
  """Prints where the time of each section goes; a row a section."""
  sys.path.insert(0, str(ROOT))
  os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
  import kauldron_tour as tour
  from kauldron import kd

  spent = collections.Counter()
  causes = {
      "/jax/core/compile/jaxpr_trace_duration": "trace",
      "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
      "/jax/core/compile/backend_compile_duration": "compile"}

  def on_duration(event, seconds, **kwargs):
    del kwargs
    if event in causes:
      spent[causes[event]] += seconds
      spent["programs"] += causes[event] == "compile"

  tour.jax.monitoring.register_event_duration_secs_listener(on_duration)
  for cls, cause, names in (
      (kd.ckpts.Checkpointer, "saving",
       ("save", "restore", "wait_until_finished")),
      (kd.train.KDMetricWriter, "events",
       ("write_step_metrics", "write_config", "write_param_overview",
        "write_element_spec", "write_context_structure"))):
    for name in names:
      setattr(cls, name, timed(getattr(cls, name), spent, cause))

  columns = "trace", "lower", "compile", "saving", "events"
  print(f"\n{'seconds of a section':18} {'all':>7}"
        + "".join(f" {name:>8}" for name in columns) + " programs")
  total = collections.Counter()
  for name, function in tour.SECTIONS.items():
    spent.clear()
    with contextlib.redirect_stdout(io.StringIO()):
      tour.run_section(function)
    spent["all"] = tour.RESULTS[name]["seconds"]
    total.update(spent)
    print_row(name, spent, columns)
  print_row("all", total, columns)
  print("Events include what they trace and compile; the rest of `all` is "
        "running\nand Python.")


def print_row(name, spent, columns):
  """Prints one row of the table of sections."""
  print(f"{name:18} {spent['all']:7.2f}"
        + "".join(f" {spent[column]:8.2f}" for column in columns)
        + f" {spent['programs']:8}", flush=True)


def write_modules(path):
  """Writes the names of all modules that are imported when the tour ends."""
  sys.path.insert(0, str(ROOT))
  os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
  import kauldron_tour as tour
  for function in tour.SECTIONS.values():
    tour.run_section(function)
  ours = {"__main__", "kauldron_tour", "project"}
  pathlib.Path(path).write_text(
      json.dumps([name for name in sys.modules if name not in ours]))


def main():
  parser = argparse.ArgumentParser(description="Measures the tour.")
  parser.add_argument("--runs", type=int, default=3, help="of each process")
  parser.add_argument("--modules", metavar="FILE", help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.modules:
    write_modules(options.modules)
    return
  whole_processes(options.runs)
  sections()
  print(f"\n{options.runs} runs, {time.strftime('%Y-%m-%d')}, "
        f"{os.cpu_count()} cores, {platform.platform()}\n"
        f"Python {platform.python_version()}")


if __name__ == "__main__":
  main()
