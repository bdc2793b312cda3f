# shellcheck shell=bash
# Sourced by compare_methods.sh: commands that wait for one another, several at a time. Started
# again, what was done is left alone, and the rest goes on.
#
#   job NAME SECONDS "AFTER ..." "TEST ..." COMMAND...
#                    to be run once the jobs of AFTER are done, unless the command TEST succeeds,
#                    which says that it has been done; it takes about SECONDS, or a multiple of that
#                    which is the same for all jobs
#   run_jobs COUNT   so many at a time. One at a time says on the terminal what it does, several
#                    write RUN/logs/NAME.log. Returns once all are done, and leaves otherwise.
#   was_ended NAME   to be defined: whether a job whose command did not succeed was ended by the
#                    time, so that it has not failed
JOBS=()
STOPPED=75   # the status of a tool that was asked to stop, and can go on
declare -A EXPECTED AFTER TEST COMMAND STATE STARTED

job() {
  local name=$1
  JOBS+=("$name")
  EXPECTED[$name]=$2 AFTER[$name]=$3 TEST[$name]=$4
  printf -v "COMMAND[$name]" '%q ' "${@:5}"
}

run_jobs() {
  AT_ONCE=$1 HALTED='' ACTUAL=0 FORESEEN=0
  declare -gA NAME_OF=()
  local name
  for name in "${JOBS[@]}"; do
    STATE[$name]=waiting
    ! eval "${TEST[$name]}" || STATE[$name]=done
  done
  echo "$(count done) of ${#JOBS[@]} jobs are done; $AT_ONCE at a time"
  WALL_BEFORE=$(cat "$RUN/logs/seconds" 2> /dev/null || echo 0) WALL_START=$SECONDS
  [ "$AT_ONCE" = 1 ] || trap 'stop_jobs' INT TERM
  while [ -n "$(ready)" ] || ((${#NAME_OF[@]} > 0)); do
    while name=$(ready) && [ -n "$name" ] && ((${#NAME_OF[@]} < AT_ONCE)); do
      start_job "$name"
    done
    ((${#NAME_OF[@]} == 0)) || finish_next
  done
  trap - INT TERM
  (($(count done) == ${#JOBS[@]})) || leave
}

# Leave with the reason for which not all is done.
leave() {
  [ "$(count failed)" != 0 ] || exit 0   # it was asked to
  echo "$(count failed) jobs failed, and $(count waiting) wait for them: mend what they say, and" \
    "the same command goes on from here" >&2
  exit 1
}

# How many jobs are in a state.
count() {
  local name number=0
  for name in "${JOBS[@]}"; do [ "${STATE[$name]}" != "$1" ] || number=$((number + 1)); done
  echo "$number"
}

# The first job that may begin, or nothing.
ready() {
  [ -z "$HALTED" ] || return 0
  local name before
  for name in "${JOBS[@]}"; do
    [ "${STATE[$name]}" = waiting ] || continue
    for before in ${AFTER[$name]}; do [ "${STATE[$before]}" = done ] || continue 2; done
    echo "$name"
    return 0
  done
}

start_job() {
  local name=$1 log=$RUN/logs/$1.log status=0
  if eval "${TEST[$name]}"; then   # another one has done it, while this one waited
    STATE[$name]=done
    echo "needless: $name"
    return
  fi
  STATE[$name]=running STARTED[$name]=$SECONDS
  if [ "$AT_ONCE" = 1 ]; then
    say "$name"
    (eval "${COMMAND[$name]}") || status=$?
    finish_job "$name" "$status"
    return
  fi
  (eval "${COMMAND[$name]}") >> "$log" 2>&1 &
  NAME_OF[$!]=$name
  echo "begun: $name ($log)"
}

# Wait for one of those that run.
finish_next() {
  local pid status=0
  wait -n -p pid "${!NAME_OF[@]}" || status=$?
  local name=${NAME_OF[$pid]}
  unset "NAME_OF[$pid]"
  finish_job "$name" "$status"
}

finish_job() {
  local name=$1 status=$2 log=$RUN/logs/$1.log
  local took=$((SECONDS - STARTED[$name]))
  echo $((WALL_BEFORE + SECONDS - WALL_START)) > "$RUN/logs/seconds"
  if [ "$status" = "$STOPPED" ] || { [ "$status" != 0 ] && was_ended "$name"; }; then
    leave_job "$name"
  elif [ "$status" != 0 ]; then
    STATE[$name]=failed
    echo "failed: $name, with status $status" >&2
    [ "$AT_ONCE" = 1 ] ||
      echo "  $log ends with: $(tail -n 1 "$log" | tr '\r' '\n' | tail -n 1)" >&2
  elif eval "${TEST[$name]}"; then
    STATE[$name]=done
    ACTUAL=$((ACTUAL + took)) FORESEEN=$((FORESEEN + EXPECTED[$name]))
    echo "done: $name, after $took s ($(count done) of ${#JOBS[@]});$(time_left)"
  else
    leave_job "$name"
  fi
}

# It was asked to, as by STOP_AT.
leave_job() {
  STATE[$1]=left HALTED=yes
  echo "left: $1, before its end; the same command goes on from here"
}

# About how long the rest takes, at the speed of what this call has done so far.
time_left() {
  local name seconds left=0
  for name in "${JOBS[@]}"; do
    seconds=$((EXPECTED[$name] * (ACTUAL + 1) / (FORESEEN + 1)))
    case ${STATE[$name]} in
      waiting) left=$((left + seconds)) ;;
      running)
        seconds=$((seconds - SECONDS + STARTED[$name]))
        left=$((left + (seconds > 0 ? seconds : 0)))
        ;;
    esac
  done
  echo " about $(((left / AT_ONCE + 30) / 60)) minutes left"
}

# End what runs, and leave: training saves what it has.
stop_jobs() {
  trap '' INT TERM
  echo "stopping: the same command goes on from here" >&2
  kill -TERM "${!NAME_OF[@]}" 2> /dev/null || true
  wait
  exit 130
}
