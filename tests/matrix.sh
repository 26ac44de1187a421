#!/bin/sh
# Runs the tour on several Pythons, each in a new environment from
# requirements.txt, and prints a table: sh tests/matrix.sh python3.11 ...
# Exit status 1 if the tour failed on any of them, 2 if none was found.
cd "$(dirname "$0")/.." || exit 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
table="python        status  last line"
worst=2
for python in "$@"; do
  if ! "$python" -c '' 2>/dev/null; then
    table="$table
$(printf '%-13s %6s  %s' "$python" - 'not found')"
    continue
  fi
  echo "$python: installing and running ..."
  git ls-files -z | xargs -0 cp --parents -t "$work" 2>/dev/null
  (cd "$work" && make --silent tour PYTHON="$python" >tour.txt 2>&1)
  status=$?
  last=$(grep -E ' of [0-9]+ sections$|rror' "$work/tour.txt" | tail -n 1)
  table="$table
$(printf '%-13s %6s  %s' "$("$python" -V)" "$status" "$last")"
  if [ "$worst" = 2 ]; then worst=0; fi
  if [ "$status" != 0 ]; then worst=1; fi
  rm -rf "$work/.venv"
done
echo "$table"
exit "$worst"
