"""The README says what the code does."""

import argparse
import pathlib
import re

import kauldron_tour
from packaging import requirements

ROOT = pathlib.Path(kauldron_tour.__file__).parent
README = (ROOT / "README.md").read_text()
REQUIREMENTS = (ROOT / "requirements.txt").read_text()


def _table(header):
  """Returns the rows of the table that has this header, as lists of cells."""
  _, _, rest = README.partition(f"| {header} |\n")
  assert rest, header
  rows = rest.partition("\n\n")[0].splitlines()[1:]
  return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def _options(monkeypatch):
  """Returns the tour's options with their metavars -> help."""
  seen = {}
  add = argparse.ArgumentParser.add_argument

  def record(parser, *names, **kwargs):
    many = " ..." if kwargs.get("nargs") == "+" else ""
    metavar = f" {kwargs['metavar']}{many}" if "metavar" in kwargs else ""
    seen[f"`{names[0]}{metavar}`"] = kwargs.get("help")
    return add(parser, *names, **kwargs)

  monkeypatch.setattr(argparse.ArgumentParser, "add_argument", record)
  kauldron_tour.parse_options([])
  return {name: text for name, text in seen.items() if name.startswith("`--")}


def test_sections():
  expected = [
      [str(number), f"`{name}`", getattr(kauldron_tour, name).title]
      for number, name in enumerate(kauldron_tour.SECTIONS)]
  assert _table("section | name | claim") == expected


def test_options(monkeypatch):
  assert dict(_table("option | effect")) == _options(monkeypatch)


def test_exit_statuses(capsys):
  statuses = [row[0] for row in _table("status | meaning")]
  try:
    kauldron_tour.parse_options(["--help"])
  except SystemExit:
    pass
  text = " ".join(capsys.readouterr().out.split())
  documented = text.partition("Exit status:")[2]
  assert statuses == re.findall(r"\d+", documented)


def test_commands_parse():
  commands = re.findall(r"python kauldron_tour\.py((?: [-\w]+)*)", README)
  assert commands
  for arguments in commands:
    assert kauldron_tour.parse_options(arguments.split()).sections


def test_make_targets_exist():
  makefile = (ROOT / "Makefile").read_text()
  for target in re.findall(r"`?make (\w+)", README):
    if target not in ("each",):
      assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_versions():
  pins = [requirements.Requirement(line.removesuffix(" \\"))
          for line in REQUIREMENTS.splitlines() if re.match(r"\w", line)]
  for pythons, *versions in _table("Python | Kauldron | JAX | Flax"):
    for python in pythons.split(", "):
      environment = {"python_version": python,
                     "python_full_version": f"{python}.0",
                     "platform_machine": "x86_64", "sys_platform": "linux"}
      found = {pin.name: str(pin.specifier) for pin in pins
               if not pin.marker or pin.marker.evaluate(environment)}
      for name, version in zip(
          ("kauldron", "jax", "flax"), versions, strict=True):
        assert found[name] == f"=={version}", python


def test_last_lines():
  count = len(kauldron_tour.SECTIONS)
  assert f"\n{count} PASS, 0 SKIP, 0 FAIL of {count} sections\n" in README
  for name in kauldron_tour.SECTIONS:
    title = getattr(kauldron_tour, name).title
    assert README.count(title) == 2, title
