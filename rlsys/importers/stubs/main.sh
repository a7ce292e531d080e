# First process of the sealed namespace: main.sh SECONDS FOLDER SCRIPT [ARGUMENT ...]. Prints the records of the run,
# each below its size in bytes.
mkdir -p /run/records
cp -R /run/folder/. "$2" && cd "$2/$RLSYS_START" || exit 1
unset RLSYS_START
ulimit -v 2000000 -f 30000 -u 400 -n 256 -c 0
limit=$1 script=$3
shift 3
BASH_ENV=/run/stubs/trace.sh /run/tools/timeout -k 1 "$limit" /run/tools/bash "$script" "$@" \
  </dev/null >/run/out 2>/run/err
printf '%s\0' exit $? "$(/run/tools/tail -c 1500 /run/out)" "$(/run/tools/tail -c 1500 /run/err)" >/run/records/z
shopt -s nullglob
for each in /run/records/*; do
  /run/tools/wc -c <"$each"
  /run/tools/cat "$each"
done
