# Runs the commands of an episode, each in a shell of its own that goes on where the last one ended:
# in its folder, with its variables and functions.
#
#   bash -c "$(cat driver.sh)" bash ALONE STATE FOLDER [ulimit's arguments]
#
# Input: "nonce NUL command NUL" for each command. A nonce that begins with "new" forgets the state
# first. Output: what the command prints, then "NUL nonce blank status NUL". ALONE is "alone" if this
# shell is the first process of a PID namespace. What a command leaves in the background is then
# killed.

alone=$1 state=$2 folder=$3
shift 3
[ $# -eq 0 ] || ulimit "$@" || exit 1
cd -- "$folder" || exit 1
: >"$state" || exit 1
exec 2>/dev/null # this shell's own remarks, about a child that was killed

# The state is the variables beside those that this shell has now (some of bash's own cannot be set),
# and the few that a command may well change.
nonce= command= name= names=() i= status=0 known= FUNCNAME= PIPESTATUS=
save='
    declare -p PATH HOME LANG TERM
    compgen -v >"$state.names"
    mapfile -t names <"$state.names"
    if [[ "${names[*]}" != "$known" ]]; then
        for name in "${names[@]}"; do
            [[ " $known " == *" $name "* ]] || declare -p "$name"
        done
    fi
    declare -f
    printf "cd -- %q\n" "$PWD"
'
compgen -v >"$state.names"
mapfile -t names <"$state.names"
known="${names[*]}"

while IFS= read -r -d '' nonce && IFS= read -r -d '' command; do
    [[ $nonce == new* ]] && : >"$state"
    (
        exec </dev/null 2>&1
        trap '{ eval "$save"; } >"$state"' EXIT
        set -- "$command"
        . "$state"
        nonce= command=
        eval "$1"
    )
    status=$?

    # Killing -1 spares this shell and nothing else, so it must have a PID namespace of its own.
    if [ "$alone" = alone ] && [ $$ -eq 1 ] && kill -KILL -1; then
        for ((i = 0; i < 100000; i++)); do
            kill -0 -1 || break
        done
    fi
    printf '\0%s %s\0' "$nonce" "$status"
done
