# shellcheck shell=bash
# compare_methods.sh sources this file, which runs jobs with dependencies,
# several at a time. When the command is run again, finished jobs are skipped.
#
#   job NAME SECONDS "AFTER ..." "TEST ..." COMMAND...
#                    define a job that runs after the jobs in AFTER, unless the command TEST
#                    succeeds, which means that the job is done; SECONDS is a relative estimate of the
#                    job's duration
#   run_jobs COUNT   run COUNT jobs at a time. If COUNT is 1, jobs log to the terminal;
#                    otherwise each job logs to RUN/logs/NAME.log. Return when all jobs are done;
#                    exit if a job failed or was stopped.
#   was_ended NAME   return whether the time limit stopped a failed job; defined by the caller
JOBS=()
STOPPED=75   # exit status of a tool that was stopped and can resume
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

# Exit, and report why some jobs are not done.
leave() {
  [ "$(count failed)" != 0 ] || exit 0   # stopped on request
  echo "$(count failed) jobs failed, and $(count waiting) depend on them; fix the errors above," \
    "then the same command resumes" >&2
  exit 1
}

# Count the jobs that are in a state.
count() {
  local name number=0
  for name in "${JOBS[@]}"; do [ "${STATE[$name]}" != "$1" ] || number=$((number + 1)); done
  echo "$number"
}

# Print the first job that can start.
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
  if eval "${TEST[$name]}"; then   # another job has produced the result in the meantime
    STATE[$name]=done
    echo "already done: $name"
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
  echo "started: $name ($log)"
}

# Wait until one of the running jobs ends.
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
      echo "  last line of $log: $(tail -n 1 "$log" | tr '\r' '\n' | tail -n 1)" >&2
  elif eval "${TEST[$name]}"; then
    STATE[$name]=done
    ACTUAL=$((ACTUAL + took)) FORESEEN=$((FORESEEN + EXPECTED[$name]))
    echo "done: $name, after $took s ($(count done) of ${#JOBS[@]});$(time_left)"
  else
    leave_job "$name"
  fi
}

# Record that a job was stopped, for example by STOP_AT, and start no further jobs.
leave_job() {
  STATE[$1]=left HALTED=yes
  echo "stopped: $1; the same command resumes"
}

# Estimate the time left from the speed of the finished jobs.
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

# Stop the running jobs and exit. Training jobs save a checkpoint.
stop_jobs() {
  trap '' INT TERM
  echo "stopping; the same command resumes" >&2
  kill -TERM "${!NAME_OF[@]}" 2> /dev/null || true
  wait
  exit 130
}
