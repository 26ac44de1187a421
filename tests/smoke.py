"""Runs the tour with candidate packages and compares it with the pinned ones.

  python tests/smoke.py 'jax==0.10.1' 'flax>=0.12'

A candidate is anything pip takes: requirements, a wheel, a source folder. It
is installed into a throw-away environment that sees this interpreter's own
packages through a `.pth` file, so that only what changes is installed and this
environment stays as it is. Both reports are kept in `.smoke`.

Exit status: that of the tour with `--baseline`, or 2 where pip cannot satisfy
the candidate or the tour does not run with the pinned packages.
"""

import hashlib
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
TOUR = ROOT / "kauldron_tour.py"
REPORTS = ROOT / ".smoke"


def fingerprint():
  """Returns a digest of all that the baseline's report depends on."""
  names = sorted(path.name for path in
                 pathlib.Path(sysconfig.get_path("purelib")).glob("*.dist-info"))
  text = TOUR.read_text() + sys.version + "\n".join(names)
  return hashlib.sha256(text.encode()).hexdigest()


def baseline():
  """Returns the path of a report made with the pinned packages."""
  path, key = REPORTS / "baseline.json", REPORTS / "baseline.key"
  REPORTS.mkdir(exist_ok=True)
  if not (path.exists() and key.exists() and key.read_text() == fingerprint()):
    print("running the tour with the pinned packages ...", flush=True)
    run = subprocess.run([sys.executable, TOUR, "--report", path],
                         stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode != 0:
      print(run.stdout)
      print("smoke: the tour fails with the pinned packages, see above.",
            file=sys.stderr)
      sys.exit(2)
    key.write_text(fingerprint())
  return path


def environment(folder, candidates):
  """Makes an environment with the candidates over this one's packages."""
  subprocess.run([sys.executable, "-m", "venv", folder], check=True)
  python = os.path.join(folder, "bin", "python")
  purelib = subprocess.run(
      [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
      stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
  pathlib.Path(purelib, "pinned.pth").write_text(sysconfig.get_path("purelib"))
  print(f"installing {' '.join(candidates)} ...", flush=True)
  pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
  subprocess.run([*pip, "uninstall", "--yes", "setuptools"],
                 stderr=subprocess.DEVNULL, check=False)
  install = subprocess.run([*pip, "install", *candidates],
                           stderr=subprocess.PIPE, text=True, check=False)
  if install.returncode != 0:
    errors = [line for line in install.stderr.splitlines() if "ERROR" in line]
    print("smoke: pip cannot install this:", *errors, file=sys.stderr)
    sys.exit(2)
  subprocess.run([*pip, "uninstall", "--yes", "pip"], check=True)
  return python


def main(candidates):
  """Prints the comparison and returns the exit status."""
  if not candidates:
    print("smoke: name a candidate, as in CANDIDATE='jax==0.10.1'.",
          file=sys.stderr)
    return 2
  with tempfile.TemporaryDirectory(prefix="kauldron_smoke_") as folder:
    python = environment(folder, candidates)
    pinned = baseline()
    print("running the tour with the candidate ...", flush=True)
    run = subprocess.run(
        [python, TOUR, "--report", REPORTS / "candidate.json",
         "--baseline", pinned],
        stdout=subprocess.PIPE, text=True, check=False)
  _, found, end = run.stdout.partition("\n         seconds  what was proved\n")
  print(end if found else run.stdout)
  print(f"exit status {run.returncode}")
  return run.returncode


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
