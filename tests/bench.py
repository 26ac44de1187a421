"""Measures the tour: `make bench`, or python tests/bench.py --runs 5.

Each process is a child of this one, and they run one at a time. CPU seconds,
summed over cores, depend less than the seconds that pass on what else the
machine does. No test: nothing is asserted of a time.
"""

import argparse
import collections
import contextlib
from importlib.metadata import version
import itertools
import json
import os
import pathlib
import platform
from statistics import median
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
TOUR = str(ROOT / "kauldron_tour.py")
FEW = "import jax, flax, optax"
ALL = """import contextlib, importlib, pathlib, sys
for name in pathlib.Path(sys.argv[1]).read_text().split():
  with contextlib.suppress(Exception):  # Some are made, not imported.
    importlib.import_module(name)
"""
CHILDREN = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
COMPILED = "/jax/core/compile/backend_compile_duration"  # Or found in a cache.
FOUND = "/jax/compilation_cache/cache_hits"
PLAIN, NUM_STEPS = "a loop in plain JAX", 2000


def run(*arguments, **environ):
  """Runs Python; returns seconds, CPU seconds, peak MB, and what was printed.

  `lesson` is when the first section had passed, `data` what a part measured.
  """
  clean = {name: value for name, value in os.environ.items() if not
           name.startswith(("JAX_", "XLA_", "TF_CPP_", "PYTHONDONTWRITE"))}
  result, lines, start = {}, [], time.perf_counter()
  with subprocess.Popen(
      [sys.executable, *arguments], env=clean | CHILDREN | environ, text=True,
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
    for line in child.stdout:
      lines.append(line)
      if line.startswith("  PASS "):
        result.setdefault("lesson", time.perf_counter() - start)
      elif line.startswith("data: "):
        result["data"] = json.loads(line.removeprefix("data: "))
    _, status, usage = os.wait4(child.pid, 0)
    result["seconds"] = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
  if child.returncode:
    sys.exit("".join([*lines[-30:], f"bench: this failed: {arguments}"]))
  result["CPU"] = usage.ru_utime + usage.ru_stime
  result["MB"] = usage.ru_maxrss >> (20 if sys.platform == "darwin" else 10)
  return result


def modules(tour):
  """Returns the names of all modules that are imported when the tour ends."""
  with contextlib.redirect_stdout(None):
    sections(tour)
  return [x for x in sys.modules if x not in ("__main__", tour.__name__)]


def sections(tour):
  """Returns section -> seconds, programs built, found, seconds for both.

  In one process and in order: what one section compiles the next ones find in
  the compilation cache.
  """
  counts, result, on = collections.Counter(), {}, tour.jax.monitoring
  on.register_event_listener(lambda event, **_: counts.update([event]))
  on.register_event_duration_secs_listener(lambda event, seconds, **_: (
      counts.update({event: 1, event + " seconds": seconds})))
  tour.import_quietly("kauldron.train")
  tour.jax.config.update("jax_compilation_cache_dir", tour.temporary_dir())
  for name in tour.SECTIONS:
    counts.clear()
    tour.run_section(getattr(tour, name))
    found = counts[FOUND]
    result[name] = (tour.RESULTS[name]["seconds"], counts[COMPILED] - found,
                    found, counts[COMPILED + " seconds"])
  return result


def steps(tour):
  """Returns way to train -> microseconds that one more step takes."""
  tour.import_quietly("kauldron.train")
  trainer = tour.konfig.resolve(tour.get_config())
  optimizer = tour.optax.adam(0.005)
  init, result = trainer.init_state, {}

  def plain(batches):
    params, opt_state = init().params, optimizer.init(init().params)
    for batch in batches:
      params, opt_state, _ = tour.plain_step(
          optimizer, params, opt_state, batch)
    return params

  def train(batches):
    cfg = tour.get_config()
    cfg.num_train_steps, cfg.workdir = len(batches), tour.run_dir("bench")
    cfg.checkpointer = tour.lazy_kd.ckpts.NoopCheckpointer()
    return tour.konfig.resolve(cfg).train()[0]

  batches = list(itertools.islice(trainer.train_ds, 2 * NUM_STEPS))
  for name, call in (
      (PLAIN, plain),
      ("a loop over trainstep.step",
       lambda x: tour.loop(trainer, init(), x)[0]),
      (f"train(), metrics every {tour.LOG_EVERY} steps", train)):
    times = []
    for number in (tour.LOG_EVERY, NUM_STEPS, 2 * NUM_STEPS):  # First: compile.
      start = time.perf_counter()
      tour.jax.block_until_ready(call(batches[:number]))
      times.append(time.perf_counter() - start)
    result[name] = (times[2] - times[1]) / NUM_STEPS * 1e6
  return result


def row(title, values, *others):
  """Prints the median, least and most of the values, medians of the others."""
  print(f"{title:38}{median(values):7.2f}{min(values):7.2f}{max(values):7.2f}"
        + "".join(f"{round(median(x), 1):7g}" for x in others))


def main(runs):
  """Runs all in turn, several times, and prints medians and ratios of them."""
  results = collections.defaultdict(lambda: collections.defaultdict(list))
  with tempfile.TemporaryDirectory() as cache:
    kept = {"JAX_COMPILATION_CACHE_DIR": cache}
    run(TOUR, **kept)  # Fills that cache, and those of byte code and of files.
    names = run(__file__, "modules", JAX_NUM_CPU_DEVICES="2")["data"]
    imported = pathlib.Path(cache, "modules")
    imported.write_text("\n".join(names))
    for kind, arguments, environ in runs * [
        ("a", ["-c", FEW], {}), ("c", ["-c", ALL, str(imported)], {}),
        ("d", [TOUR], {}), ("e", [TOUR], kept),
        ("f", [__file__, "sections"], {"JAX_NUM_CPU_DEVICES": "2"}),
        ("g", [__file__, "steps"], {"JAX_NUM_CPU_DEVICES": "1"})]:
      print(kind, end=" ", file=sys.stderr, flush=True)
      for key, value in run(*arguments, **environ).items():
        results[kind][key].append(value)
  print(file=sys.stderr)
  results["b"]["seconds"] = results["d"]["lesson"]
  heads = " median  least   most"
  print(f"{'seconds of whole processes':38}{heads}    CPU     MB")
  for kind, title in (
      ("a", FEW), ("b", "the tour's first section has passed"),
      ("c", "import all that the tour imports"), ("d", "the tour"),
      ("e", "the tour with a compilation cache")):
    columns = (results[kind][key] for key in ("seconds", "CPU", "MB"))
    row(f"{kind}  {title}", *filter(None, columns))
  for key, *pairs in (
      ("seconds", "ba", "dc", "ec"), ("CPU", "dc", "ec"), ("MB", "dc")):
    print(f"{key}:", ", ".join(
        f"{x}/{y} = {median(results[x][key]) / median(results[y][key]):.2f}"
        for x, y in pairs))

  print(f"\n{'seconds of sections; XLA programs':38}{heads}  built  found"
        "   in s")
  middles, data = {}, results["f"]["data"]
  for name in data[0]:
    columns = list(zip(*(x[name] for x in data), strict=True))
    row(name, *columns)
    middles[name] = median(columns[0])
  slowest, middle = max(middles, key=middles.get), median(middles.values())
  print(f"{slowest} / median section = {middles[slowest] / middle:.1f}")

  print(f"\n{'microseconds of one more training step':38}{heads}  ratio")
  data = results["g"]["data"]
  for name in data[0]:
    values = [x[name] for x in data]
    row(name, values, [median(values) / median(x[PLAIN] for x in data)])
  print(f"\n{runs} runs, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores,",
        f"{platform.platform()}\nPython {platform.python_version()}, kauldron",
        f"{version('kauldron')}, jax {version('jax')}")


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description="Measures the tour.")
  parser.add_argument("--runs", type=int, default=3, help="of each process")
  parser.add_argument(
      "part", nargs="?", choices=["modules", "sections", "steps"],
      help="measure this alone, in this process, as JSON")
  options = parser.parse_args()
  if options.part:
    sys.path.insert(0, str(ROOT))
    import kauldron_tour
    print("data: " + json.dumps(globals()[options.part](kauldron_tour)))
  else:
    main(options.runs)
