#!/bin/sh
# Programs that only tests need: a browser for the pages, and libfaketime for clocks that step.
# They are installed where that is possible (Debian or Ubuntu, as root); elsewhere this says how.
missing=""
command -v chromium >/dev/null 2>&1 || missing="chromium"
ls /usr/lib/*/faketime/libfaketime.so.1 >/dev/null 2>&1 || missing="$missing libfaketime"
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "tests: installing $missing"
    # shellcheck disable=SC2086
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing && exit 0
fi
echo "tests: not installed here: $missing. Tests that need it are skipped (in CI they fail)." >&2
echo "tests: on Debian or Ubuntu, as root: apt-get install $missing" >&2
