# Sourced by each bash of the sealed namespace (BASH_ENV). Before each command, a variable or argument that the
# command uses without a default, and that is not set, gets a marker as its value for the time of this command, so
# that a setting that depends on it shows it. A condition on a marker is recorded, since the branch is then unknown.
ulimit() { :; }
kill() { /run/stubs/recorder kill "$@"; }
cp() { /run/tools/cp "$@" || [[ $# -ge 2 && ! -e ${*: -2:1} ]]; } # a file of the host is not here
command_not_found_handle() { /run/stubs/recorder "$@"; }

__rlsys_record() { printf '%s\0' "$@" >"/run/records/$EPOCHREALTIME.$BASHPID"; }

__rlsys_check() {
  local -
  { set +xeu; } 2>/dev/null
  local __text=$1 __rest=$1 __name __after __test='' __word
  for __word in "${__rlsys_filled[@]}"; do
    [[ ${!__word-} == "@@unset:$__word@@" ]] && unset -v "$__word"
  done
  __rlsys_filled=() __rlsys_count=0
  (( BASH_SUBSHELL == __rlsys_level )) && unset -v RLSYS_CONDITION
  [[ $__text =~ ^(\[|\[\[|test|case|\(\()[[:space:]] || $__text == '(('* ]] && __test=1
  [[ $__test && $__text == *'$('* ]] && export RLSYS_CONDITION=$__text __rlsys_level=$BASH_SUBSHELL
  while [[ $__rest =~ \$(\{[!#]?)?([A-Za-z_][A-Za-z0-9_]*|[1-9])(:?.?) ]]; do
    __name=${BASH_REMATCH[2]} __after=${BASH_REMATCH[3]}
    __word=${BASH_REMATCH[1]}
    __rest=$__after${__rest#*"${BASH_REMATCH[0]}"}
    [[ $__word == '{'* && $__after == @(:[-=+?]|[-=+?]*) ]] && continue
    [[ $__word == '{' && $__after == '['* && $__rest == '['[@*]']'* ]] && continue # no environment has an array
    [[ $__name == BASH_* || $__name == __rlsys* ]] && continue
    if [[ $__name == [1-9] ]]; then
      [[ $__test ]] || (( __name <= $2 || __name <= __rlsys_count )) || __rlsys_count=$__name
    elif [[ $__test ]]; then
      [[ ${!__name-} == *@@@(output|unset):* ]] && __rlsys_record branch "$__text" "${!__name}"
    elif ! declare -p "$__name" &>/dev/null; then
      printf -v "$__name" '%s' "@@unset:$__name@@"
      __rlsys_filled+=("$__name")
    fi
  done
  __rest=$__text
  while [[ $__rest =~ \(\(([^\)]*) ]]; do
    __rest=${__rest#*"${BASH_REMATCH[0]}"} __word=${BASH_REMATCH[1]}
    while [[ $__word =~ (^|[^A-Za-z0-9_\$\{])([A-Za-z_][A-Za-z0-9_]*) ]]; do
      __name=${BASH_REMATCH[2]} __word=${__word#*"${BASH_REMATCH[0]}"}
      if [[ ${!__name-} == *@@@(output|unset):* ]]; then
        __rlsys_record branch "$__text" "${!__name}"
      elif [[ ! $__test ]] && ! declare -p "$__name" &>/dev/null; then
        __rlsys_record branch "$__text" "@@unset:$__name@@"
        printf -v "$__name" '%s' "@@unset:$__name@@" # bash refuses it as a number
        __rlsys_filled+=("$__name")
      fi
    done
  done
  return 0
}

shopt -s extglob
__rlsys_filled=() __rlsys_count=0 __rlsys_level=0
set -T
trap '__rlsys_check "$BASH_COMMAND" $#
while (( $# < __rlsys_count )); do set -- "$@" "@@unset:\$$(( $# + 1 ))@@"; done' DEBUG
