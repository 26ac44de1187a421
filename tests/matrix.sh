#!/bin/sh
# Runs the tour on several Pythons, each in a new environment from
# requirements.txt, and prints a table: sh tests/matrix.sh python3.11 ...
# Exit status 1 if the tour failed on any of them, 2 if none could be tried.
cd "$(dirname "$0")/.." || exit 2

# The environments are made in the temporary folder: can it hold them?
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
if ! said=$({ printf '#!/bin/sh\n' >"$work/probe" && chmod +x "$work/probe" &&
              "$work/probe"; } 2>&1); then
  echo "matrix: nothing can be installed in $work (${said##*: }): is it full," \
       "or mounted noexec? TMPDIR= chooses another place." >&2
  exit 2
fi

table="python          result  last line"
row() {
  table="$table
$(printf '%-15s %-6s  %s' "$1" "$2" "$3")"
}

worst=2
for python in "$@"; do
  if ! said=$("$python" -V 2>&1); then
    row "$python" - "cannot be run: $(echo "$said" | sed '/^$/d;q')"
    continue
  fi
  echo "$python, which is $said: installing and running ..."
  if make --silent tour PYTHON="$python" VENV="$work/.venv" \
      >"$work/tour.txt" 2>&1; then
    result=PASS
    [ "$worst" = 2 ] && worst=0
  else
    result=FAIL
    worst=1
  fi
  last=$(grep -v '^make.*\*\*\*' "$work/tour.txt" |
         grep -E ' of [0-9]+ sections$|rror:|No space|^make: ' | tail -n 1)
  row "$said" "$result" "${last:-$(tail -n 1 "$work/tour.txt")}"
  rm -rf "$work/.venv"
done
echo "$table"
exit "$worst"
