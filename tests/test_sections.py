"""Every section passes, alone and in any order, with facts for a report."""

import json
import re

import kauldron_tour
import pytest


@pytest.mark.parametrize("name", kauldron_tour.SECTIONS)
def test_section(tour, whole_tour, name):
  facts = getattr(tour, name)()
  assert facts
  for key, value in facts.items():
    assert re.fullmatch(r"[\w.]+", key), key
    assert isinstance(value, (bool, int, float, str)), (key, value)
  assert json.loads(json.dumps(facts)) == facts
  as_script = whole_tour[1]["sections"][name]["facts"]
  assert tour.differences(as_script, facts)[0] == {}


@pytest.mark.parametrize("name", ["config_tree", "resumed_run"])
def test_twice_in_one_process(tour, name):
  assert getattr(tour, name)() == getattr(tour, name)()
