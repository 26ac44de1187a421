"""The README says what the code does."""

import argparse
import pathlib
import re

import kauldron_tour
from packaging import requirements
import pytest

ROOT = pathlib.Path(kauldron_tour.__file__).parent
README = (ROOT / "README.md").read_text()
REQUIREMENTS = (ROOT / "requirements.txt").read_text()


def table(header):
  """Returns the rows of the table that has this header, as lists of cells."""
  _, _, rest = README.partition(f"| {header} |\n")
  assert rest, header
  rows = rest.partition("\n\n")[0].splitlines()[1:]
  return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_sections():
  expected = [[f"`{name}`", function.title]
              for name, function in kauldron_tour.SECTIONS.items()]
  assert table("section | claim") == expected


def test_options(monkeypatch):
  seen = {}
  add = argparse.ArgumentParser.add_argument

  def record(parser, *names, **kwargs):
    many = " ..." if kwargs.get("nargs") in ("+", "*") else ""
    metavar = f" {kwargs['metavar']}{many}" if "metavar" in kwargs else ""
    seen[f"`{names[0]}{metavar}`"] = kwargs.get("help")
    return add(parser, *names, **kwargs)

  monkeypatch.setattr(argparse.ArgumentParser, "add_argument", record)
  kauldron_tour.read_options([])
  options = {name: text for name, text in seen.items() if name[1:3] == "--"}
  assert dict(table("option | effect")) == options


def test_exit_statuses(capsys):
  with pytest.raises(SystemExit):
    kauldron_tour.read_options(["--help"])
  text = " ".join(capsys.readouterr().out.split())
  documented = text.partition("Exit status:")[2]
  statuses = [row[0] for row in table("status | meaning")]
  assert statuses == re.findall(r"\d+", documented)


def test_commands_parse():
  commands = re.findall(r"kauldron_tour\.py((?: --only(?: \w+)+)+)", README)
  assert commands
  for arguments in commands:
    assert kauldron_tour.read_options(arguments.split()).sections


def test_make_targets_exist():
  makefile = (ROOT / "Makefile").read_text()
  targets = re.findall(r"(?:`|    |\d )make (\w+)", README)
  assert len(targets) > 3
  for target in targets:
    assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("row", table("Python | Kauldron | JAX | Flax"),
                         ids=lambda row: row[0])
def test_versions(row):
  pins = [requirements.Requirement(line.removesuffix(" \\"))
          for line in REQUIREMENTS.splitlines() if re.match(r"\w", line)]
  pythons, *versions = row
  for python in pythons.split(", "):
    environment = {"python_version": python,
                   "python_full_version": f"{python}.0",
                   "platform_machine": "x86_64", "sys_platform": "linux"}
    found = {pin.name: str(pin.specifier) for pin in pins
             if not pin.marker or pin.marker.evaluate(environment)}
    expected = [f"=={version}" for version in versions]
    assert [found[name] for name in ("kauldron", "jax", "flax")] == expected
