# First process of the sealed namespace: main.sh SECONDS FOLDER SCRIPT [ARGUMENT ...]. Prints the records of the run,
# each below the number of its fields, and the exit status as the last one.
mkdir -p /run/records "$2"
cp -R /run/folder/. "$2" && cd "$2/$RLSYS_START" || exit 1
while IFS= read -r -d '' target && IFS= read -r -d '' path; do
  mkdir -p "${path%/*}" && ln -sT "$target" "$path"
done </run/stubs/links 2>/dev/null
unset RLSYS_START
ulimit -v 2000000 -f 30000 -u 400 -n 256 -c 0
limit=$1 script=$3
shift 3
BASH_ENV=/run/stubs/trace.sh /run/tools/timeout -k 1 "$limit" /run/tools/bash "$script" "$@" \
  </dev/null >/run/out 2>/run/err
status=$?
# Commands in the background may have to be recorded yet.
exec {pipe}<> <(:)
for ((i = 0; i < 40; i++)); do
  processes=(/proc/[0-9]*)
  ((${#processes[@]} == 1)) || read -r -t 0.05 -u "$pipe" && break
done
# The script can replace each file: only a regular file has an end.
is_regular() { [[ -f $1 && ! -L $1 ]]; }
print_end() { is_regular "$1" && /run/tools/tail -c 1500 "$1"; }
shopt -s nullglob
for each in /run/records/*; do
  is_regular "$each" && mapfile -d '' -t -n 100000 fields <"$each" && ((${#fields[@]})) &&
    printf '%s\0' "${#fields[@]}" "${fields[@]}"
done
printf '%s\0' 4 exit "$status" "$(print_end /run/out)" "$(print_end /run/err)"
